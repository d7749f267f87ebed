"""What becomes of a request when one side never comes, dies or loses its client: scenarios for any connector, each a row of one table.

    way = Way("kvloom", prefill, decode, halves=lambda given: Halves(to_prefill, lambda answer: to_decode), given=4.0)
    row = killed_while_decode_waits(way, prompt)       # Row: answered?, seconds until it was, until blocks are back on P and on D, pools equal?
    print(table([row]))                                # Markdown, units in its head

The two servers are asked directly, half by half, as their proxy would: P's half for one token, D's for MAX_TOKENS. A connector whose decode half
needs what prefill answered says so by `decode_first=False`; a scenario that it can't be in gives a row that says why.
The clock of a row begins with what happened: the process was killed, the client left; or, where one half never comes, the other was sent.
Nothing is asserted here: a wait that is longer than `patience` leaves None in the row, and the caller judges. Each scenario begins with quiet
servers and ends with both running; after None the caller has to restart what still holds blocks.
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

    @property
    def answer_came(self) -> bool:
        return self.outcome != "no answer"


class Half:
    """One half, asked in a thread of its own; its client can leave."""

    def __init__(self, url: str, prompt: Prompt, max_tokens: int, params: dict, patience: float):
        place = urllib.parse.urlsplit(url)
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
            if not isinstance(error, TimeoutError):
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

    def wait(self) -> "Half":
        """Until it is answered, or its patience is over (`at` is None then)."""
        self._thread.join()
        return self

    def leave(self) -> float:
        """The client closes its connection. @return when."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)
        left = time.monotonic()
        self._thread.join()
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
    return Half(way.decode.url, prompt, MAX_TOKENS, halves.to_decode(answer), given + way.patience)


def known(server: Server) -> None:
    """Until the engine knows a request."""
    look_until(lambda: server.pool().requests, SOON, f"{server.what} knows a request")


def waits(server: Server) -> None:
    """Until a request waits for its KV."""
    look_until(lambda: "WAITING_FOR_REMOTE_KVS" in server.pool().requests, SOON, f"{server.what} waits for KV")


def computes(server: Server, blocks: int) -> None:
    """Until a request holds that many blocks: it is in the middle of a longer prompt. Looked at as fast as the eye can."""
    look_until(lambda: (seen := server.pool()).blocks - seen.free >= blocks, SOON, f"{server.what} holds {blocks} blocks", 0.0)


def look_until(ready: Callable[[], object], deadline: float, what: str, every: float = LOOK_EVERY) -> bool:
    end = time.monotonic() + deadline
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"after {deadline:g} s still not: {what}")
        time.sleep(every)
    return True


def free_after(server: Server, since: float, patience: float) -> float | None:
    """Seconds from `since` until it holds nothing; None: it still does when the patience is over."""
    while not server.pool().quiet:
        if time.monotonic() > since + patience:
            return None
        time.sleep(LOOK_EVERY)
    return time.monotonic() - since


def restart(way: Way) -> None:
    way.prefill.start()
    way.prefill.wait()


class Scene:
    """One scenario under way: the pools before, and the row at its end."""

    def __init__(self, way: Way, scenario: str):
        self.way, self.scenario = way, scenario
        self.before = self._pools()

    def _pools(self) -> tuple[Pool, Pool]:
        return self.way.prefill.pool(), self.way.decode.pool()

    def row(self, since: float, half: Half | None, given: float = 0.0, killed: bool = False, note: str = "") -> Row:
        """Waits for `half`'s answer (None: nobody is there to be answered) and for both pools. After `killed`, prefill is started again."""
        patience = given + self.way.patience
        seen: dict[str, float | None] = {}
        sides = {"decode": self.way.decode} | ({} if killed else {"prefill": self.way.prefill})

        def look(name: str, server: Server) -> None:
            if name == "decode" and half is not None:
                half.wait()  # before its engine knows of the request, it holds nothing either
            seen[name] = free_after(server, since, patience)

        looking = [threading.Thread(target=look, args=side) for side in sides.items()]
        for thread in looking:
            thread.start()
        if half is not None:
            half.wait()
        for thread in looking:
            thread.join()
        if half is not None and half.at is None:
            half.leave()
        if killed:
            restart(self.way)
            note = "; ".join(filter(None, [note, "P's blocks went with it"]))
        outcome = half.outcome if half is not None else "none"
        answered = half.at - since if half is not None and half.at is not None else None
        return Row(
            self.way.name, self.scenario, outcome, half.tokens if half is not None else (), answered, seen.get("prefill"), seen.get("decode"),
            self._equal(), note,
        )  # fmt: skip

    def _equal(self) -> bool:
        after = self._pools()
        return all(now.quiet and now.free == then.free for then, now in zip(self.before, after, strict=True))


def cannot(way: Way, scenario: str, why: str) -> Row:
    return Row(way.name, scenario, "none", (), None, None, None, True, why)


# ---- the scenarios ----


def decode_never_asks(way: Way, prompt: Prompt) -> Row:
    """P is done and D never asks. The clock begins when P is asked, as does its time."""
    scene = Scene(way, "P done, D never asks")
    half = ask_prefill(way, prompt, way.halves(way.given))
    return scene.row(half.sent, None, way.given)


def prefill_never_comes(way: Way, prompt: Prompt) -> Row:
    """D asks and P never comes, though its server is there. The clock begins when D is asked."""
    scene = Scene(way, "D asks, P never comes")
    if not way.decode_first:
        return cannot(way, scene.scenario, "D is only asked with P's answer")
    half = ask_decode(way, prompt, way.halves(way.given), given=way.given)
    return scene.row(half.sent, half, way.given)


def killed_while_decode_waits(way: Way, prompt: Prompt) -> Row:
    """D waits for a P that has not begun, whose server is killed."""
    scene = Scene(way, "P killed while D waits")
    if not way.decode_first:
        return cannot(way, scene.scenario, "D is only asked with P's answer")
    half = ask_decode(way, prompt, way.halves(way.long))
    waits(way.decode)
    killed = time.monotonic()
    way.prefill.kill()
    return scene.row(killed, half, killed=True)


def killed_before_decode_asks(way: Way, prompt: Prompt) -> Row:
    """P is done and its server killed; then D asks. The clock begins when D asks."""
    scene = Scene(way, "P killed before D asks")
    halves = way.halves(way.long)
    done = ask_prefill(way, prompt, halves)
    way.prefill.kill()
    half = ask_decode(way, prompt, halves, done.params)
    return scene.row(half.sent, half, killed=True)


def killed_in_mid_stream(way: Way, prompt: Prompt) -> Row:
    """P's server is killed while it computes a prompt that D waits for; where D is asked afterwards, as soon as D knows the request."""
    scene = Scene(way, "P killed in mid-stream")
    halves = way.halves(way.long)
    if way.decode_first:
        half = ask_decode(way, prompt, halves)
        waits(way.decode)
        cut = ask_prefill(way, prompt, halves, answered=False)
        computes(way.prefill, _middle(way.prefill, prompt))
    else:
        cut = ask_prefill(way, prompt, halves)
        half = ask_decode(way, prompt, halves, cut.params)
        known(way.decode)
    killed = time.monotonic()
    way.prefill.kill()
    cut.wait()
    note = "" if way.decode_first else "killed as soon as D knew the request"
    return scene.row(killed, half, killed=True, note=note)


def _middle(server: Server, prompt: Prompt) -> int:
    """Blocks that a prompt of token ids fills to its middle."""
    return max(1, len(prompt) // server.settings.block // 2)


def decodes_client_leaves(way: Way, prompt: Prompt) -> Row:
    """D's client leaves while it waits; P's half is computed to its end (where D can ask first, P is asked before the client leaves)."""
    scene = Scene(way, "D's client leaves")
    halves = way.halves(way.long)
    if way.decode_first:
        half = ask_decode(way, prompt, halves)
        waits(way.decode)
        other = ask_prefill(way, prompt, halves, answered=False)
        computes(way.prefill, 1)
    else:
        other = ask_prefill(way, prompt, halves)
        half = ask_decode(way, prompt, halves, other.params)
        known(way.decode)
    left = half.leave()
    other.wait()
    return scene.row(left, None)


def prefills_client_leaves(way: Way, prompt: Prompt) -> Row:
    """P's client leaves in mid-prompt; D, where it can have asked, is to be answered."""
    scene = Scene(way, "P's client leaves")
    halves = way.halves(way.long)
    half = ask_decode(way, prompt, halves) if way.decode_first else None
    if half is not None:
        waits(way.decode)
    other = ask_prefill(way, prompt, halves, answered=False)
    computes(way.prefill, _middle(way.prefill, prompt))
    return scene.row(other.leave(), half)


SCENARIOS: tuple[Callable[[Way, Prompt], Row], ...] = (
    decode_never_asks, prefill_never_comes, killed_while_decode_waits, killed_before_decode_asks, killed_in_mid_stream, decodes_client_leaves,
    prefills_client_leaves,
)  # fmt: skip


def table(rows: list[Row]) -> str:
    """Markdown. `-`: there is nothing to wait for; `never`: not within the patience."""

    def seconds(value: float | None, awaited: bool) -> str:
        return f"{value:.2f}" if value is not None else "never" if awaited else "-"

    lines = ["| | connector | answer | answered, s | blocks back on P, s | blocks back on D, s | pools as before |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        ran = row.decode_free is not None or not row.pools_equal
        killed = "P's blocks went" in row.note
        cells = [
            row.scenario, row.way, f"{row.outcome[:60]}{f' ({row.note})' if row.note else ''}", seconds(row.answered, row.outcome != "none"),
            seconds(row.prefill_free, ran and not killed), seconds(row.decode_free, ran), "yes" if row.pools_equal else "no",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)

