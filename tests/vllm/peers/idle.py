"""Processor time of servers that have nothing to do, with and without a connector: % of a core, all processes of a server together.

Measured after the pair has served a request, so that what keeps peers in touch is in it; all other servers are frozen. The kernel counts in
hundredths of a second, for each process: over 10 s and three processes an error of 0.3 % of a core at the most.
"""

import dataclasses
import time

from .connectors import Pair
from .ttft import warm

SECONDS = 10.0
SETTLE = 2.0  # after the last request, seconds


@dataclasses.dataclass(frozen=True)
class Idle:
    connector: str
    role: str  # prefill, decode; "" for the server without a connector
    percent: float


def measure(pairs: list[Pair], say=print) -> list[Idle]:
    """@pre all pairs run and are frozen. @post they are frozen."""
    found = []
    for pair in pairs:
        pair.thaw()
        warm(pair, 0)
        time.sleep(SETTLE)
        begin, before = time.monotonic(), [server.cpu_seconds() for server in pair.servers]
        time.sleep(SECONDS)
        passed = time.monotonic() - begin
        used = [server.cpu_seconds() - then for server, then in zip(pair.servers, before, strict=True)]
        pair.freeze()
        roles = ("prefill", "decode") if pair.decode is not None else ("",)
        say(f"idle, {pair.name}: {', '.join(f'{100.0 * seconds / passed:.1f}' for seconds in used)} % of a core")
        found += [Idle(pair.name, role, 100.0 * seconds / passed) for role, seconds in zip(roles, used, strict=True)]
    return found
