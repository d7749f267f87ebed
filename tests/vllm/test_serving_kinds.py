"""Servers behind the proxy with tiny random models: tp of 2 to 1 and back, sliding windows, MLA.  Answers as one server's, each byte compared.

The two Llama servers have both roles, so the way back needs no others. What computes where is as in test_serving.py; the text is bytes.
MLA runs in bfloat16, where other chunks give other last bits: there all bytes are compared, and answers where the chunks are equal.
"""

import pathlib

import pytest
from ask import together
from harness import running
from serving import AT_ONCE, TOKENS, Site, bytes_are_prefills, forget, forty, hits_of, hits_wanted, license_text, served, turned, warm, way
from settings import of



@pytest.fixture(scope="module")
def text() -> list[int]:
    return list(license_text().encode())


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    return tmp_path / "sums"


def answers_are_one_servers(text: list[int], folder: pathlib.Path, prefill: Site, decode: Site, alone: list | None = None) -> list:
    """One way: hits that differ, all prompts, all bytes. @return the single server's answers."""
    prompts = forty(text)
    forget(prefill, decode)
    warm(text, prefill, decode)
    with way(prefill, decode) as proxy:
        assert hits_of(text, folder, prefill, proxy) == hits_wanted(prefill, decode)
        answers, seen = served(prompts, folder, prefill, decode, proxy)
    bytes_are_prefills(seen, prefill, decode)
    if alone is None:
        forget(decode)
        alone = together(decode.url, prompts, TOKENS, AT_ONCE)
    assert [(answer.tokens, answer.text) for answer in answers] == [(one.tokens, one.text) for one in alone]
    return alone


def test_tp_2_to_1_and_back(text, folder):
    two, one = Site("tp 2", "kv_both", of("llama", tp=2), folder), Site("tp 1", "kv_both", of("llama"), folder)
    with running(two, one):
        alone = answers_are_one_servers(text, folder, two, one)
        answers_are_one_servers(text, folder, one, two, alone)


def test_sliding_windows(text, folder):
    prefill, decode = Site("prefill", "kv_producer", of("window"), folder), Site("decode", "kv_consumer", of("window"), folder)
    prompts = forty(text)
    with running(prefill, decode):
        with way(prefill, decode) as proxy:
            answers, seen = served(prompts, folder, prefill, decode, proxy)
        bytes_are_prefills(seen, prefill, decode)
        forget(decode)
        alone = together(decode.url, prompts, TOKENS, AT_ONCE)
    assert [answer.tokens for answer in answers] == [one.tokens for one in alone]


def test_latent_rows(text, folder):
    """All bytes, in blocks of 128 to 64; and tokens where they must be equal, to a second decode server.

    Attention to latent rows is bfloat16: it adds up in another order in blocks of another size, or where a step has other tokens, and a token may change.
    So the second server has prefill's blocks, prompts come one at a time, and behind whole chunks prefill computes their last token alone, as decode does.
    """
    settings = of("mla", prefix_caching=False)
    prefill, decode = Site("prefill", "kv_producer", settings, folder), Site("decode", "kv_consumer", settings.but(block=64, blocks=512), folder)
    like_prefill = Site("decode like prefill", "kv_consumer", settings, folder)
    prompts, lone_last = forty(text), [turned(text, length)[:length] for length in range(settings.chunk + 1, len(text), settings.chunk) if length < 1_900]
    with running(prefill, decode, like_prefill):
        with way(prefill, decode) as proxy:
            _, seen = served(prompts, folder, prefill, decode, proxy)
        bytes_are_prefills(seen, prefill, decode)
        assert len(seen) == len(prompts) - 1  # one token has nothing before it
        with way(prefill, like_prefill) as proxy:
            answers, seen = served(lone_last, folder, prefill, like_prefill, proxy, at_once=1)
        bytes_are_prefills(seen, prefill, like_prefill)
        assert len(seen) == len(lone_last)
        alone = together(prefill.url, lone_last, TOKENS, at_once=1)
    assert [answer.tokens for answer in answers] == [one.tokens for one in alone]
