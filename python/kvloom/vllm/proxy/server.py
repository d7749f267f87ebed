"""The frame: routes, what is refused before any server is asked, drain, and the process.

  starting -> serving --SIGTERM--> draining (503 for new requests and /health; open ones go on) --all ended, or time is up-->
  closed
The socket stays open while it drains, so that a load balancer sees 503 and not a refused connection; a second signal cuts what
is open at once.
"""

import asyncio
import logging
import re
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from kvloom.vllm.proxy import asked, errors
from kvloom.vllm.proxy.answer import Answer, ClientLeft, passed
from kvloom.vllm.proxy.asked import Route
from kvloom.vllm.proxy.choose import Pool
from kvloom.vllm.proxy.config import Settings
from kvloom.vllm.proxy.dispatch import Client, Dispatch, Story
from kvloom.vllm.proxy.errors import Refused
from kvloom.vllm.proxy.forward import Forward
from kvloom.vllm.proxy.health import Health
from kvloom.vllm.proxy.log import LOGGER, Field, say
from kvloom.vllm.proxy.metrics import Metrics
from kvloom.vllm.proxy.upstream import Failed, Upstream

# Sent to one decode server as they are: they read, or generate without a transfer. What changes a server (adapters, sleep,
# caches) is not here.
FORWARDED = {
    "/v1/models": "GET",
    "/version": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/responses": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
}
OURS = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/health": "GET", "/metrics": "GET"}
CUT_SECONDS = 1.0  # for the last word to a client: an error, when nothing else can be said

Work = Callable[[Answer, Story], Awaitable[None]]


def request_id(request: web.Request) -> str:
    """The client's X-Request-Id when it is a plain word, else a new one. vLLM makes its own id of it."""
    said = request.headers.get("X-Request-Id", "")
    return said if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", said) else uuid.uuid4().hex


def upstream_headers(request: web.Request) -> dict[str, str]:
    """Authorization, tracing, session and the rest go on; what the proxy decides does not."""
    ours = {"host", "content-encoding", "accept-encoding", "expect", "x-data-parallel-rank", "content-type"}
    headers = {name: value for name, value in passed(request.headers).items() if name.lower() not in ours}
    if request.method == "POST":
        headers["Content-Type"] = "application/json"
    return headers


class Proxy:
    """One proxy in one loop. `start`, then `drain`, then `close`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.metrics = Metrics()
        options = {"affinity": settings.affinity, "imbalance": settings.imbalance, "remembered": settings.remembered_blocks}
        self.prefill = Pool(settings.prefill, **options)  # type: ignore[arg-type]
        self.decode = Pool(settings.decode, **options)  # type: ignore[arg-type]
        self.port = 0
        self.draining = False
        self._cutting = False
        self._open: set[asyncio.Task[object]] = set()
        self._held = 0  # bytes of bodies of open requests
        self._changed = asyncio.Event()  # a request ended, or the drain is cut short

    async def start(self) -> None:
        """Looks at every server once, then listens. @error OSError: the address is taken."""
        s = self._settings
        self.upstream = Upstream(s)
        self.health = Health(s, (self.prefill, self.decode), self.upstream, self.metrics)
        self._dispatch = Dispatch(s, self.prefill, self.decode, self.upstream, self.health, self.metrics)
        self._forwarding = Forward(s, self.decode, self.upstream, self.health)
        app = web.Application(client_max_size=s.max_body)
        app.router.add_post("/v1/completions", partial(self._generate, "completions"))
        app.router.add_post("/v1/chat/completions", partial(self._generate, "chat"))
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        for path, method in FORWARDED.items():
            app.router.add_route(method, path, self._forward)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CUT_SECONDS, logger=LOGGER)
        await self.health.look()
        self._looking = asyncio.create_task(self.health.run())
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, s.host, s.port)
            await site.start()
        except OSError:
            await self.close()
            raise
        self.port = self._runner.addresses[0][1]
        say(
            logging.INFO,
            "listening",
            host=s.host,
            port=self.port,
            prefill=[i.name for i in s.prefill],
            decode=[i.name for i in s.decode],
        )

    async def drain(self) -> int:
        """Refuse what is new, let what is open end, cut what is left after drain_timeout. Returns how many were cut."""
        self.draining = True
        self.metrics.draining.set(1)
        say(logging.INFO, "draining", open=len(self._open))
        try:
            async with asyncio.timeout(self._settings.drain_timeout):
                while self._open and not self._cutting:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        self._cutting = True
        left = list(self._open)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=2 * CUT_SECONDS)
        say(logging.INFO, "drained", cut=len(left))
        return len(left)

    def cut(self) -> None:
        """End the drain now."""
        self._cutting = True
        self._changed.set()

    async def close(self) -> None:
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await self._runner.cleanup()
        await self._dispatch.close()
        await self.upstream.close()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    async def _generate(self, route: Route, request: web.Request) -> web.StreamResponse:
        async def work(answer: Answer, story: Story) -> None:
            body = asked.read(route, await self._body(request, story))
            await self._dispatch.serve(Client(body, answer, upstream_headers(request), story))

        return await self._served(request, route, work)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        async def work(answer: Answer, story: Story) -> None:
            body = await self._body(request, story) if request.method == "POST" else None
            if body is not None:
                asked.read_json(body)
            headers = {**upstream_headers(request), "X-Request-Id": story.request_id}
            await self._forwarding.serve(request.method, request.path_qs, headers, body, answer, story)

        return await self._served(request, "forwarded", work)

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        allowed = (FORWARDED | OURS).get(request.path)
        status = 405 if allowed else 404
        word = f"only {allowed}" if allowed else "not served by this proxy; ask a server itself"
        body = errors.body(status, f"{request.method} {request.path}: {word}.")
        return web.Response(
            status=status, body=body, content_type="application/json", headers={"Allow": allowed} if allowed else None
        )

    async def _body(self, request: web.Request, story: Story) -> bytes:
        most = self._settings.max_body
        too_large = Refused(413, f"The body is larger than {most} bytes.", close=True)
        if request.content_type != "application/json":
            raise Refused(415, "The body's Content-Type has to be application/json.", close=True)
        expected = most if request.content_length is None else request.content_length
        if request.content_length is not None and expected > most:
            raise too_large
        if self._held + expected > self._settings.max_held:
            raise Refused(503, "Too many bytes of requests are open.", retry_after=1, close=True)
        story.held = expected  # given back when the request ends
        self._held += expected
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                body = await request.read()
            self._held += len(body) - expected
            story.held = len(body)
            return body
        except TimeoutError:
            raise Refused(408, f"The body did not come within {self._settings.body_timeout:g} s.", close=True) from None
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except (web.RequestPayloadError, ValueError) as error:
            raise Refused(400, f"The body can't be read: {error}", close=True) from None
        except ConnectionError as error:
            raise ClientLeft from error

    async def _served(self, request: web.Request, route: str, work: Work) -> web.StreamResponse:
        """Everything that a request needs around its work: admission, time, its error's form, counting, its line in the log."""
        story = Story(request_id(request), time.monotonic())
        answer = Answer(request, story.request_id, self._settings.stall_timeout)
        task = asyncio.current_task()
        assert task is not None
        outcome = "client left"
        self._open.add(task)
        self.metrics.open.set(len(self._open))
        try:
            outcome = await self._guarded(answer, story, work)
        except ClientLeft:
            pass
        finally:
            self._open.discard(task)
            self._held -= story.held
            self._changed.set()
            self.metrics.open.set(len(self._open))
            self._ended(request.path, route, outcome, answer, story)
        return answer.response or web.Response(status=499)

    async def _guarded(self, answer: Answer, story: Story, work: Work) -> str:
        error: Failed | Refused
        outcome = "ok"
        try:
            if self.draining or len(self._open) > self._settings.max_open:
                raise Refused(503, "Shutting down." if self.draining else "Too many open requests.", retry_after=1, close=True)
            async with asyncio.timeout(self._settings.request_timeout):
                await work(answer, story)
            return outcome
        except Refused as caught:
            error, outcome = caught, "refused" if caught.status < 500 else "unavailable"
        except Failed as caught:
            error, outcome = caught, "client error" if caught.status < 500 else "failed"
        except TimeoutError:
            error, outcome = Refused(504, f"Not done within {self._settings.request_timeout:g} s."), "deadline"
        except RecursionError:
            error, outcome = Refused(400, "The body is nested too deeply."), "refused"
        except asyncio.CancelledError:
            if not self._cutting:
                raise
            error, outcome = Refused(503, "The proxy shuts down.", retry_after=1, close=True), "cut"
        except ClientLeft:
            raise
        except Exception:
            LOGGER.exception("bug", extra={"fields": {"request": story.request_id}})
            error, outcome = Refused(500, "The proxy failed; its log says why."), "failed"
        try:
            async with asyncio.timeout(CUT_SECONDS):
                await answer.fail(error)
        except TimeoutError:
            answer.abort()  # it takes nothing
        return outcome

    def _ended(self, path: str, route: str, outcome: str, answer: Answer, story: Story) -> None:
        seconds = time.monotonic() - story.begun
        self.metrics.requests.labels(route, outcome).inc()
        self.metrics.total.labels(route).observe(seconds)
        first = None if story.first is None else round(story.first, 4)
        said: dict[str, Field] = {
            "request": story.request_id,
            "path": path,
            "outcome": outcome,
            "status": answer.status,
            "alone": story.alone,
        }
        said |= {"prefill": story.prefill, "decode": story.decode, "seconds": round(seconds, 4), "first_byte": first}
        say(logging.INFO, "request", **said)

    async def _health(self, _: web.Request) -> web.Response:
        without = self._settings.without_prefill == "decode" or not self.prefill.members
        good = not self.draining and self.decode.any_up() and (without or self.prefill.any_up())
        status = "draining" if self.draining else "ok" if good else "no servers"
        up = {role: {m.name: m.up for m in pool.members} for role, pool in (("prefill", self.prefill), ("decode", self.decode))}
        return web.json_response({"status": status, **up}, status=200 if good else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = self.metrics.text((("prefill", self.prefill), ("decode", self.decode)))
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def serve(settings: Settings) -> int:
    """Until SIGTERM or SIGINT, then drained. Returns the process's status: 1 when requests were cut."""
    proxy = Proxy(settings)
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            proxy.cut()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    await proxy.start()
    await stop.wait()
    cut = await proxy.drain()
    await proxy.close()
    return 1 if cut else 0
