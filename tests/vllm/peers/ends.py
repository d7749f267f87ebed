"""What becomes of a request when one side never comes, dies or loses its client: failures.py's scenarios with each connector, as one table.

A wait is bounded by the connector's patience; what is longer is "never" in the table: not within that time. Servers that still hold something then are
started anew before the next scenario. One connector after the other: NIXL's spinning workers would take the others' cores.
"""

import failures
from ask import prompts_of
from failures import Row

from .connectors import GIVEN, Pair
from .ttft import warm

LENGTH = 1_500  # prompt tokens
WITHIN = 2.0  # seconds, of what happened or of the time given: kvloom's goal


def measure(pairs: list[Pair], say=print) -> list[Row]:
    """@pre the pairs are frozen, and nothing else runs. @return rows by scenario, connectors in the order of the pairs. @post the pairs are closed"""
    rows = []
    for pair in pairs:
        pair.thaw()
        rows += _tried(pair, say)
        pair.close()
    order = list(dict.fromkeys(row.scenario for row in rows))
    return sorted(rows, key=lambda row: order.index(row.scenario))


def _tried(pair: Pair, say) -> list[Row]:
    """All scenarios, or as many as could be tried: what one connector does to its servers leaves the others' rows as they are."""
    rows = []
    try:
        warm(pair, 7)
        for number, scenario in enumerate(failures.SCENARIOS):
            rows.append(_one(pair, scenario, prompts_of([LENGTH], seed=1_000 + number)[0]))
            row = rows[-1]
            say(f"{row.way}: {row.scenario}: {row.outcome}, after {row.answered} s, P free after {row.prefill_free} s, D after {row.decode_free} s {row.note}")
    except (RuntimeError, OSError) as error:
        rows.append(_untried(pair, "what comes after", error))
        say(f"{pair.name}: {rows[-1].note}")
    return rows


def _untried(pair: Pair, what: str, error: Exception) -> Row:
    return Row(pair.name, what, "none", (), None, None, None, False, f"not seen: {str(error).splitlines()[0]}")


def _one(pair: Pair, scenario, prompt: list[int]) -> Row:
    """One scenario; where it leaves something behind, or couldn't be made to happen, both servers are started anew."""
    try:
        row = scenario(pair.way, prompt)
    except (RuntimeError, OSError) as error:  # what the connector did to the servers is the row
        row = _untried(pair, scenario.__doc__.partition(".")[0], error)
    if not row.pools_equal:
        for server in pair.servers:
            server.kill()
        for server in pair.servers:
            server.start()
        for server in pair.servers:
            server.wait()
        warm(pair, 8)
    return row


def limit(row: Row) -> float:
    """Seconds until kvloom has answered and freed, from the row's event: WITHIN, and the time given where that is what ends it."""
    return WITHIN + (GIVEN if "never" in row.scenario else 0.0)


def holds(row: Row) -> bool:
    times = [seconds for seconds in (row.answered, row.prefill_free, row.decode_free) if seconds is not None]
    return row.pools_equal and row.answer_came and all(seconds <= limit(row) for seconds in times)
