"""Other kinds of caches and shardings with two real engines: MLA, sliding windows (two cache groups), one KV head, tp on either side.

Two proofs. Tokens: those of one vLLM alone. Bytes: the checksums of each layer's rows, prefill's and decode's. Where tokens say nothing, bytes do:
the experts of the MLA model run in bfloat16 only, where chunks of other sizes give other tokens.
"""

import contextlib
import secrets

import pytest
from ask import prompts_of
from instance import Instance
from meeting import SECONDS, Meeting, free_ports, kvloom_connector
from models import model
from settings import Settings

LENGTHS = (1, 17, 128, 129, 256, 257, 300, 385, 700, 1_100)

KINDS = {
    "mla": (Settings(model("mla"), dtype="bfloat16", prefix_caching=False),) * 2,
    "window": (Settings(model("window")),) * 2,
    "one head": (Settings(model("llama1")), Settings(model("llama1"), block=64)),
    "tp 2 to 1": (Settings(model("llama"), tp=2, cores=(0, 1)), Settings(model("llama"))),
    "tp 1 to 2": (Settings(model("llama")), Settings(model("llama"), tp=2, cores=(0, 1))),
}
LEAST_LAYERS = 4


def prompts() -> dict[int, list[int]]:
    (text,) = prompts_of([max(LENGTHS)], seed=11)
    return {length: [length % 256, *text][:length] for length in LENGTHS}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mla"])
def test_tokens_are_those_of_one_server(kind):
    prefill, decode = KINDS[kind]
    with contextlib.ExitStack() as stack:
        with Instance(decode.but(tp=1, cores=(1,)), "alone") as alone:
            alone.ready()
            wanted = {length: alone.tokens(prompt, 12) for length, prompt in prompts().items()}
        meeting = stack.enter_context(Meeting(prefill, decode)).ready()
        for length, prompt in prompts().items():
            assert meeting.ask(f"{length}", prompt) == wanted[length], length
        assert meeting.ask("again", prompts()[1_100]) == wanted[1_100]  # with what both sides have kept
        meeting.quiet()


@pytest.mark.parametrize("kind", ["mla", "window", "one head"])
def test_bytes_are_prefills(kind):
    with Meeting(*KINDS[kind]) as meeting:
        meeting.ready()
        for length, prompt in prompts().items():
            meeting.ask(f"{length}", prompt, max_tokens=1)
            sent, landed = meeting.prefill.sums(f"{length}-p", length - 1), meeting.decode.sums(f"{length}", length - 1)
            assert landed == sent and len(sent) >= LEAST_LAYERS, length
            assert length == 1 or len(set(sent.values())) == len(sent), length  # random rows: no two layers are alike
        meeting.quiet()


def test_a_block_of_which_a_window_loaded_a_part_is_no_prefix_of_others():
    """600 tokens leave block 2 (256 to 383) loaded from 344 on. 520 tokens that begin alike read it from 264 on: they must not find it."""
    (text,) = prompts_of([600], seed=17)
    with Meeting(*KINDS["window"]) as meeting:
        meeting.ready()
        meeting.ask("long", text)
        meeting.ask("short", [*text[:512], *text[:8]], max_tokens=1)
        assert meeting.decode.sums("short", 519) == meeting.prefill.sums("short-p", 519)
        meeting.quiet()


def test_latent_tokens_are_those_that_prefill_would_have_gone_on_with():
    """Chunks of 256, so that prefill computes the last token of these prompts alone, as decode does: the same sums, the same bits."""
    with Meeting(*KINDS["mla"]) as meeting:
        meeting.ready()
        for prompt in prompts_of([257, 513, 1_025], seed=13):
            length = len(prompt)
            to_prefill, to_decode = meeting.parameters()
            meeting.decode.add(f"{length}", prompt, 24, to_decode)
            meeting.prefill.add(f"{length}-p", prompt, 24, to_prefill)
            assert meeting.decode.ended(f"{length}").tokens == meeting.prefill.ended(f"{length}-p").tokens, length
        meeting.quiet()


def test_stages_of_a_pipeline_send_and_receive():
    """pp 2 to 1 and back, one after another and all at once; the engine of one stage is the one that tells what is right.

    vLLM 0.32 can't do pp on CPUs with enforce_eager, whatever the connector: its warm-up, which makes the later stages' buffers, is left out there
    (warming_up_model, vllm/v1/worker/cpu_model_runner.py). So the stages' model is traced.
    """
    ports = {"stages": [free_ports(2)], "whole": [free_ports(1)]}
    ports["stages"].append(ports["stages"][0] + 1)
    two, one = (
        Settings(model("llama"), connector=kvloom_connector("kv_both", control_port=ports["stages"][0]), pp=2, traced=True, cores=(0, 1)),
        Settings(model("llama"), connector=kvloom_connector("kv_both", control_port=ports["whole"][0]), cores=(1,)),
    )
    with Instance(two, "stages") as stages, Instance(one, "whole") as whole:
        whole.ready()
        wanted = {length: whole.tokens(prompt, 12) for length, prompt in prompts().items()}
        stages.ready()
        for prefill, decode in ((stages, whole), (whole, stages)):
            prefill.forget_prefixes()
            decode.forget_prefixes()
            for turn in ("one", "all"):
                for length, prompt in prompts().items():
                    name, said = f"{prefill.what}-{turn}-{length}", {"transfer": secrets.token_hex(16), "seconds": SECONDS}
                    addresses = [f"tcp://127.0.0.1:{port}" for port in ports[prefill.what]]
                    decode.add(name, prompt, 12, {"kvloom": {"role": "decode", "prefill": addresses, **said}})
                    prefill.add(f"{name}-p", prompt, 1, {"kvloom": {"role": "prefill", **said}})
                    assert turn == "all" or decode.ended(name).tokens == wanted[length], name
            assert {length: decode.ended(f"{prefill.what}-all-{length}").tokens for length in wanted} == wanted
            prefill.quiet(5.0)
            decode.quiet(5.0)
        assert "was not loaded" not in stages.log() + whole.log()
