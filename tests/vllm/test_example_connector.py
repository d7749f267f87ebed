"""vLLM's own ExampleConnector from a prefill server to a decode server, as the baseline: whole requests, by files, after the prefill.

It can't take a prompt that is computed in several chunks (in 0.32 its decode server then dies), so here a step takes the whole prompt. The two
are asked one after the other, which is how a proxy has to use it. Printed: what a request takes at each and at a single server, and from it the
exposed tail, the time that the decode server needs before its first token and would not need if the KV were there already.
"""

import statistics

import pytest
from ask import complete, prompts_of, stream
from harness import Server, running
from settings import connector, of

LENGTHS = [129, 300, 700, 1500]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("kv"))
    settings = of("llama", chunk=2048, prefix_caching=False)
    prefill = settings.but(connector=connector("ExampleConnector", role="kv_producer", shared_storage_path=folder), cores=(0,))
    decode = settings.but(connector=connector("ExampleConnector", role="kv_consumer", shared_storage_path=folder), cores=(1,))
    with running(Server(prefill, "prefill"), Server(decode, "decode")) as both:
        yield both


def first_token(url: str, prompt: list[int]) -> float:
    """Seconds until the first token."""
    with stream(url, prompt, 2) as reading:
        reading.next()
        return reading.times[0]


def test_the_decode_server_goes_on_where_the_prefill_server_ended(pair, shown):
    prefill, decode = pair
    for prompt in prompts_of(LENGTHS, seed=3):
        alone = complete(prefill.url, prompt, 16)  # it stores while it computes all by itself: the single server's answer
        handed_on = complete(decode.url, prompt, 16)
        assert handed_on.tokens == alone.tokens
    shown(f"ExampleConnector: the same tokens from prefill + decode as from one server, for prompts of {LENGTHS}")


def test_what_the_transfer_takes_beside_the_prefill(pair, shown):
    prefill, decode = pair
    for length in (256, 1024, 1900):
        stored, loaded, warm = [], [], []
        for prompt in prompts_of([length] * 3, seed=length):
            stored.append(first_token(prefill.url, prompt))
            loaded.append(first_token(decode.url, prompt))
            warm.append(first_token(decode.url, prompt[:1]))
        p, d, one = (1000 * statistics.median(times) for times in (stored, loaded, warm))
        shown(f"ExampleConnector, {length:4d} tokens: prefill and store {p:6.1f} ms, then load and first token {d:6.1f} ms; exposed tail {d - one:6.1f} ms")
    assert prefill.wait_quiet(10).quiet
    assert decode.wait_quiet(10).quiet
