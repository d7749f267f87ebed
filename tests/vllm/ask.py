"""Asking servers (or the proxy before them) for completions: greedy, with token ids, and streams that can be left.

    complete(server.url, "A loom", 16).tokens            one answer
    together(server.url, prompts, 16, at_once=8)         many, in the order of the prompts
    with stream(server.url, "A loom", 500) as reading:   reading.next() ...; leaving the block closes the connection: vLLM aborts
"""

import dataclasses
import http.client
import json
import random
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

from harness import ANSWER_DEADLINE, post
from settings import NAME

Prompt = str | list[int]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer. `tokens` are the ids that were generated; times in seconds, from the request's start."""

    tokens: tuple[int, ...]
    text: str
    prompt_tokens: int
    finish: str
    seconds: float
    kv_transfer_params: dict | None


def body_of(prompt: Prompt, max_tokens: int, **more) -> dict:
    """What is sent: greedy, to the last of `max_tokens` tokens, ids in the answer."""
    return {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True, **more}


def complete(url: str, prompt: Prompt, max_tokens: int = 16, deadline: float = ANSWER_DEADLINE, headers: dict | None = None, **more) -> Completion:
    """Ask and wait for the whole answer. @error the server's: ServerError."""
    begin = time.monotonic()
    answer = post(url, "/v1/completions", body_of(prompt, max_tokens, **more), deadline, headers)
    choice = answer["choices"][0]
    return Completion(
        tuple(choice["token_ids"] or ()), choice["text"], answer["usage"]["prompt_tokens"], choice["finish_reason"], time.monotonic() - begin,
        answer.get("kv_transfer_params"),
    )  # fmt: skip


def together(url: str, prompts: list[Prompt], max_tokens: int = 16, at_once: int = 8, **more) -> list[Completion]:
    """Ask for all, `at_once` at a time. @post answers in the order of the prompts."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: complete(url, prompt, max_tokens, **more), prompts))


class Stream:
    """An answer as it comes. Leaving the `with` block closes the connection, wherever the answer is."""

    def __init__(self, url: str, prompt: Prompt, max_tokens: int, deadline: float = ANSWER_DEADLINE, headers: dict | None = None, **more):
        place = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname, place.port, timeout=deadline)
        body = json.dumps(body_of(prompt, max_tokens, stream=True, **more))
        self.begin = time.monotonic()
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **(headers or {})})
        self._answer: http.client.HTTPResponse | None = None
        self.tokens: list[int] = []
        self.times: list[float] = []  # of each event with tokens, seconds from the request's start

    def next(self) -> list[int] | None:
        """The ids of the next event, None at the end. @error an error of the server, in its status or in the stream: RuntimeError."""
        if self._answer is None:
            self._answer = self._connection.getresponse()
            if self._answer.status != 200:
                raise RuntimeError(f"the server answered {self._answer.status}: {self._answer.read()[:2000].decode(errors='replace')}")
        while line := self._answer.readline():
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return None
            if not line.startswith(b"data: "):
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"the stream said {event['error']}")
            if event["choices"] and (ids := event["choices"][0].get("token_ids")):
                self.tokens += ids
                self.times.append(time.monotonic() - self.begin)
                return ids
        return None

    def rest(self) -> list[int]:
        """All ids, read to the end."""
        while self.next() is not None:
            pass
        return self.tokens

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        if self._answer is not None:
            self._answer.close()  # http.client keeps the socket open for the answer alone once it has begun
        self._connection.close()


def stream(url: str, prompt: Prompt, max_tokens: int, **more) -> Stream:
    """Ask for a stream; nothing is read yet."""
    return Stream(url, prompt, max_tokens, **more)


def prompts_of(lengths: list[int], seed: int = 0, first: int = 0, beyond: int = 256) -> list[list[int]]:
    """Random prompts of these lengths, as token ids in [first, beyond): bytes, for the tiny models. Equal seeds, equal prompts."""
    draw = random.Random(seed)
    return [[draw.randrange(first, beyond) for _ in range(length)] for length in lengths]


def new_prompt(length: int) -> list[int]:
    """One of which no prefix is in any cache."""
    return prompts_of([length], seed=time.monotonic_ns())[0]
