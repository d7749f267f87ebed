"""Scripted stand-ins of vLLM's OpenAI server, and the rig that puts a real proxy before them, all in one loop.

A fake does what its script says, and tells what it saw: each request with its headers and body, and whether the other side
went away. Nothing sleeps: tests wait for what happens, each wait with a bound.
"""

import asyncio
import contextlib
import functools
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import openai
from aiohttp import web

from kvloom.vllm.proxy.config import Instance, Settings, make_instance
from kvloom.vllm.proxy.server import Proxy

PATIENCE = 5.0  # seconds: bounds of waits, never waited for when all is well

T = TypeVar("T")
Script = Callable[["Seen"], Awaitable[web.StreamResponse]]


async def soon(what: Awaitable[T]) -> T:
    """Wait, but not for ever."""
    async with asyncio.timeout(PATIENCE):
        return await what


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop go round until it holds, but not for ever."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110  (what is waited for has no event: it is the state of the proxy)
            await asyncio.sleep(0)


class Seen:
    """A request as it reached a fake."""

    def __init__(self, request: web.Request, raw: bytes) -> None:
        self.request = request
        self.path = request.path
        self.headers = request.headers
        self.raw = raw
        self.body: dict[str, Any] = json.loads(raw) if raw else {}
        self.gone = asyncio.Event()  # the other side closed before the answer was complete
        self.ended = asyncio.Event()

    @property
    def kvloom(self) -> dict[str, Any]:
        """What the proxy said to the connector."""
        said = self.body["kv_transfer_params"]["kvloom"]
        assert isinstance(said, dict)
        return said

    @property
    def key(self) -> str:
        key = self.kvloom["transfer"]
        assert isinstance(key, str)
        return key


class FakeVllm:
    """One server. `script` may be changed between requests."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or answer
        self.healthy = True
        self.seen: list[Seen] = []
        self.bugs: list[Exception] = []
        self._arrived: asyncio.Queue[Seen] = asyncio.Queue()
        self._port = 0

    async def start(self) -> "FakeVllm":
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """As a process that dies: connections end, nobody listens. `start` listens at the same port again."""
        for connection in list(self._runner.server.connections if self._runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def arrival(self) -> Seen:
        """The next request that was not asked for yet."""
        return await soon(self._arrived.get())

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request, await request.read())
        self.seen.append(seen)
        self._arrived.put_nowait(seen)
        try:
            return await self.script(seen)
        except (asyncio.CancelledError, ConnectionError):
            seen.gone.set()
            raise
        except Exception as bug:  # of the test itself: the proxy would take it for a server's failure
            self.bugs.append(bug)
            raise
        finally:
            seen.ended.set()


# --- what vLLM writes


def chunk(seen: Seen, text: str | None = None, **rest: Any) -> bytes:
    """One event of a stream, of a completion or a chat."""
    if "chat" in seen.path:
        choice: dict[str, Any] = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": None}
    else:
        choice = {"index": 0, "text": text or "", "finish_reason": None}
    document = {"id": "cmpl-1", "object": "chunk", "created": 1, "model": "m", "choices": [choice], **rest}
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def role_chunk(seen: Seen) -> bytes:
    """What vLLM sends in a chat before the first token."""
    return chunk(seen, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])


DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 6}}


def document(seen: Seen, text: str) -> dict[str, Any]:
    """An answer in one piece."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if "chat" in seen.path else {"text": text}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}


def error(status: int, message: str = "no") -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


async def begin(seen: Seen, *first: bytes) -> web.StreamResponse:
    """A stream's headers and first bytes."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(seen.request)
    for data in first:
        await response.write(data)
    return response


def stream_of(seen: Seen) -> list[bytes]:
    """A whole stream: two tokens, usage where it was asked for."""
    events = [role_chunk(seen)] if "chat" in seen.path else []
    events += [chunk(seen, "Hello"), chunk(seen, " wörld 🧵")]
    if (seen.body.get("stream_options") or {}).get("include_usage"):
        events.append(chunk(seen, choices=[], usage=USAGE))
    return [*events, DONE]


async def answer(seen: Seen) -> web.StreamResponse:
    """What a healthy server says."""
    if not seen.body.get("stream"):
        return web.json_response(document(seen, "Hello wörld 🧵"))
    response = await begin(seen, *stream_of(seen))
    await response.write_eof()
    return response


async def hang(seen: Seen) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


async def die(seen: Seen) -> web.StreamResponse:
    """The connection breaks with no answer."""
    assert seen.request.transport is not None
    seen.request.transport.abort()
    return web.Response()


async def torn(seen: Seen) -> web.StreamResponse:
    """The connection ends within the stream's second event."""
    response = await begin(seen, chunk(seen, "a"), b'data: {"half an ev')
    assert seen.request.transport is not None
    seen.request.transport.close()
    return response


def held(finish: asyncio.Event) -> Script:
    """A stream that goes on only when `finish` is set."""

    async def script(seen: Seen) -> web.StreamResponse:
        response = await begin(seen, chunk(seen, "a"))
        await finish.wait()
        await response.write(DONE)
        return response

    return script


def says(status: int, message: str = "no", **headers: str) -> Script:
    """An HTTP error in vLLM's form."""

    async def script(seen: Seen) -> web.StreamResponse:
        return web.json_response(error(status, message), status=status, headers=headers)

    return script


def in_turn(*scripts: Script) -> Script:
    """One script for each request; the last for all further ones."""
    left = list(scripts)

    async def script(seen: Seen) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(seen)

    return script


# --- the rig


class Rig:
    """A proxy with its fakes and its clients."""

    def __init__(self, prefill: list[FakeVllm], decode: list[FakeVllm], proxy: Proxy, session: aiohttp.ClientSession) -> None:
        self.prefill = prefill
        self.decode = decode
        self.proxy = proxy
        self.session = session
        self.url = f"http://127.0.0.1:{proxy.port}"

    @functools.cached_property
    def openai(self) -> openai.AsyncOpenAI:
        """The real client. It retries nothing: what the proxy says is what it sees."""
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="secret", max_retries=0, timeout=PATIENCE)

    def post(self, path: str = "/v1/completions", **body: Any) -> "asyncio.Task[Got]":
        """A plain client that reads everything."""
        return asyncio.create_task(self._post(path, body))

    async def _post(self, path: str, body: dict[str, Any]) -> "Got":
        data = io.BytesIO(json.dumps(body).encode())
        async with self.session.post(self.url + path, data=data, headers={"Content-Type": "application/json"}) as response:
            return Got(response.status, response.headers, await response.read())

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value, 0 where there is none."""
        self.proxy.metrics.text((("prefill", self.proxy.prefill), ("decode", self.proxy.decode)))
        return self.proxy.metrics.registry.get_sample_value(name, labels) or 0.0

    async def quiet(self) -> None:
        """Until no request is open and no load is left, within a bound."""

        members = [*self.proxy.prefill.members, *self.proxy.decode.members]
        await until(lambda: not self.proxy.open_requests and not any(member.open or member.tokens for member in members))


class Got:
    """What a plain client got."""

    def __init__(self, status: int, headers: Any, raw: bytes) -> None:
        self.status = status
        self.headers = headers
        self.raw = raw

    @property
    def json(self) -> dict[str, Any]:
        document = json.loads(self.raw)
        assert isinstance(document, dict)
        return document


def instances(prefill: list[FakeVllm], decode: list[FakeVllm]) -> dict[str, tuple[Instance, ...]]:
    return {
        "prefill": tuple(
            make_instance("prefill", {"url": fake.url, "control": f"tcp://127.0.0.1:{5555 + n}"})
            for n, fake in enumerate(prefill)
        ),
        "decode": tuple(make_instance("decode", {"url": fake.url}) for fake in decode),
    }


@contextlib.asynccontextmanager
async def rig(prefill: int = 1, decode: int = 1, decode_: tuple[Instance, ...] = (), **settings: Any) -> AsyncIterator[Rig]:
    """Fakes, a proxy that has looked at them once and won't by itself again, and a client."""
    fakes = [[await FakeVllm().start() for _ in range(count)] for count in (prefill, decode)]
    said = {"port": 0, "health_interval": 3600.0, "alone_below": 0, "prefill_linger": 0.2} | instances(*fakes) | settings
    said["decode"] += decode_
    proxy = Proxy(Settings(**said))
    await proxy.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE), auto_decompress=False) as session:
            made = Rig(fakes[0], fakes[1], proxy, session)
            yield made
            if "openai" in vars(made):
                await made.openai.close()
    finally:
        await proxy.close()
        for fake in (*fakes[0], *fakes[1]):
            await fake.stop()
    assert not [bug for fake in (*fakes[0], *fakes[1]) for bug in fake.bugs]
