"""The scenarios of failures.py and the benchmark's part "ends", whatever servers do: each wait ends, and what was seen is a row. No server is started."""

import socket
from types import SimpleNamespace

import failures
import pytest
from failures import Halves, Way
from harness import Pool, ServerError
from peers import ends

FREE, HELD = Pool(10, 10, 0, {}), Pool(10, 4, 0, {"WAITING_FOR_REMOTE_KVS": 1})
PATIENCE = 0.1


class Fake:
    """Answers no request. Its pools are those that are named, in turn, then the last for good."""

    def __init__(self, what: str, *pools: Pool, starts: bool = True):
        self.what, self._pools, self._starts = what, list(pools), starts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.running, self.started = True, 0
        self.settings = SimpleNamespace(block=128)

    def pool(self) -> Pool:
        if not self.running:
            raise ServerError(f"{self.what}'s engine is dead\nand more")
        return self._pools.pop(0) if len(self._pools) > 1 else self._pools[0]

    def kill(self) -> None:
        self.running = False

    def start(self) -> None:
        self.running, self.started = self._starts, self.started + 1

    def wait(self, deadline: float) -> None:
        if not self.running:
            raise ServerError(f"{self.what} ended while it started\nits log")

    def last_words(self) -> str:
        return "its log"

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def servers():
    made: list[Fake] = []

    def make(*arguments, **more) -> Fake:
        made.append(Fake(*arguments, **more))
        return made[-1]

    yield make
    for server in made:
        server.close()


def way(prefill: Fake, decode: Fake) -> Way:
    return Way("fake", prefill, decode, lambda seconds: Halves({}, lambda answer: {}), given=0.0, patience=PATIENCE)


def test_who_waits_for_ever_is_a_row_and_prefill_is_left_to_the_caller(servers):
    prefill = servers("P", FREE)
    row = failures.killed_while_decode_waits(way(prefill, servers("D", FREE, HELD)), [1])
    assert (row.outcome, row.answered, row.decode_free, row.pools_equal, row.happened) == ("no answer", None, None, False, True)
    assert prefill.started == 0
    assert "| never | with P | never | no |" in failures.table([row])


def test_a_prefill_that_does_not_start_again_takes_nothing_from_what_was_seen(servers):
    row = failures.killed_while_decode_waits(way(servers("P", FREE, starts=False), servers("D", FREE, HELD, FREE)), [1])
    assert row.decode_free is not None
    assert not row.pools_equal
    assert "P did not start again: P ended while it started" in row.note


def test_an_engine_that_says_nothing_any_more_is_a_row(servers):
    decode = servers("D", FREE, HELD)
    one = way(servers("P", FREE), decode)
    scene = failures.Scene(one, failures.killed_while_decode_waits)
    half = failures.ask_decode(one, [1], one.halves(0))
    decode.kill()
    row = scene.row(half.sent, half)
    assert row.note == "D's engine can't be looked into: D's engine is dead"
    assert (row.decode_free, row.pools_equal) == (None, False)


def test_what_is_over_before_it_could_happen_says_so(servers):
    """Prefill has the whole prompt, and keeps its blocks, when it hears that its client left."""
    done = Pool(10, 4, 0, {failures.DONE: 1})
    row = failures.prefills_client_leaves(way(servers("P", FREE, HELD, done, FREE), servers("D", FREE, HELD, FREE)), [1])
    assert not row.happened
    assert "before it happened" in failures.table([row])


@pytest.fixture
def pair(servers, monkeypatch):
    monkeypatch.setattr(ends, "warm", lambda pair, seed: None)
    prefill, decode = servers("P", HELD), servers("D", HELD)
    return SimpleNamespace(name="fake", way=way(prefill, decode), servers=[prefill, decode], thaw=lambda: None, close=lambda: None)


def test_each_scenario_has_its_row_where_nobody_ever_lets_go(pair):
    rows = ends.measure([pair], lambda words: None)
    assert [row.scenario for row in rows] == list(failures.SCENARIOS.values())
    assert not any(row.pools_equal for row in rows)
    assert pair.servers[1].started == len(rows) - 1  # anew after each but the last


def test_each_scenario_has_its_row_where_nobody_starts_again(pair):
    pair.servers[0]._starts = False
    rows = ends.measure([pair], lambda words: None)
    assert [row.scenario for row in rows] == list(failures.SCENARIOS.values())
    assert all(row.note == "not seen: P ended while it started" for row in rows[1:])
