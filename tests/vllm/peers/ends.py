"""What becomes of a request when one side never comes, dies or loses its client: failures.py's scenarios with each connector, as one table.

Whatever a connector does, each scenario ends and leaves a row:
  - a wait is bounded by the connector's patience; what is longer is "never" in the table: not within that time;
  - servers that still hold something then, or don't answer, are killed and started anew before the next scenario;
  - what didn't happen, because a server was faster than who should have killed or left it, is tried again with another prompt;
  - servers that can't be started again leave "not seen" in the rows that are missing.
Where the time goes: two servers are started in 25 s on two idle cores, one in 20, most of it three imports of torch and vLLM a server (its HTTP
server, its engine and its worker are each a new interpreter), and in several times that where others compile. A row with "never" costs the patience
and such a start; one whose P is killed costs P's. So Mooncake, which lets go in one row of seven, takes under five minutes with patience 20, and much
more on a busy machine: each start is told, so that nobody takes it for a hang.
One connector after the other: NIXL's spinning workers would take the others' cores.
"""

import time

import failures
from ask import prompts_of
from failures import TROUBLE, Row
from harness import ServerError

from .connectors import GIVEN, Pair
from .ttft import warm

LENGTH = 1_500  # prompt tokens
WITHIN = 2.0  # seconds, of what happened or of the time given: kvloom's goal
TRIES = 4  # of a scenario that did not happen, and of a start


def measure(pairs: list[Pair], say=print) -> list[Row]:
    """@pre the pairs are frozen, and nothing else runs. @return rows by scenario, connectors in the order of the pairs. @post the pairs are closed"""
    rows = []
    for pair in pairs:
        pair.thaw()
        rows += _tried(pair, say)
        pair.close()
    order = list(failures.SCENARIOS.values())
    return sorted(rows, key=lambda row: order.index(row.scenario))


def _tried(pair: Pair, say) -> list[Row]:
    """A row for each scenario."""
    rows, trouble = [], _ready(pair, False, say)
    for number, scenario in enumerate(failures.SCENARIOS):
        row = failures.not_seen(pair.way, scenario, trouble) if trouble else _one(pair, scenario, number, say)
        rows.append(row)
        say(f"{row.way}: {failures.table([row]).splitlines()[-1]}")
        if not trouble and not row.pools_equal and number + 1 < len(failures.SCENARIOS):
            trouble = _ready(pair, True, say)
    return rows


def _one(pair: Pair, scenario, number: int, say) -> Row:
    """One scenario, tried until it happened, or a try left something behind."""
    for tried, prompt in enumerate(prompts_of([LENGTH] * TRIES, seed=1_000 + number), 1):
        try:
            row = scenario(pair.way, prompt)
        except TROUBLE as error:  # what the connector did to the servers is the row
            return failures.not_seen(pair.way, scenario, error)
        if row.happened or tried == TRIES:
            return row
        say(f"{row.way}: {row.scenario}: over before it could happen, try {tried}")
        if not row.pools_equal and (trouble := _ready(pair, True, say)):
            return failures.not_seen(pair.way, scenario, trouble)
    return row


def _ready(pair: Pair, anew: bool, say) -> BaseException | None:
    """Both servers answer with what was loaded; `anew`, or where they don't: killed and started. @return what stood in the way to the last."""
    trouble = None
    for _ in range(TRIES // 2):
        begin = time.monotonic()
        try:
            if anew:
                _start(pair)
                say(f"{pair.name}: both servers started anew in {time.monotonic() - begin:.0f} s")
            warm(pair, int(begin))
            return None
        except TROUBLE as error:
            trouble, anew = error, True
            say(f"{pair.name}: not ready after {time.monotonic() - begin:.0f} s: {str(error).splitlines()[0]}")
    return trouble or ServerError("not tried")


def _start(pair: Pair) -> None:
    for server in pair.servers:
        server.kill()
    for server in pair.servers:
        server.start()
    for server in pair.servers:
        server.wait(failures.START)


def limit(row: Row) -> float:
    """Seconds until kvloom has answered and freed, from the row's event: WITHIN, and the time given where that is what ends it."""
    return WITHIN + (GIVEN if "never" in row.scenario else 0.0)


def holds(row: Row) -> bool:
    """Whether it happened, and all that was waited for came within the limit."""
    times = {"P": row.prefill_free, "D": row.decode_free}
    awaited = [times[side] for side in row.looked_at] + ([row.answered] if row.outcome != "none" else [])
    return row.happened and row.pools_equal and all(seconds is not None and seconds <= limit(row) for seconds in awaited)
