"""SmolLM2-135M with its real weights, prefill and decode servers behind the proxy: answers are those of one server, and the KV is prefill's.

Four servers, started once: prefill with blocks of 128 and 32, decode with 128 and 64. Chunks of 256, prefix caches on both sides with other contents,
8 requests at once; each byte that landed is compared (witness.py). The single server's answers are the second decode server's, without transfers.
32 is the smallest block of vLLM 0.32 on CPUs: CPU_ATTN takes multiples of it (cpu_attn.py, get_supported_kernel_block_sizes).
"""

import pathlib
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ask import stream, together
from harness import running, until
from models import model
from serving import (
    AT_ONCE, QUIET, TOKENS, Site, bytes_are_prefills, forget, forty, fresh, hits_of, hits_wanted, license_text, served, warm, way,
)  # fmt: skip
from settings import NAME, Settings

WAYS = {"128 to 128": ("prefill 128", "decode 128"), "128 to 64": ("prefill 128", "decode 64"), "32 to 128": ("prefill 32", "decode 128")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("witness") / "sums"


@pytest.fixture(scope="module")
def sites(folder) -> dict[str, Site]:
    made = []
    for name, role, blocks in (("prefill", "kv_producer", (128, 32)), ("decode", "kv_consumer", (128, 64))):
        for block in blocks:
            settings = Settings(model("smollm2"), block=block, blocks=200 * 128 // block)
            made.append(Site(f"{name} {block}", role, settings, folder))
    with running(*made):
        yield {site.what: site for site in made}


@pytest.fixture(scope="module")
def text() -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model("smollm2") / "tokenizer.json")).encode(license_text()).ids


@pytest.fixture(scope="module")
def prompts(text) -> list[list[int]]:
    return forty(text)


@pytest.fixture(scope="module")
def alone(sites, prompts):
    """One server's answers, being computed while the first test runs on the other servers."""
    with ThreadPoolExecutor(1) as beside:
        yield beside.submit(together, sites["decode 64"].url, prompts, TOKENS, 4)


@pytest.mark.parametrize("which", WAYS)
def test_answers_are_one_servers(which, sites, folder, text, prompts, alone, shown):
    prefill, decode = (sites[name] for name in WAYS[which])
    if decode.what == "decode 64":
        alone.result()
    forget(prefill, decode)
    warm(text, prefill, decode)
    begin = time.monotonic()
    with way(prefill, decode) as proxy:
        assert hits_of(text, folder, prefill, proxy) == hits_wanted(prefill, decode)
        answers, seen = served(prompts, folder, prefill, decode, proxy)
    shown(f"{which}: {len(prompts)} prompts in {time.monotonic() - begin:.0f} s, {sum(s.end - s.begin for s in seen)} tokens landed, "
          f"{sum(s.pieces for s in seen)} sums of them compared")  # fmt: skip
    bytes_are_prefills(seen, prefill, decode)
    assert [(answer.tokens, answer.text) for answer in answers] == [(one.tokens, one.text) for one in alone.result()]


def test_the_openai_client_is_answered_as_by_one_server(sites, text):
    """Chat and completions, streamed and not, with the client that users have."""
    prefill, decode = sites["prefill 128"], sites["decode 64"]
    forget(prefill, decode)
    messages = [
        {"role": "system", "content": "You answer in one sentence. " * 40},
        {"role": "user", "content": "What does a loom do?"},
    ]
    with way(prefill, decode) as proxy, client_of(proxy.url) as served:
        before = decode.metrics()["vllm:external_prefix_cache_hits_total"]
        chat, completion = asked(served, messages, text[:500])
        assert decode.metrics()["vllm:external_prefix_cache_hits_total"] > before
    forget(prefill, decode)
    with client_of(decode.url) as alone:
        assert (chat, completion) == asked(alone, messages, text[:500])
    assert len(set(chat)) == len(set(completion)) == 1, "streamed and not, the same"


def client_of(url: str):
    import httpx
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False))


def asked(client, messages: list[dict], prompt: list[int]) -> tuple[list[tuple], list[tuple]]:
    """((text, prompt's tokens, answer's tokens) of a chat and of a completion), each in one piece and streamed."""
    how = dict(model=NAME, temperature=0.0, max_tokens=24)
    streamed = dict(stream=True, stream_options={"include_usage": True}, **how)
    chat = client.chat.completions.create(messages=messages, **how)
    chats = [(chat.choices[0].message.content, chat.usage.prompt_tokens, chat.usage.completion_tokens)]
    chunks = list(client.chat.completions.create(messages=messages, **streamed))
    chats.append(("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), *usage_of(chunks)))
    whole = client.completions.create(prompt=prompt, **how)
    wholes = [(whole.choices[0].text, whole.usage.prompt_tokens, whole.usage.completion_tokens)]
    chunks = list(client.completions.create(prompt=prompt, **streamed))
    wholes.append(("".join(c.choices[0].text for c in chunks if c.choices), *usage_of(chunks)))
    return chats, wholes


def usage_of(chunks: list) -> tuple[int, int]:
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    return usage.prompt_tokens, usage.completion_tokens


BACKGROUND = 3  # streams that decode on the decode server all the time
STEADY = 30  # tokens of each, before transfers begin


def test_a_busy_decode_server_goes_on_while_transfers_land(sites, folder, text, prompts, alone, shown):
    prefill, decode = sites["prefill 128"], sites["decode 128"]
    forget(prefill, decode)
    fresh(folder)
    folder.rmdir()  # sums would take time of the servers
    chosen = [place for place, prompt in enumerate(prompts) if len(prompt) in (300, 512, 700, 900, 1_100)]
    others = [text[200 + 50 * number :][:40] for number in range(BACKGROUND)]
    with way(prefill, decode) as proxy, ThreadPoolExecutor(BACKGROUND + 1) as pool:
        background = [Decoding(decode, prompt) for prompt in others]
        running_on = [pool.submit(one.go_on) for one in background]
        for one in background:
            one.reached(STEADY)
        began = time.monotonic()
        answers = together(proxy.url, [prompts[place] for place in chosen], TOKENS, AT_ONCE)
        ended = time.monotonic()
        for one in background:
            one.leave()
        assert not any(future.exception() for future in running_on)
    prefill.wait_quiet(QUIET)
    decode.wait_quiet(QUIET)
    quiet = [gap for one in background for gap in one.gaps(one.begin, began)]
    busy = [gap for one in background for gap in one.gaps(began, ended)]
    shown(f"a decode server with {BACKGROUND} streams, time per token: {described(quiet)} without transfers, "
          f"{described(busy)} while {len(chosen)} prompts of {sum(len(prompts[place]) for place in chosen)} tokens land")  # fmt: skip
    assert [answer.tokens for answer in answers] == [alone.result()[place].tokens for place in chosen]
    again = together(sites["decode 64"].url, others, min(len(one.tokens) for one in background))
    assert all(list(one.tokens[: len(answer.tokens)]) == list(answer.tokens) for one, answer in zip(background, again))


class Decoding:
    """A stream that is read in a thread of its own until it is told to leave."""

    def __init__(self, site: Site, prompt: list[int]):
        self._stream = stream(site.url, prompt, 1_500)
        self.begin, self.tokens, self.times = time.monotonic(), [], []
        self._left = threading.Event()

    def go_on(self) -> None:
        with self._stream as reading:
            while not self._left.is_set() and (ids := reading.next()) is not None:
                self.tokens += ids
                self.times.append(time.monotonic())

    def reached(self, tokens: int) -> None:
        until(lambda: len(self.tokens) >= tokens, 60.0, f"{tokens} tokens of the stream are there")

    def leave(self) -> None:
        self._left.set()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Between tokens that came in [begin, end), seconds."""
        inside = [at for at in self.times if begin <= at < end]
        return [later - at for at, later in zip(inside, inside[1:])]


def described(gaps: list[float]) -> str:
    """The mean and the longest. No median: where the server's tokens reach the client in bursts, most gaps are 0 and say nothing of decoding."""
    return f"{1e3 * statistics.mean(gaps):.0f} ms in the mean, {1e3 * max(gaps):.0f} ms the longest ({len(gaps)} tokens)"
