"""The client's side of one request: what a server says, byte for byte and no faster than the client reads; errors in the form
that fits the moment.

  nothing sent  -> headers (a server's, or the proxy's error) -> body -> end
  nothing sent  -> comments of a stream (keep-alive)          -> body -> end, or an error event
An error before the headers is a status; inside of a stream it is an event and [DONE], as vLLM writes them; inside of another
body the connection is cut, so that the client sees a torn answer as one.
"""

import asyncio
from collections.abc import Awaitable, Mapping

import aiohttp
from aiohttp import web

from kvloom.vllm.proxy import errors
from kvloom.vllm.proxy.upstream import Failed, Opened, said

# Of one connection, not of the answer (RFC 9110 7.6.1), or set by our own server.
NOT_PASSED = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length", "date", "server", "x-request-id",
}  # fmt: skip


def passed(headers: Mapping[str, str]) -> dict[str, str]:
    """What of a message's headers goes on."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return {name: value for name, value in headers.items() if name.lower() not in NOT_PASSED | named}


class ClientLeft(Exception):
    """Nobody listens any more."""


class Answer:
    """Owner: the task that serves the request. `stall`: seconds that a server may say nothing, or a client take nothing."""

    def __init__(self, request: web.Request, request_id: str, stall: float) -> None:
        self._request = request
        self._stall = stall
        self._id = request_id
        self.response: web.StreamResponse | None = None
        self._stream = False
        self.status = 0  # as the client sees it; 0: nothing sent

    async def _begin(
        self, status: int, headers: Mapping[str, str], length: int | None, *, close: bool = False
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={**headers, "X-Request-Id": self._id})
        response.content_length = length
        if close:
            response.force_close()
        self.response, self.status = response, status
        await self._reaching(response.prepare(self._request))
        return response

    async def idle(self, comment: bytes) -> None:
        """A comment of a stream that has no content yet."""
        if self.response is None:
            self._stream = True
            await self._begin(200, {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}, None)
        assert self.response is not None
        await self._reaching(self.response.write(comment))

    async def relay(self, opened: Opened) -> None:
        """Everything that the server says, until it ends. @error Failed (never again): it broke or fell silent; ClientLeft."""
        response = self.response
        if response is None:
            headers = passed(opened.response.headers)
            length = None if opened.events else opened.response.content_length
            response = await self._begin(opened.response.status, headers, length)
        self._stream = opened.events is not None
        if opened.first:
            await self._reaching(response.write(opened.first))
        while data := await self._next(opened):
            whole = b"".join(opened.events.feed(data)) if opened.events else data
            if whole:
                await self._reaching(response.write(whole))
        if opened.events and opened.events.rest:
            await self._reaching(response.write(opened.events.rest))
        await self._reaching(response.write_eof())

    async def _next(self, opened: Opened) -> bytes:
        role, member = opened.member.instance.role, opened.member
        try:
            async with asyncio.timeout(self._stall):
                return await opened.response.content.readany()
        except TimeoutError as error:
            raise Failed(role, member, f"silent for {self._stall:g} s", status=504, again=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Failed(role, member, "the connection broke", detail=said(error), again=False) from error

    async def fail(self, error: Failed | errors.Refused) -> None:
        """The last word, in the form that is still possible."""
        status, message = (error.status, error.message) if isinstance(error, errors.Refused) else (error.status, describe(error))
        body = error.body if isinstance(error, Failed) and error.body else None
        body = body or errors.body(status, message, error.param if isinstance(error, errors.Refused) else None)
        if self.response is None:
            headers = {"Content-Type": error.kind if isinstance(error, Failed) and error.body else "application/json"}
            if error.retry_after is not None:
                headers["Retry-After"] = str(error.retry_after)
            response = await self._begin(status, headers, len(body), close=getattr(error, "close", False))
            await self._reaching(response.write(body))
            await self._reaching(response.write_eof())
        elif self._stream:
            line = b" ".join(body.split(b"\n"))
            await self._reaching(self.response.write(b"data: " + line + b"\n\ndata: [DONE]\n\n"))
            await self._reaching(self.response.write_eof())
        elif self._request.transport is not None:
            self._request.transport.close()

    def abort(self) -> None:
        """The connection, at once, with all that was not sent."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _reaching(self, write: Awaitable[object]) -> None:
        """@error ClientLeft: it closed, or takes nothing; told apart from a server's broken connection."""
        try:
            async with asyncio.timeout(self._stall):
                await write
        except ConnectionError as error:
            raise ClientLeft from error
        except TimeoutError as error:
            self.abort()
            raise ClientLeft from error


def describe(error: Failed) -> str:
    """For clients: which side, never which machine."""
    return f"The {error.role} server failed: {error.reason}."
