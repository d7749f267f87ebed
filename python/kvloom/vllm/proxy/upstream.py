"""One request to one server, until it has failed or its first content is there.

A stream's answer begins with bytes that say nothing yet: HTTP headers (vLLM sends them before the first token), comments that
keep connections alive, and in a chat the chunk that only names the role. As long as only these came, the request can be sent
elsewhere and the client never knows; and an error that vLLM reports as the first event of a stream (finish_reason "error": a
transfer that failed under kv_load_failure_policy=fail) is an error like a 500.

Owner: the loop's thread. Every exit closes the connection or gives it back: vLLM aborts a request when its connection closes.
Source: vLLM 0.32 entrypoints/openai/*/serving.py, serve/utils/{sse_keep_alive,api_utils}.py.
"""

import asyncio
import dataclasses
import io
import json
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp

from kvloom.vllm.proxy.choose import Lease, Member
from kvloom.vllm.proxy.config import Role, Settings
from kvloom.vllm.proxy.errors import Refused

MOST_ERROR = 64 * 1024  # bytes kept of a server's error
MOST_EVENT = 1024 * 1024  # bytes of one event of a stream; a longer one is passed on in parts
MOST_HELD = 256 * 1024  # bytes held back while they say nothing
BLANK_LINE = re.compile(rb"\n\n|\r\n\r\n|\r\r")
AddressOf = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]  # as getaddrinfo gives it
LATER = (408, 425, 429)  # "not now": another server may


class Failed(Exception):
    """A server's request that did not succeed. `again`: another attempt may."""

    def __init__(
        self,
        role: Role,
        member: Member,
        reason: str,
        *,
        status: int = 502,
        again: bool = True,
        body: bytes | None = None,
        kind: str = "application/json",
        detail: str = "",
    ) -> None:
        super().__init__(reason)
        self.role = role
        self.member = member
        self.reason = reason  # for clients: names no machine
        self.detail = detail  # for the log
        self.status = status
        self.again = again
        self.body = body  # as the server wrote it, if it wrote one
        self.kind = kind  # its Content-Type
        self.retry_after: str | None = None


class Events:
    """Cuts a byte stream into whole events (a blank line ends one). Law: the bytes of all pieces, and the rest, are the bytes
    fed."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self.rest + data
        events, start = [], 0
        for blank in BLANK_LINE.finditer(data):
            events.append(data[start : blank.end()])
            start = blank.end()
        self.rest = data[start:]
        if len(self.rest) > MOST_EVENT:
            events.append(self.rest)
            self.rest = b""
        return events


@dataclasses.dataclass(slots=True)
class Opened:
    """An answer that has begun."""

    member: Member
    response: aiohttp.ClientResponse
    events: Events | None = None  # of a stream: what is not yet a whole event
    first: bytes = b""  # read already
    lease: Lease | None = None  # given back by whoever closes this

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else close it."""
        if self.response.content.at_eof():
            self.response.release()
        else:
            self.response.close()


class Sent:
    """Set when a request of `size` bytes has been written to its connection."""

    def __init__(self, size: int) -> None:
        self._left = size
        self.event = asyncio.Event()

    def wrote(self, count: int) -> None:
        self._left -= count
        if self._left <= 0:
            self.event.set()


async def _chunk_sent(_: aiohttp.ClientSession, context: SimpleNamespace, chunk: aiohttp.TraceRequestChunkSentParams) -> None:
    if isinstance(context.trace_request_ctx, Sent):
        context.trace_request_ctx.wrote(len(chunk.chunk))


def probing_socket(address: AddressOf) -> socket.socket:
    """A server's host that vanishes says nothing, and an answer in one piece may take minutes: the kernel asks, and breaks the
    connection after 30 s without an answer. A process that only hangs is left to the time-outs."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # Linux has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


Idle = Callable[[bytes], Awaitable[None]]


class Upstream:
    """The connections to all servers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_chunk_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.keepalive, socket_factory=probing_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trace_configs=[trace],
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(
        self, member: Member, method: str, path: str, headers: Mapping[str, str], body: bytes | None, sent: Sent | None = None
    ) -> aiohttp.ClientResponse:
        """Until the headers of the answer are there. @error Failed (again) when the server can't be reached or hangs up."""
        instance = member.instance
        headers = {**headers, "Accept-Encoding": "identity"}
        if instance.dp_rank is not None:
            headers["X-data-parallel-rank"] = str(instance.dp_rank)
        data = None if body is None else io.BytesIO(body)  # written in pieces: a large body doesn't hold the loop
        try:
            return await self._session.request(
                method, instance.url + path, data=data, headers=headers, allow_redirects=False, trace_request_ctx=sent
            )
        except TimeoutError as error:
            raise Failed(instance.role, member, f"no connection within {self._settings.connect_timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Failed(instance.role, member, "it can't be reached", detail=said(error)) from error
        except ValueError as error:  # bytes in a header that HTTP does not allow
            raise Refused(400, f"A header can't be passed on: {error}") from error

    async def ok(self, member: Member, response: aiohttp.ClientResponse) -> None:
        """@error Failed with the server's own words when it says no. 4xx but 408, 425 and 429: the request is at fault, nobody
        else is asked."""
        status = response.status
        if 200 <= status < 300:
            return
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                body = await _read_up_to(response, MOST_ERROR)
        except (aiohttp.ClientError, OSError, TimeoutError):
            body = b""
        finally:
            response.close()
        again = status >= 500 or status in LATER
        error = Failed(
            member.instance.role, member, f"status {status}", status=status, again=again, body=body, kind=response.content_type
        )
        error.retry_after = response.headers.get("Retry-After")
        if status < 400:
            error.status, error.body = 502, None  # a redirect is nothing that a client could follow
        raise error

    async def open(
        self, member: Member, path: str, headers: Mapping[str, str], body: bytes, idle: Idle, sent: Sent | None = None
    ) -> Opened:
        """POST, until the first content. @error Failed, with nothing said to the client but comments (through `idle`)."""
        response = await self.send(member, "POST", path, headers, body, sent)
        try:
            await self.ok(member, response)
            opened = Opened(member, response)
            if response.content_type == "text/event-stream":
                opened.events = Events()
                await self._first(opened, idle)
            return opened
        except BaseException:
            response.close()
            raise

    async def _first(self, opened: Opened, idle: Idle) -> None:
        role, member, events = opened.member.instance.role, opened.member, opened.events
        assert events is not None
        held = bytearray()
        try:
            async for data in opened.response.content.iter_any():
                whole = events.feed(data)
                for number, event in enumerate(whole):
                    if is_comment(event):
                        await idle(event)
                        continue
                    if (error := error_of(event)) is not None:
                        status, body = error
                        again = status >= 500 or status in LATER
                        raise Failed(role, member, f"error {status} as first event", status=status, again=again, body=body)
                    held += event
                    if not says_nothing(event) or len(held) > MOST_HELD:
                        opened.first = bytes(held) + b"".join(whole[number + 1 :])
                        return
        except (aiohttp.ClientError, OSError) as error:
            raise Failed(role, member, "the connection broke before the first token", detail=said(error)) from error
        raise Failed(role, member, "the stream ended before the first token")

    async def prefill(self, member: Member, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """POST, until the answer is there, which nobody needs. @error Failed."""
        response = await self.send(member, "POST", path, headers, body)
        try:
            await self.ok(member, response)
            async for _ in response.content.iter_chunked(MOST_ERROR):
                pass
        except (aiohttp.ClientError, OSError) as error:
            raise Failed("prefill", member, "the connection broke", detail=said(error)) from error
        finally:
            response.close() if not response.content.at_eof() else response.release()

    async def healthy(self, member: Member) -> bool:
        """GET /health says 200 within its time."""
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout)
        try:
            async with self._session.get(member.instance.url + "/health", timeout=timeout, allow_redirects=False) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def said(error: BaseException) -> str:
    """The error's words, or its name when it has none."""
    return str(error) or type(error).__name__


async def _read_up_to(response: aiohttp.ClientResponse, most: int) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) >= most:
            break
    return bytes(body[:most])


def is_comment(event: bytes) -> bool:
    """Every line is empty or begins with a colon."""
    return all(not line or line.startswith(b":") for line in event.splitlines())


def _document(event: bytes) -> object:
    data = b"\n".join(line[5:].lstrip() for line in event.splitlines() if line.startswith(b"data:"))
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def error_of(event: bytes) -> tuple[int, bytes] | None:
    """Status and JSON of an event that is an error."""
    if b'"error"' not in event:
        return None
    document = _document(event)
    if not isinstance(document, dict) or "choices" in document or not isinstance(document.get("error"), dict):
        return None
    code = document["error"].get("code")
    status = code if type(code) is int and 400 <= code < 600 else 500
    return status, json.dumps(document).encode()


def says_nothing(event: bytes) -> bool:
    """A chat chunk in which every choice has a role and no content, as vLLM sends before the first token."""
    if b'"role"' not in event:
        return False
    document = _document(event)
    choices = document.get("choices") if isinstance(document, dict) else None
    if not isinstance(choices, list) or not choices:
        return False
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
            return False
        if any(value for name, value in delta.items() if name != "role"):
            return False
    return True
