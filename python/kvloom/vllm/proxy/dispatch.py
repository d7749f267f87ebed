"""One client's request: both sides at once, again where that helps, and nothing left running.

An attempt is a transfer key, a decode request and, unless decode works alone, a prefill request. It ends in one of four ways:

  decode's first content   -> the answer is decode's; prefill's request ends by itself, or `prefill_linger` after decode
  prefill fails            -> both are closed; again with a new key and another prefill server, at last decode alone
  decode fails             -> both are closed; again with a new key and another decode server
  a 4xx, or the client left -> both are closed; the 4xx is the answer

Why decode is sent anew when prefill fails, and not left to find out: a decode server that finds out by itself either computes
the whole prompt (kv_load_failure_policy=recompute) or fails (fail), and both waste a prefill server that is there. Its policy
is for what the proxy can't see: a transfer that breaks although both requests live; where it then fails before its first
token, the proxy tries again as for any 500. An old key is never used again, so a late write of a cancelled attempt can't be
taken for the new one's.

Law: after serve() returns, or is cancelled, no request to a server is open but a prefill that lingers, for at most
`prefill_linger`.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping

from kvloom.vllm.proxy import wire
from kvloom.vllm.proxy.answer import Answer
from kvloom.vllm.proxy.asked import Asked
from kvloom.vllm.proxy.choose import Lease, Member, Pool
from kvloom.vllm.proxy.config import Role, Settings
from kvloom.vllm.proxy.errors import Refused
from kvloom.vllm.proxy.health import Health
from kvloom.vllm.proxy.log import say
from kvloom.vllm.proxy.metrics import Metrics
from kvloom.vllm.proxy.upstream import Failed, Opened, Sent, Upstream

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclasses.dataclass(slots=True)
class Story:
    """What became of a request, for its log line."""

    request_id: str
    begun: float
    decode: list[str] = dataclasses.field(default_factory=list)
    prefill: list[str] = dataclasses.field(default_factory=list)
    alone: str | None = None
    first: float | None = None  # seconds
    held: int = 0  # bytes of its body


@dataclasses.dataclass(frozen=True, slots=True)
class Client:
    """One request: what is asked, where the answer goes, which headers go on."""

    asked: Asked
    answer: Answer
    headers: Mapping[str, str]
    story: Story


@dataclasses.dataclass(slots=True)
class _Tries:
    """What earlier attempts of a request have shown."""

    prefill: int = 0  # failures
    decode: int = 0
    avoid: set[Member] = dataclasses.field(default_factory=set)
    number: int = 0

    def failed(self, error: Failed, used: tuple[Lease | None, ...]) -> None:
        """A broken transfer may be either side's fault: where there is a choice, neither is taken again."""
        self.prefill += error.role == "prefill"
        self.decode += error.role == "decode"
        self.avoid.add(error.member)
        if error.status >= 500 and error.body is not None:
            self.avoid.update(lease.member for lease in used if lease)


class Dispatch:
    """Serves generating requests. Owner: the loop's thread."""

    def __init__(
        self, settings: Settings, prefill: Pool, decode: Pool, upstream: Upstream, health: Health, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._prefill = prefill
        self._decode = decode
        self._upstream = upstream
        self._health = health
        self._metrics = metrics
        self._lingering: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End what lingers."""
        await _end(*self._lingering)

    async def serve(self, client: Client) -> None:
        """The whole of it. @error Failed, Refused: what the client has to be told; CancelledError, ClientLeft: nobody to tell."""
        asked, story = client.asked, client.story
        if asked.unshared and self._settings.unshared == "refuse":
            raise Refused(400, f"Not served with a transfer, and this proxy allows nothing else: {asked.unshared}.")
        tries = _Tries()
        while True:
            tries.number += 1
            decode, prefill = self._choose(asked, tries, story)
            try:
                opened, computing = await self._attempt(client, tries.number, decode, prefill)
                break
            except Failed as error:
                self._heard(error, story)
                tries.failed(error, (decode, prefill))
                if not error.again or self._enough(error.role, tries):
                    raise
                self._metrics.retries.labels(error.role).inc()
        story.first = time.monotonic() - story.begun
        self._metrics.first.labels(asked.route).observe(story.first)
        await self._answer(client, opened, computing)

    def _heard(self, error: Failed, story: Story) -> None:
        self._health.suspect(error)
        told = {"role": error.role, "instance": error.member.name, "reason": error.reason, "detail": error.detail}
        say(logging.WARNING, "attempt failed", request=story.request_id, **told)

    def _enough(self, role: Role, tries: _Tries) -> bool:
        """Whether that role has failed for good. Without prefill there may still be decode alone."""
        if role == "decode":
            return tries.decode >= self._settings.decode_attempts
        return tries.prefill >= self._settings.prefill_attempts and self._settings.without_prefill == "fail"

    def _choose(self, asked: Asked, tries: _Tries, story: Story) -> tuple[Lease, Lease | None]:
        alone = self._alone(asked, tries)
        decode = self._decode.take(asked.tokens + asked.output, asked.head, asked.blocks, tries.avoid)
        if decode is None:
            raise Refused(503, "No decode server is up.", retry_after=1)
        prefill = None if alone else self._prefill.take(asked.tokens, asked.head, asked.blocks, tries.avoid)
        if prefill is None and not alone:
            alone = "no prefill server" if self._prefill.members else "none configured"
            if self._prefill.members and self._settings.without_prefill == "fail":
                decode.release()
                raise Refused(503, "No prefill server is up.", retry_after=1)
        story.decode.append(decode.member.name)
        story.alone = alone
        if alone:
            self._metrics.alone.labels(alone).inc()
        for lease in (decode, prefill):
            if lease:
                self._metrics.prompt.labels(lease.member.instance.role).inc(asked.tokens)
                self._metrics.matched.labels(lease.member.instance.role).inc(lease.matched)
        if prefill:
            story.prefill.append(prefill.member.name)
        return decode, prefill

    def _alone(self, asked: Asked, tries: _Tries) -> str | None:
        """Why decode computes the prompt by itself. Few values: they are labels."""
        if asked.unshared:
            return "unshared"
        if asked.tokens < self._settings.alone_below:
            return "short"
        return "prefill failed" if tries.prefill >= self._settings.prefill_attempts else None

    async def _attempt(
        self, client: Client, number: int, decode: Lease, prefill: Lease | None
    ) -> tuple[Opened, asyncio.Task[None] | None]:
        """@post on error and cancellation both requests are closed and the leases are back."""
        asking, computing = None, None
        try:
            asking, computing = self._start(client, number, decode, prefill)
            opened = await _first(asking, computing)
            opened.lease = decode
            return opened, computing
        except BaseException:
            for lease in (decode, prefill):  # before anything is awaited: a client may leave while this attempt is being ended
                if lease:
                    lease.release()
            if asking:
                asking.add_done_callback(_drop)
            await _end(asking, computing)
            raise

    def _start(
        self, client: Client, number: int, decode: Lease, prefill: Lease | None
    ) -> tuple[asyncio.Task[Opened], asyncio.Task[None] | None]:
        """Both requests on their way; bodies first, since what can't be written must not leave half an attempt."""
        key, seconds, asked = wire.new_key(), self._settings.prefill_timeout, client.asked
        told = wire.decode_parameters(key, seconds, prefill.member.instance) if prefill else None
        body = wire.decode_body(asked, told)
        compute = wire.prefill_body(asked, wire.prefill_parameters(key, seconds)) if prefill else b""
        where = {"decode": decode.member.name, "prefill": prefill.member.name if prefill else None}
        say(logging.DEBUG, "attempt", request=client.story.request_id, transfer=key[:8], **where)
        name = client.story.request_id if number == 1 else f"{client.story.request_id}-{number}"
        sent = Sent(len(body))
        asking = asyncio.create_task(self._open(client, decode.member, {**client.headers, "X-Request-Id": name}, body, sent))
        if prefill is None:
            return asking, None
        after = sent.event if self._settings.order == "decode-first" else None
        headers = {**client.headers, "X-Request-Id": name + "-p"}
        computing = asyncio.create_task(self._compute(asked, prefill.member, headers, compute, after))
        computing.add_done_callback(lambda _: prefill.release())
        return asking, computing

    async def _open(self, client: Client, member: Member, headers: Mapping[str, str], body: bytes, sent: Sent) -> Opened:
        asked = client.asked
        most = self._settings.first_token_timeout if asked.stream else self._settings.request_timeout
        outcome: str | None = "cancelled"
        try:
            async with asyncio.timeout(most):
                opened = await self._upstream.open(member, PATHS[asked.route], headers, body, client.answer.idle, sent)
            outcome = None  # counted when the answer is over
            return opened
        except TimeoutError as error:
            outcome = "failed"
            raise Failed("decode", member, f"no token within {most:g} s", status=504, again=False) from error
        except Failed as error:
            outcome = "refused" if error.status < 500 else "failed"
            raise
        finally:
            if outcome:
                self._count(member, outcome)

    async def _compute(
        self, asked: Asked, member: Member, headers: Mapping[str, str], body: bytes, after: asyncio.Event | None
    ) -> None:
        outcome = "cancelled"
        try:
            if after:
                await after.wait()
            begun, most = time.monotonic(), self._settings.prefill_timeout
            async with asyncio.timeout(most):
                await self._upstream.prefill(member, PATHS[asked.route], headers, body)
            outcome = "ok"
            self._metrics.prefill.observe(time.monotonic() - begun)
        except TimeoutError as error:
            outcome = "failed"
            raise Failed("prefill", member, f"no answer within {most:g} s", status=504) from error
        except Failed as error:
            outcome = "refused" if error.status < 500 else "failed"
            raise
        finally:
            self._count(member, outcome)

    def _count(self, member: Member, outcome: str) -> None:
        self._metrics.attempts.labels(member.instance.role, member.name, outcome).inc()

    async def _answer(self, client: Client, opened: Opened, computing: asyncio.Task[None] | None) -> None:
        outcome = "cancelled"
        try:
            await client.answer.relay(opened)
            outcome = "ok"
        except Failed as error:
            outcome = "failed"
            self._heard(error, client.story)
            raise
        finally:
            opened.close()
            if opened.lease:
                opened.lease.release()
            self._count(opened.member, outcome)
            if computing and outcome == "ok":
                self._linger(computing)
            elif computing:
                computing.cancel()
                computing.add_done_callback(_seen)

    def _linger(self, computing: asyncio.Task[None]) -> None:
        """The answer is complete; what prefill still does serves nobody, but it is at its end as a rule."""

        async def linger() -> None:
            await asyncio.wait((computing,), timeout=self._settings.prefill_linger)
            await _end(computing)

        task = asyncio.create_task(linger())
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)


async def _first(asking: asyncio.Task[Opened], computing: asyncio.Task[None] | None) -> Opened:
    """Decode's first content, or the first failure of either; prefill's where both failed, since decode's may only follow from
    it."""
    waiting: set[asyncio.Task[Opened] | asyncio.Task[None]] = {asking} if computing is None else {asking, computing}
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if asking in done and asking.exception() is None:
            return asking.result()
        if computing in done and computing is not None:
            computing.result()
        if asking in done:
            return asking.result()


async def _end(*tasks: "asyncio.Task[Opened] | asyncio.Task[None] | None") -> None:
    """Cancel and wait; a cancelled request closes its connection, which takes no time."""
    open_ones = [task for task in tasks if task]
    for task in open_ones:
        task.cancel()
    await asyncio.gather(*open_ones, return_exceptions=True)


def _drop(task: "asyncio.Task[Opened]") -> None:
    """It may have been opened in the same moment in which the attempt was given up."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _seen(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        task.exception()
