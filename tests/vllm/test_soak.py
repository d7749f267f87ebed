"""Real servers under failures: one at a time, as rows of the table that vLLM's own connectors are in, and many under load."""

import dataclasses
import pathlib
import secrets
import time

import failures
import pytest
from ask import complete, new_prompt, stream
from failures import Halves, Row, Way, table
from harness import Proxy, Server, running, until
from meeting import free_ports, kvloom_connector
from models import model
from settings import Settings
from soak import Asked, Clients, Told, held, listening, named, trace

GIVEN = 3.0  # seconds that a half waits for one that never comes
SOON = 2.0  # seconds from noticing, or from the end of the time given, until all is free and answered
SLACK = 8.0  # more: seconds for a machine that others use, so a bound on waiting and no measurement
GIVEN_MANY = 30  # seconds that the proxy gives each transfer of a soak
PATIENCE = 120.0  # seconds for what is no question of time
SEED = 6
LONGEST = 1_900  # tokens of a prompt: many steps
COUNTED = {"kvloom_proxy_attempts_total", "kvloom_proxy_retries_total", "kvloom_proxy_decode_alone_total"}


class Servers:
    """A prefill server and two decode servers, which differ in what becomes of a request whose load failed."""

    def __init__(self):
        self.control = free_ports(1)
        tiny = Settings(model("llama"), chunk=128)
        self.prefill = Server(tiny.but(connector=kvloom_connector("kv_producer", control_port=self.control)), "prefill")
        self.recompute = Server(tiny.but(connector=kvloom_connector("kv_consumer")), "decode")
        self.fail = Server(tiny.but(connector=kvloom_connector("kv_consumer", "fail")), "decode-fail")

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.control}"

    def halves(self, seconds: float) -> Halves:
        said = {"transfer": secrets.token_hex(16), "seconds": seconds}
        to_decode = {"kvloom": {"role": "decode", "prefill": [self.address], **said}}
        return Halves({"kvloom": {"role": "prefill", **said}}, lambda answer: to_decode)

    def way(self, decode: Server) -> Way:
        return Way(f"kvloom, {decode.what}", self.prefill, decode, self.halves, GIVEN, patience=SOON + SLACK)


@pytest.fixture(scope="module")
def servers():
    made = Servers()
    with running(made.prefill, made.recompute, made.fail):
        yield made


@pytest.fixture
def prompt() -> list[int]:
    return new_prompt(LONGEST)


def freed_in_time(row: Row) -> None:
    """Each side that was asked and lives."""
    times = {"P": row.prefill_free, "D": row.decode_free}
    assert not [side for side in row.looked_at if times[side] is None], f"blocks are still held: {row}"
    assert row.pools_equal, f"pools are not as they were: {row}"


@pytest.mark.parametrize("scenario", list(failures.SCENARIOS), ids=lambda scenario: scenario.__name__)
def test_what_ends_early_is_answered_and_freed(servers, shown, prompt, scenario):
    row = scenario(servers.way(servers.recompute), prompt)
    if not servers.prefill.running:  # D never let go of what it wanted from it
        servers.prefill.start()
        servers.prefill.wait()
    shown(table([row]).splitlines()[-1])
    freed_in_time(row)
    assert row.answer_came, servers.recompute.last_words()
    if row.outcome != "none":
        servers.recompute.forget_prefixes()
        assert row.tokens == complete(servers.recompute.url, prompt, failures.MAX_TOKENS).tokens


@pytest.mark.parametrize("scenario", [failures.prefill_never_comes, failures.prefills_client_leaves], ids=lambda scenario: scenario.__name__)
def test_where_failed_loads_fail_the_client_is_told(servers, shown, scenario):
    for _ in range(5):  # a prefill may be done before its client leaves: then there is nothing to tell, and the answer is right
        prompt = new_prompt(LONGEST)
        row = scenario(servers.way(servers.fail), prompt)
        shown(table([row]).splitlines()[-1])
        freed_in_time(row)
        if not row.tokens:
            break
        assert row.tokens == complete(servers.recompute.url, prompt, failures.MAX_TOKENS).tokens
    assert row.outcome.startswith("error: 500") and not row.tokens


@pytest.mark.parametrize("blocks", [1, 8])
def test_a_client_that_leaves_the_proxy_takes_both_halves_with_it(servers, shown, prompt, blocks):
    """Nothing waits for the time that the proxy gave."""
    with running(proxy_before(servers, servers.recompute, "--prefill-timeout", "600")) as (proxy,):
        with stream(proxy.url, prompt, 200) as reading:
            failures.computes(servers.prefill, blocks)
        assert reading.tokens == []
        left = time.monotonic()
        freed = [failures.free_after(server, left, SOON + SLACK) for server in (servers.prefill, servers.recompute)]
        shown(f"client of the proxy left when prefill had {blocks} of 15 blocks: free on P and D after, s: {freed}")
        assert None not in freed


# ---- many ----


def proxy_before(servers: Servers, decode: Server, *options: str) -> Proxy:
    return Proxy([servers.prefill], [decode], "--alone-below", "0", *options, controls=[servers.address])


def kill_under_load(clients: Clients, servers: Servers, after: int) -> None:
    """SIGKILL to prefill while it has requests, once `after` were asked; then it is started again, on the same ports."""
    until(lambda: clients.begun >= after, PATIENCE, f"{after} requests were asked")
    failures.known(servers.prefill)
    servers.prefill.kill()
    servers.prefill.start()
    servers.prefill.wait()


def soak(servers: Servers, proxy: Proxy, parts: list[tuple[list[Asked], bool]]) -> list[Told]:
    """Part by part, each when the proxy sees prefill; in those with True, prefill is killed in the middle."""
    told: list[Told] = []
    for asked, kills in parts:
        until(lambda: proxy.sends_to(servers.prefill), PATIENCE, "the proxy sends to prefill")
        with Clients(proxy.url, asked, at_once=8) as clients:
            if kills:
                kill_under_load(clients, servers, len(asked) // 2)
            told += clients.answers()
    return told


def alone(server: Server, asked: list[Asked]) -> list[Told]:
    """What a server answers by itself, of what it has never been sent; clients that left are not asked for again."""
    server.forget_prefixes()
    staying = [dataclasses.replace(one, streamed=False) for one in asked if not one.leaves]
    with Clients(server.url, staying) as clients:
        answers = iter(clients.answers())
    return [Told() if one.leaves else next(answers) for one in asked]


def test_200_requests_while_clients_leave_and_prefill_dies_twice(servers, shown):
    decode, asked = servers.recompute, trace(200, SEED)
    both = (servers.prefill, decode)
    with running(proxy_before(servers, decode, "--prefill-timeout", str(GIVEN_MANY))) as (proxy,):
        complete(proxy.url, asked[0].prompt, 1)  # the two have met
        before, pools = held(decode), [server.wait_quiet(SOON + SLACK) for server in both]
        begin = time.monotonic()
        told = soak(servers, proxy, [(asked[:70], True), (asked[70:140], True), (asked[140:], False)])
        end = time.monotonic()
        after = [server.wait_quiet(GIVEN_MANY + SOON + SLACK) for server in both]
        quiet = time.monotonic()
        until(lambda: held(decode) == before, PATIENCE, f"decode's engine holds what it held before, {before}; it holds {held(decode)}")
        counted = {name.removeprefix("kvloom_proxy_"): int(value) for name, value in proxy.metrics().items() if name in COUNTED}
        assert proxy.stop() == []
    left = sum(one.leaves for one in asked)
    shown(f"soak: {len(asked)} requests in {end - begin:.1f} s, {left} clients left; quiet {quiet - end:.2f} s later; {counted}; {before}")
    assert [(pool.blocks, pool.free) for pool in after] == [(pool.blocks, pool.free) for pool in pools]
    wrong = [(n, told[n], right) for n, right in enumerate(alone(decode, asked)) if not asked[n].leaves and told[n] != right]
    assert not wrong, f"{len(wrong)} answers are not the single server's; the first (number, answer, right): {wrong[0]}"


def test_where_failed_loads_fail_each_request_has_one_answer(servers, shown):
    """Right, for the proxy asks again; or an error that says what has happened. Never a part of an answer, and never nothing."""
    decode, asked = servers.fail, trace(48, SEED + 1)
    with running(proxy_before(servers, decode, "--prefill-timeout", str(GIVEN_MANY))) as (proxy,):
        told = soak(servers, proxy, [(asked, True)])
        for server in (servers.prefill, decode):
            server.wait_quiet(GIVEN_MANY + SOON + SLACK)
    staying = [(answer, right) for one, answer, right in zip(asked, told, alone(decode, asked), strict=True) if not one.leaves]
    errors = [answer.error for answer, _ in staying if answer.tokens is None]
    shown(f"soak with policy fail: {len(staying) - len(errors)} of {len(staying)} right, errors: {errors}")
    assert all(answer == right or (answer.tokens is None and answer.error) for answer, right in staying)


# ---- the end ----


def test_nothing_is_left_when_all_are_told_to_stop(servers):
    everyone = (servers.prefill, servers.recompute, servers.fail)
    files = set().union(*(named(server) for server in everyone))
    assert [server.stop() for server in everyone] == [[], [], []]
    assert not [file for file in files if pathlib.Path(file).exists()]
    assert not [port for port in (servers.control, *(server.port for server in everyone)) if listening(port)]
