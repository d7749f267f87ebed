"""What becomes of a request when one side never comes, dies or loses its client: scenarios for any connector, each a row of one table.

    way = Way("kvloom", prefill, decode, halves=lambda given: Halves(to_prefill, lambda answer: to_decode), given=4.0)
    row = killed_while_decode_waits(way, prompt)       # Row: answered?, seconds until it was, until blocks are back on P and on D, pools equal?
    print(table([row]))                                # Markdown, units in its head

The two servers are asked directly, half by half, as their proxy would: P's half for one token, D's for MAX_TOKENS. A connector whose decode half
needs what prefill answered says so by `decode_first=False`; a scenario that it can't be in gives a row that says why.
The clock of a row begins with what happened: the process was killed, the client left; or, where one half never comes, the other was sent.
Nothing is asserted here: a wait that is longer than `patience` leaves None in the row, and the caller judges; so does an engine that says nothing
any more. A side that was never asked holds nothing, so nothing is looked for there. Each scenario begins with quiet servers and ends with both
running, unless D still holds blocks of a P that was killed: then P is left dead, for D's pool can't become what it was. After a row without
`pools_equal` the caller starts both anew. What couldn't be made to happen (P was faster than who should have left or killed it) says so: `happened`.
Owner: the caller has the servers; a scenario closes the requests that it sent. Threads: each half is read by one of its own.
"""

import contextlib
import dataclasses
import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Callable

from ask import Prompt, body_of
from harness import Pool, Server, ServerError

MAX_TOKENS = 12
LOOK_EVERY = 0.02  # seconds; finer than what is measured, coarser than what the eye costs
SOON = 60.0  # seconds until a healthy server has done what it is asked, on a busy machine
DONE = "FINISHED_LENGTH_CAPPED"  # vLLM's RequestStatus of a request that has all its tokens, here while a connector keeps its blocks
START = 180.0  # seconds until a server that is started anew is healthy; 17 on two idle cores
WITH_P = "P's blocks went with it"
LEAVING = 10.0  # seconds until a thread has seen that its socket was shut: at once, but on a busy machine
# What a server that is killed, hangs or lost its engine does to who asks it: a timeout, a broken connection, an answer of the wrong form.
TROUBLE = (RuntimeError, OSError, http.client.HTTPException, ValueError, LookupError)


@dataclasses.dataclass(frozen=True)
class Halves:
    """`kv_transfer_params` of one attempt: prefill's, and decode's by those that prefill answered (None: it hasn't)."""

    to_prefill: dict
    to_decode: Callable[[dict | None], dict]


@dataclasses.dataclass
class Way:
    """A connector between two servers. `halves(seconds)` makes a new attempt; a connector whose requests carry no time ignores `seconds`."""

    name: str
    prefill: Server
    decode: Server
    halves: Callable[[float], Halves]
    given: float  # seconds that a half waits for one that never comes: said in the request, or the connector's setting
    decode_first: bool = True  # D can ask before P has answered
    patience: float = SOON  # seconds, on top of `given`, after which a scenario stops waiting
    long: float = 600.0  # seconds, given where the end of the time is not the point


@dataclasses.dataclass(frozen=True)
class Row:
    """What was seen. Seconds are from the event on; None: not within the patience, or there is nothing to wait for (`note` says which)."""

    way: str
    scenario: str
    outcome: str  # of the client that is still there: "tokens", "error: ...", "none" (nobody waits), "no answer"
    tokens: tuple[int, ...]
    answered: float | None
    prefill_free: float | None
    decode_free: float | None
    pools_equal: bool  # both pools as before, nobody known
    note: str = ""
    looked_at: str = ""  # sides whose blocks were waited for: "P", "D", "PD"
    happened: bool = True  # False: what the scenario is about did not happen; the times say nothing, and another prompt may do

    @property
    def answer_came(self) -> bool:
        return self.outcome != "no answer"


class Half:
    """One half, asked in a thread of its own; its client can leave. Nobody waits for it longer than `patience` seconds from when it was sent."""

    def __init__(self, url: str, prompt: Prompt, max_tokens: int, params: dict, patience: float):
        place = urllib.parse.urlsplit(url)
        self._patience, self._left = patience, False
        self._connection = http.client.HTTPConnection(place.hostname, place.port, timeout=patience)
        body = json.dumps(body_of(prompt, max_tokens, kv_transfer_params=params))
        self.sent = time.monotonic()
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        self._socket = self._connection.sock
        self.outcome, self.tokens, self.params = "no answer", (), None
        self.at: float | None = None  # when the answer came, time.monotonic
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            answer = self._connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            if not (self._left or isinstance(error, TimeoutError)):
                self.outcome = f"error: the connection broke ({type(error).__name__})"
                self.at = time.monotonic()
            return
        self.at = time.monotonic()
        self._understand(answer.status, text)

    def _understand(self, status: int, text: bytes) -> None:
        try:
            said = json.loads(text)
            choice = said["choices"][0]
            self.tokens, self.params, self.outcome = tuple(choice["token_ids"]), said.get("kv_transfer_params"), "tokens"
            if choice["finish_reason"] in ("error", "abort"):
                self.outcome = f"error: finish_reason {choice['finish_reason']}"
        except (ValueError, KeyError, IndexError, TypeError):
            self.outcome = f"error: {status} {text[:200].decode(errors='replace')}"

    def wait(self, end: float | None = None) -> "Half":
        """Until it is answered, or `end` (time.monotonic; else its patience) has come: `at` is None then."""
        end = self.sent + self._patience if end is None else end
        self._thread.join(max(0.0, end - time.monotonic()))
        return self

    def leave(self) -> float:
        """The client closes its connection; what isn't answered by then stays so. @return when."""
        self._left = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)
        left = time.monotonic()
        self._thread.join(LEAVING)
        self._connection.close()
        return left


# ---- steps that scenarios share ----


def ask_prefill(way: Way, prompt: Prompt, halves: Halves, answered: bool = True) -> Half:
    """@error `answered`, but it isn't: ServerError."""
    half = Half(way.prefill.url, prompt, 1, halves.to_prefill, way.patience)
    if answered and half.wait().outcome != "tokens":
        raise ServerError(f"prefill did not compute its half: {half.outcome}; its log ends with\n{way.prefill.last_words()}")
    return half


def ask_decode(way: Way, prompt: Prompt, halves: Halves, answer: dict | None = None, given: float = 0.0) -> Half:
    """Patient for as long as a scenario takes to make something happen, and then for what the row waits."""
    return Half(way.decode.url, prompt, MAX_TOKENS, halves.to_decode(answer), SOON + given + way.patience)


# The next three return False where `half` was answered meanwhile: then what they look for is over.


def known(server: Server, half: Half | None = None) -> bool:
    """Until the engine knows a request."""
    return _seen(half, lambda: server.pool().requests, f"{server.what} knows a request")


def waits(server: Server, half: Half | None = None) -> bool:
    """Until a request waits for its KV."""
    return _seen(half, lambda: "WAITING_FOR_REMOTE_KVS" in server.pool().requests, f"{server.what} waits for KV")


def computes(server: Server, blocks: int, half: Half | None = None) -> bool:
    """Until a request holds that many blocks: it is in the middle of a longer prompt. Looked at as fast as the eye can."""
    return _seen(half, lambda: server.pool().held >= blocks, f"{server.what} holds {blocks} blocks", 0.0)


def _seen(half: Half | None, ready: Callable[[], object], what: str, every: float = LOOK_EVERY) -> bool:
    look_until(lambda: (half is not None and half.at is not None) or ready(), SOON, what, every)
    return half is None or half.at is None


def look_until(ready: Callable[[], object], deadline: float, what: str, every: float = LOOK_EVERY) -> bool:
    end = time.monotonic() + deadline
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"after {deadline:g} s still not: {what}")
        time.sleep(every)
    return True


def free_after(server: Server, since: float, patience: float, states: set[str] | None = None) -> float | None:
    """Seconds from `since` until it holds nothing; None: it still does when the patience is over. `states`: gets all that its requests were seen in.
    @error its engine says nothing: ServerError."""
    while not (pool := server.pool()).quiet:
        if states is not None:
            states.update(pool.requests)
        if time.monotonic() > since + patience:
            return None
        time.sleep(LOOK_EVERY)
    return time.monotonic() - since


def restart(way: Way) -> None:
    """P again, on its port. @error it isn't healthy within START: ServerError."""
    way.prefill.start()
    way.prefill.wait(START)


class Scene:
    """One scenario under way: the pools before, and the row at its end."""

    def __init__(self, way: Way, scenario: Callable[[Way, Prompt], Row]):
        self.way, self.scenario = way, SCENARIOS[scenario]
        self.before = self._pools()
        self._notes: list[str] = []
        self.states: dict[str, set[str]] = {"P": set(), "D": set()}  # that requests were seen in while the pools were waited for

    def _pools(self) -> tuple[Pool, Pool]:
        return self.way.prefill.pool(), self.way.decode.pool()

    def row(self, since: float, half: Half | None, given: float = 0.0, looked_at: str = "PD", note: str = "", happened: bool = True) -> Row:
        """Waits for `half`'s answer (None: nobody is there to be answered) and for the pools of the sides that were asked. P that isn't
        `running` was killed: it is started again. Bounded by patience and `given`, from `since` on, and a restart."""
        patience, killed = given + self.way.patience, not self.way.prefill.running
        self._notes = [note] if note else []
        looked_at = looked_at.replace("P", "") if killed else looked_at
        seen = self._frees(since, patience, half, looked_at)
        if half is not None and half.at is None:
            half.leave()
        if killed:
            self._notes.append(WITH_P)
            self._restart_unless(seen["D"] is None)
        outcome = half.outcome if half is not None else "none"
        answered = half.at - since if half is not None and half.at is not None else None
        equal = self.way.prefill.running and self._equal()
        return Row(
            self.way.name, self.scenario, outcome, half.tokens if half is not None else (), answered, seen.get("P"), seen.get("D"), equal,
            "; ".join(self._notes), looked_at, happened,
        )  # fmt: skip

    def _frees(self, since: float, patience: float, half: Half | None, sides: str) -> dict[str, float | None]:
        """Each side's free_after; None also where its engine can't be looked into any more, which becomes a note."""
        seen: dict[str, float | None] = {}

        def look(side: str) -> None:
            server = self.way.prefill if side == "P" else self.way.decode
            try:
                if side == "D" and half is not None:
                    half.wait(since + patience)  # before its engine knows of the request, it holds nothing either
                seen[side] = free_after(server, since, patience, self.states[side])
            except TROUBLE as error:
                seen[side] = None
                self._notes.append(f"{side}'s engine can't be looked into: {_line(error)}")

        looking = [threading.Thread(target=look, args=(side,)) for side in sides]
        for thread in looking:
            thread.start()
        if half is not None:
            half.wait(since + patience)
        for thread in looking:
            thread.join()
        return seen

    def _restart_unless(self, held: bool) -> None:
        """P again; not where D's pool can't be what it was any more. That P doesn't come back takes nothing from what was seen."""
        try:
            if not held:
                restart(self.way)
        except TROUBLE as error:
            self._notes.append(f"P did not start again: {_line(error)}")

    def _equal(self) -> bool:
        try:
            after = self._pools()
        except TROUBLE:
            return False  # it is noted why
        return all(now.quiet and now.free == then.free for then, now in zip(self.before, after, strict=True))


def _line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def cannot(way: Way, scenario: Callable[[Way, Prompt], Row], why: str) -> Row:
    return Row(way.name, SCENARIOS[scenario], "none", (), None, None, None, True, why)


def not_seen(way: Way, scenario: Callable[[Way, Prompt], Row], error: BaseException) -> Row:
    """What a connector did to its servers left nothing to measure: that is the row."""
    return Row(way.name, SCENARIOS[scenario], "none", (), None, None, None, False, f"not seen: {_line(error)}")


# ---- the scenarios ----


def decode_never_asks(way: Way, prompt: Prompt) -> Row:
    """P is done and D never asks. The clock begins when P is asked, as does its time."""
    scene = Scene(way, decode_never_asks)
    half = ask_prefill(way, prompt, way.halves(way.given))
    return scene.row(half.sent, None, way.given, looked_at="P")


def prefill_never_comes(way: Way, prompt: Prompt) -> Row:
    """D asks and P never comes, though its server is there. The clock begins when D is asked."""
    if not way.decode_first:
        return cannot(way, prefill_never_comes, "D is only asked with P's answer")
    scene = Scene(way, prefill_never_comes)
    half = ask_decode(way, prompt, way.halves(way.given), given=way.given)
    return scene.row(half.sent, half, way.given, looked_at="D")


def killed_while_decode_waits(way: Way, prompt: Prompt) -> Row:
    """D waits for a P that has not begun, whose server is killed."""
    if not way.decode_first:
        return cannot(way, killed_while_decode_waits, "D is only asked with P's answer")
    scene = Scene(way, killed_while_decode_waits)
    half = ask_decode(way, prompt, way.halves(way.long))
    waiting = waits(way.decode, half)
    return scene.row(_killed(way), half, happened=waiting)


def killed_before_decode_asks(way: Way, prompt: Prompt) -> Row:
    """P is done and its server killed; then D asks. The clock begins when D asks."""
    scene = Scene(way, killed_before_decode_asks)
    halves = way.halves(way.long)
    done = ask_prefill(way, prompt, halves)
    way.prefill.kill()
    half = ask_decode(way, prompt, halves, done.params)
    return scene.row(half.sent, half)


def killed_in_mid_stream(way: Way, prompt: Prompt) -> Row:
    """P's server is killed while it computes a prompt that D waits for; where D is asked afterwards, as soon as D knows the request."""
    scene = Scene(way, killed_in_mid_stream)
    halves = way.halves(way.long)
    if not way.decode_first:
        half = ask_decode(way, prompt, halves, ask_prefill(way, prompt, halves).params)
        early = known(way.decode, half)
        return scene.row(_killed(way), half, note="killed as soon as D knew the request", happened=early)
    half = ask_decode(way, prompt, halves)
    waiting = waits(way.decode, half)
    cut = ask_prefill(way, prompt, halves, answered=False)
    middle = waiting and computes(way.prefill, _middle(way.prefill, prompt), cut)
    killed = _killed(way)
    cut.wait(killed + LEAVING)
    return scene.row(killed, half, happened=middle and cut.outcome != "tokens")


def _killed(way: Way) -> float:
    """SIGKILL to all of P's processes. @return when."""
    killed = time.monotonic()
    way.prefill.kill()
    return killed


def _middle(server: Server, prompt: Prompt) -> int:
    """Blocks that a prompt of token ids fills to its middle."""
    return max(1, len(prompt) // server.settings.block // 2)


def decodes_client_leaves(way: Way, prompt: Prompt) -> Row:
    """D's client leaves while it waits; P's half is computed to its end (where D can ask first, P is asked before the client leaves)."""
    scene = Scene(way, decodes_client_leaves)
    halves = way.halves(way.long)
    if way.decode_first:
        half = ask_decode(way, prompt, halves)
        early = waits(way.decode, half)
        early = early and computes(way.prefill, 1, ask_prefill(way, prompt, halves, answered=False))
    else:
        half = ask_decode(way, prompt, halves, ask_prefill(way, prompt, halves).params)
        early = known(way.decode, half)
    left = half.leave()
    return scene.row(left, None, happened=early and half.outcome != "tokens")


def prefills_client_leaves(way: Way, prompt: Prompt) -> Row:
    """P's client leaves in mid-prompt; D, where it can have asked, is to be answered."""
    scene = Scene(way, prefills_client_leaves)
    halves = way.halves(way.long)
    half = ask_decode(way, prompt, halves) if way.decode_first else None
    if half is not None:
        waits(way.decode, half)
    other = ask_prefill(way, prompt, halves, answered=False)
    middle = computes(way.prefill, _middle(way.prefill, prompt), other)
    left = other.leave()
    looked_at = "PD" if half is not None else "P"
    row = scene.row(left, half, looked_at=looked_at, happened=middle and other.outcome != "tokens")
    # Its client may have left in time, and the engine have been told after the prompt's end.
    return dataclasses.replace(row, happened=row.happened and DONE not in scene.states["P"])


SCENARIOS: dict[Callable[[Way, Prompt], Row], str] = {  # in the order of the table, with what it calls them
    decode_never_asks: "P done, D never asks",
    prefill_never_comes: "D asks, P never comes",
    killed_while_decode_waits: "P killed while D waits",
    killed_before_decode_asks: "P killed before D asks",
    killed_in_mid_stream: "P killed in mid-stream",
    decodes_client_leaves: "D's client leaves",
    prefills_client_leaves: "P's client leaves",
}


def table(rows: list[Row]) -> str:
    """Markdown. `-`: there is nothing to wait for; `never`: not within the patience."""

    def seconds(value: float | None, awaited: bool) -> str:
        return f"{value:.2f}" if value is not None else "never" if awaited else "-"

    lines = ["| | connector | answer | answered, s | blocks back on P, s | blocks back on D, s | pools as before |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        on_p = "with P" if WITH_P in row.note else seconds(row.prefill_free, "P" in row.looked_at)
        times = [seconds(row.answered, row.outcome != "none"), on_p, seconds(row.decode_free, "D" in row.looked_at)]
        lines.append("| " + " | ".join([row.scenario, row.way, _answer(row), *times, "yes" if row.pools_equal else "no"]) + " |")
    return "\n".join(lines)


def _answer(row: Row) -> str:
    """What the client got, and what there is to say about it."""
    outcome = row.outcome[:60] if row.outcome != "none" else "nobody waits" if row.looked_at else ""
    notes = row.note.removeprefix(WITH_P).replace(f"; {WITH_P}", "").removeprefix("; ")
    return ": ".join(filter(None, [outcome, notes, "" if row.happened else "P or D was done before it happened"]))
