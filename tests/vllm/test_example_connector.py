"""vLLM's own ExampleConnector from a prefill server to a decode server, as the baseline: whole requests, by files, after the prefill.

It can't take a prompt that is computed in several chunks, nor one of a single token (in 0.32 its decode server's engine then dies), so here a step
takes the whole prompt. The two are asked one after the other, which is how a proxy has to use it. Printed: until the first token at each; the
exposed tail is the decode server's, less one step of decode, which it would take if the KV were there already. Medians of three.
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


def first_and_next(url: str, prompt: list[int], after: int = 8) -> tuple[float, float]:
    """Seconds until the first event of the stream, and of each token behind it: one step of decode."""
    with stream(url, prompt, 1 + after) as reading:
        behind = 1 + after - len(reading.next())
        reading.rest()
        return reading.times[0], (reading.times[-1] - reading.times[0]) / max(behind, 1)


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
        stored, loaded, steps = [], [], []
        for prompt in prompts_of([length] * 3, seed=length):
            stored.append(first_and_next(prefill.url, prompt)[0])
            first, step = first_and_next(decode.url, prompt)
            loaded.append(first)
            steps.append(step)
        p, d, one = (1000 * statistics.median(times) for times in (stored, loaded, steps))
        shown(f"ExampleConnector, {length:4d} tokens: prefill and store {p:6.1f} ms, then load and first token {d:6.1f} ms; exposed tail {d - one:6.1f} ms")
    assert prefill.wait_quiet(10).quiet
    assert decode.wait_quiet(10).quiet
