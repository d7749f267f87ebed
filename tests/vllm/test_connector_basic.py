"""A prefill and a decode vLLM with KVLoomConnector: decode's tokens are those of one vLLM alone, and its KV is prefill's, byte for byte."""

import pytest
from meeting import Meeting
from models import model
from settings import Settings

LONGEST = 1_900  # tokens: all of `text`


@pytest.fixture(scope="module")
def meeting():
    with Meeting(Settings(model("llama")), Settings(model("llama"), block=64)) as made:
        yield made.ready()


@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 700, LONGEST])
def test_tokens_are_those_of_one_server(meeting, alone, text, tokens, decode_first):
    prompt = [tokens % 256, int(decode_first), *text][:tokens]
    assert meeting.ask(f"{tokens}-{decode_first}", prompt, decode_first=decode_first) == alone.tokens(prompt, 12)
    meeting.quiet()


def test_prefixes_that_both_have_are_not_sent(meeting, alone, text):
    """Shared prefixes; decode has other tokens in its cache than prefill has."""
    begin = [9, 9, 9, *text]
    meeting.prefill.tokens(begin[:600], 1)
    meeting.decode.tokens(begin[:300], 1)
    for name, prompt in {"on both": begin[:800], "decode's more": begin[:300], "own tail": [*begin[:450], *[5] * 300], "all": begin[:800]}.items():
        assert meeting.ask(name, prompt) == alone.tokens(prompt, 12), name
    meeting.quiet()


def test_bytes_are_prefills(meeting, text):
    prompt = [77, *text][:1_000]
    meeting.decode.forget_prefixes()
    meeting.prefill.forget_prefixes()
    meeting.ask("bytes", prompt, max_tokens=1)
    sent, landed = meeting.prefill.sums("bytes-p", 999), meeting.decode.sums("bytes", 999)
    assert landed == sent and len(sent) == 4 and len(set(sent.values())) == 4


def test_many_at_once(meeting, alone, text):
    prompts = {f"many-{n}": [n, *text][: 100 + 150 * n] for n in range(8)}
    for name, prompt in prompts.items():
        to_prefill, to_decode = meeting.parameters()
        meeting.decode.add(name, prompt, 12, to_decode)
        meeting.prefill.add(f"{name}-p", prompt, 1, to_prefill)
    for name, prompt in prompts.items():
        assert meeting.decode.ended(name).tokens == alone.tokens(prompt, 12), name
    meeting.quiet()


def test_a_request_without_a_transfer_is_computed(meeting, alone, text):
    assert meeting.decode.tokens(text[:200], 12) == alone.tokens(text[:200], 12) == meeting.prefill.tokens(text[:200], 12)
    meeting.quiet()
