"""Other kinds of caches and shardings with two real engines: MLA, sliding windows (two cache groups), one KV head, tp on either side."""

import contextlib
import random

import pytest
from instance import Instance
from meeting import Meeting
from models import model
from settings import Settings

LENGTHS = (1, 17, 128, 129, 256, 257, 300, 385, 700, 1_100)

KINDS = {
    "mla": (Settings(model("mla"), dtype="bfloat16", block=16, blocks=1_024, prefix_caching=False),) * 2,  # its experts run in no other type
    "window": (Settings(model("window")),) * 2,
    "one head": (Settings(model("llama1")), Settings(model("llama1"), block=64)),
    "tp 2 to 1": (Settings(model("llama"), tp=2, cores=(0, 1)), Settings(model("llama"))),
    "tp 1 to 2": (Settings(model("llama")), Settings(model("llama"), tp=2, cores=(0, 1))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_server(kind):
    prefill, decode = KINDS[kind]
    drawn = random.Random(11)
    text = [drawn.randrange(256) for _ in range(max(LENGTHS))]
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(Instance(decode.but(tp=1, cores=(1,)), "alone")).ready()
        wanted = {length: alone.tokens([length % 256, *text][:length], 12) for length in LENGTHS}
        alone.close()
        meeting = stack.enter_context(Meeting(prefill, decode)).ready()
        for length in LENGTHS:
            assert meeting.ask(f"{length}", [length % 256, *text][:length]) == wanted[length], length
        if prefill.prefix_caching:  # again, with what both sides have kept
            assert meeting.ask("again", [LENGTHS[-1] % 256, *text][: LENGTHS[-1]]) == wanted[LENGTHS[-1]]
        meeting.quiet()
