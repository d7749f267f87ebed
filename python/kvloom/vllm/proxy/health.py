"""Who is up: GET /health at an interval, and what requests have seen.

  down --(health_rise successes in a row; the first look ever: one)--> up --(health_fall failures in a row, or a refused
  connection)--> down
A server that flaps is out until it has been well for a while. One that comes back has an empty cache, as far as the proxy
knows. A failed connection of a request counts like a failed look; a status does not: a server that answers is there.
"""

import asyncio
import contextlib
import logging

import aiohttp

from kvloom.vllm.proxy.choose import Member, Pool
from kvloom.vllm.proxy.config import Settings
from kvloom.vllm.proxy.log import say
from kvloom.vllm.proxy.metrics import Metrics
from kvloom.vllm.proxy.upstream import Failed, Upstream


class Watch:
    """One member's state. No I/O, no clock."""

    def __init__(self, member: Member, fall: int, rise: int) -> None:
        self.member = member
        self._fall = fall
        self._rise = rise
        self._bad = 0  # in a row
        self._good = 0
        self._fresh = True  # never looked at

    def well(self) -> None:
        self._good, self._bad = self._good + 1, 0
        if not self.member.up and (self._fresh or self._good >= self._rise):
            self._turn(True)
        self._fresh = False

    def ill(self, *, sure: bool = False) -> None:
        """`sure`: nobody listens there."""
        self._good, self._bad, self._fresh = 0, self._bad + 1, False
        if self.member.up and (sure or self._bad >= self._fall):
            self._turn(False)

    def _turn(self, up: bool) -> None:
        self.member.up = up
        if not up:
            self.member.forget()
        say(
            logging.INFO if up else logging.WARNING,
            "instance up" if up else "instance down",
            role=self.member.instance.role,
            instance=self.member.name,
        )


class Health:
    """Looks at all members."""

    def __init__(self, settings: Settings, pools: tuple[Pool, ...], upstream: Upstream, metrics: Metrics) -> None:
        self._interval = settings.health_interval
        self._upstream = upstream
        self._metrics = metrics
        self._watches = {m: Watch(m, settings.health_fall, settings.health_rise) for pool in pools for m in pool.members}
        self._soon = asyncio.Event()

    def suspect(self, error: Failed) -> None:
        """A request has failed there. Looks again at once."""
        cause = error.__cause__
        if isinstance(cause, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError):
            refused = isinstance(cause, aiohttp.ClientConnectorError) and isinstance(cause.os_error, ConnectionRefusedError)
            self._watches[error.member].ill(sure=refused)
            self._soon.set()

    async def look(self) -> None:
        """One look at each, all at once."""
        await asyncio.gather(*(self._look(watch) for watch in self._watches.values()))

    async def _look(self, watch: Watch) -> None:
        good = await self._upstream.healthy(watch.member)
        self._metrics.checks.labels(watch.member.instance.role, watch.member.name, "ok" if good else "failed").inc()
        if good:
            watch.well()
        else:
            watch.ill()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._soon.wait()
            self._soon.clear()
            try:
                await self.look()
            except Exception as error:  # whatever it is: who is never looked at again stays up, or down, for ever
                say(logging.ERROR, "health check failed", error=repr(error))
