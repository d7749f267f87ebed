"""Sessions in one process, over shared memory and real control sockets: layers, chunks, events, waits, ends."""

from __future__ import annotations

import asyncio
import gc
import json
import pathlib
import re
import select
import signal
import threading
import time

import numpy as np
import pytest
from conftest import LONG, Pair, checksum_of, key, make_decode, make_prefill, shape

import kvloom

SOURCE_PAGES, TARGET_PAGES = [9, 4, 30], [7, 60, 2, 1, 33, 12]  # of 16 and 8 tokens
TOKENS = 48


def drain(session, until) -> list:
    """Events up to the first of type `until`."""
    events = []
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        events += session.poll(1)
        if any(isinstance(event, until) for event in events):
            return events
    raise AssertionError(f"no {until.__name__} among {events}")


def transfer(pair: Pair, of: kvloom.TransferKey, tokens: tuple[int, int] = (0, TOKENS)) -> None:
    pair.decode.begin(of, pair.sources, tokens, TARGET_PAGES)
    pair.prefill.offer(of, SOURCE_PAGES)


def computed(pair: Pair, of: kvloom.TransferKey) -> None:
    """All layers of it."""
    for layer in range(4):
        pair.prefill.session.ready(of, layer, TOKENS)


def test_bytes_land_and_both_sides_say_so(pair):
    of = key()
    transfer(pair, of)
    computed(pair, of)
    ended = pair.decode.session.wait(of, LONG)
    assert (ended.outcome, ended.why, ended.bytes, ended.payloads) == (kvloom.Outcome.landed, None, TOKENS * 4 * 4 * 64, {})
    assert checksum_of(pair.prefill, SOURCE_PAGES, (0, TOKENS)) == checksum_of(pair.decode, TARGET_PAGES, (0, TOKENS))
    source = pair.prefill.session.wait(of, LONG)
    assert source.outcome is kvloom.Outcome.landed and 0 <= source.exposed_tail < LONG
    assert abs(time.monotonic() - ended.at) < LONG
    pair.prefill.session.wait_released(of, LONG)
    pair.decode.session.wait_released(of, LONG)
    assert pair.prefill.session.counts()["delivered"] == ended.bytes
    assert (pair.prefill.session.open, pair.decode.session.open, pair.decode.session.covered(of)) == (0, 0, 0)


def test_layers_arrive_one_by_one(pair):
    of = key()
    transfer(pair, of)
    for layer in range(4):
        with pytest.raises(kvloom.DeadlineExceeded, match="has not landed after 20 ms"):
            pair.decode.session.wait_layer(of, layer, 0.02)
        pair.prefill.session.ready(of, layer, TOKENS)
        pair.decode.session.wait_layer(of, layer, LONG)
        assert checksum_of(pair.prefill, SOURCE_PAGES, (0, TOKENS), [layer]) == checksum_of(pair.decode, TARGET_PAGES, (0, TOKENS), [layer])
        pair.prefill.session.wait_layer_released(of, layer, LONG)
    events = drain(pair.decode.session, kvloom.TargetReleased)
    assert [e.layer for e in events if isinstance(e, kvloom.LayerLanded)] == [0, 1, 2, 3]
    assert [type(e) for e in events[4:]] == [kvloom.TargetEnded, kvloom.TargetReleased]
    assert {e.key for e in events} == {of}


def test_chunks_grow_the_table_and_a_prefix_stays(pair):
    of = key()
    pair.decode.begin(of, pair.sources, (8, TOKENS), TARGET_PAGES)
    pair.prefill.session.offer(of, LONG)
    before = pair.decode.memory.copy()
    for chunk in range(3):
        pair.prefill.session.set_table(of, "kv", kvloom.CacheTable(np.array(SOURCE_PAGES[: chunk + 1]), 64))
        for layer in range(4):
            pair.prefill.session.ready_all([(of, 16 * (chunk + 1))], layer)
    assert pair.decode.session.wait(of, LONG).outcome is kvloom.Outcome.landed
    assert checksum_of(pair.prefill, SOURCE_PAGES, (8, TOKENS)) == checksum_of(pair.decode, TARGET_PAGES, (8, TOKENS))
    page = pair.decode.side.groups[0].layout.page_stride
    untouched = [p for p in range(64) if p not in TARGET_PAGES[1:]]
    for n in untouched:
        assert (pair.decode.memory[:, n * page : (n + 1) * page] == before[:, n * page : (n + 1) * page]).all()


def test_a_payload_rides_with_completion(pair):
    of = key()
    pair.decode.begin(of, pair.sources, (0, TOKENS), TARGET_PAGES)
    pair.prefill.offer(of, SOURCE_PAGES, has_payload=True)
    computed(pair, of)
    with pytest.raises(kvloom.InvalidArgument):
        pair.prefill.session.payload(of, bytes(1 << 20))
    pair.prefill.session.payload(of, b"\0token 17")
    assert pair.decode.session.wait(of, LONG).payloads == {0: b"\0token 17"}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_cancel_ends_both_sides_and_gives_the_pages_back(pair, side):
    of = key()
    transfer(pair, of)
    pair.prefill.session.ready(of, 0, TOKENS)
    pair.decode.session.wait_layer(of, 0, LONG)
    getattr(pair, side).session.cancel(of, "the client left")
    for rank in (pair.prefill, pair.decode):
        ended = rank.session.wait(of, LONG)
        assert ended.outcome is not kvloom.Outcome.landed and isinstance(ended.why, kvloom.Error)
        rank.session.wait_released(of, LONG)
    assert "the client left" in str(pair.decode.session.wait(of, LONG).why) + str(pair.prefill.session.wait(of, LONG).why)
    with pytest.raises(kvloom.Error) as raised:
        pair.decode.session.wait_layer(of, 3, LONG)
    assert raised.value.message == pair.decode.session.wait(of, LONG).why.message


def test_nobody_computes_is_a_deadline(pair):
    of = key()
    pair.decode.begin(of, pair.sources, (0, TOKENS), TARGET_PAGES, time=0.2)
    ended = pair.decode.session.wait(of, LONG)
    assert ended.outcome is kvloom.Outcome.failed and isinstance(ended.why, kvloom.DeadlineExceeded)
    pair.decode.session.wait_released(of, LONG)


def test_a_peer_that_goes_is_noticed(pair):
    of = key()
    transfer(pair, of)
    pair.prefill.session.ready(of, 0, TOKENS)
    pair.decode.session.wait_layer(of, 0, LONG)
    pair.prefill.session.close()
    ended = pair.decode.session.wait(of, LONG)
    assert ended.outcome is kvloom.Outcome.failed and isinstance(ended.why, kvloom.Unavailable)
    pair.decode.session.wait_released(of, LONG)


def test_many_requests_at_once_from_many_threads(pair):
    pages = 2  # of the source, a request
    keys = [key() for _ in range(16)]

    def serve(n: int) -> None:
        of = keys[n]
        table = [pages * n, pages * n + 1]
        pair.decode.begin(of, pair.sources, (0, 32), [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3])
        pair.prefill.offer(of, table)
        for layer in range(4):
            pair.prefill.session.ready(of, layer, 32)
        assert pair.decode.session.wait(of, LONG).outcome is kvloom.Outcome.landed
        pair.decode.session.forget(of)

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = set()
    while len(ended) < 16:
        ended |= {e.key for e in drain(pair.decode.session, kvloom.TargetReleased) if isinstance(e, kvloom.TargetReleased)}
    assert ended == set(keys)
    for n in range(16):
        assert checksum_of(pair.prefill, [2 * n, 2 * n + 1], (0, 32)) == checksum_of(pair.decode, list(range(4 * n, 4 * n + 4)), (0, 32))
    with pytest.raises(kvloom.InvalidArgument, match="not known"):
        pair.decode.session.wait(keys[0], LONG)


def test_two_prefill_ranks_and_two_decode_ranks():
    side, to = kvloom.Side(shape(), "cp=2:layers,page=16"), kvloom.Side(shape(), "tp=2,page=8")
    prefill = [make_prefill(side, rank) for rank in range(2)]
    decode = [make_decode(to, rank) for rank in range(2)]
    of = key()
    for rank in decode:
        rank.begin(of, [p.session.address for p in prefill], (0, TOKENS), TARGET_PAGES)
    for rank in prefill:
        rank.offer(of, SOURCE_PAGES)
        for layer in rank.layers():
            rank.session.ready(of, layer, TOKENS)
    assert all(rank.session.wait(of, LONG).outcome is kvloom.Outcome.landed for rank in decode)
    sent, landed = (sum(checksum_of(r, pages, (0, TOKENS)) for r in ranks) % 2**64
                    for ranks, pages in ((prefill, SOURCE_PAGES), (decode, TARGET_PAGES)))
    assert sent == landed
    for rank in decode + prefill:
        rank.session.close()


def test_other_threads_run_while_one_waits(pair):
    of = key()
    transfer(pair, of)
    counted = 0
    done = threading.Event()

    def wait() -> None:
        with pytest.raises(kvloom.DeadlineExceeded):
            pair.decode.session.wait_layer(of, 0, 0.3)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while not done.is_set():
        counted += 1
    thread.join()
    assert counted > 1000


def test_a_signal_ends_a_wait(pair):
    of = key()
    transfer(pair, of)

    class Rang(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for wait in (lambda: pair.decode.session.wait(of, 3600), lambda: pair.prefill.session.poll(3600)):
            pair.prefill.session.poll()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Rang):
                wait()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_closing_ends_waits_and_refuses_calls(pair):
    of = key()
    transfer(pair, of)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            pair.decode.session.wait(of, 3600)
        except kvloom.Error as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    pair.decode.session.close()
    pair.decode.session.close()
    for thread in threads:
        thread.join()
    assert {type(e) for e in raised} <= {kvloom.Cancelled, kvloom.InvalidArgument} and len(raised) == 3
    assert pair.decode.session.closed
    with pytest.raises(kvloom.InvalidArgument, match="closed"):
        pair.decode.session.wait(of, 1)


def test_a_poll_that_waits_ends_with_the_session(pair):
    raised: list[BaseException] = []
    begun = threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        try:
            pair.decode.session.poll(3600)
        except kvloom.Error as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
        begun.acquire()
    pair.decode.session.close()
    for thread in threads:
        thread.join()
    assert {type(e) for e in raised} <= {kvloom.Cancelled, kvloom.InvalidArgument} and len(raised) == 2


def test_what_is_left_is_polled_after_closing(pair):
    of = key()
    transfer(pair, of)
    computed(pair, of)
    pair.decode.session.wait_released(of, LONG)
    pair.decode.session.close()
    assert select.select([pair.decode.session], [], [], 0)[0]
    assert isinstance(pair.decode.session.poll(LONG)[-1], kvloom.TargetReleased)
    assert pair.decode.session.poll() == []
    with pytest.raises(kvloom.InvalidArgument, match="closed"):
        pair.decode.session.poll(LONG)


def test_a_poll_waits_on_where_another_was_faster(pair):
    taken: list[list[object]] = []
    threads = [threading.Thread(target=lambda: taken.append(pair.decode.session.poll(LONG))) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):  # each transfer wakes all, and serves one or more
        of = key()
        pair.decode.begin(of, pair.sources, (0, 8), [1])
        pair.decode.session.cancel(of, "no")
        pair.decode.session.wait_released(of, LONG)
    assert len(taken) == 4 and all(taken)


def test_a_descriptor_tells_of_events(pair):
    source = pair.prefill.session
    assert select.select([source], [], [], 0) == ([], [], [])
    of = key()
    transfer(pair, of)
    source.cancel(of, "no")
    assert select.select([source], [], [], LONG)[0] == [source]
    drain(source, kvloom.SourceReleased)
    assert select.select([source], [], [], 0)[0] == []


def test_asyncio_waits_for_events(pair):
    of = key()
    transfer(pair, of)
    computed(pair, of)

    async def landed() -> kvloom.TargetEnded:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[kvloom.TargetEnded] = loop.create_future()

        def read() -> None:
            for event in pair.decode.session.poll():
                if isinstance(event, kvloom.TargetEnded) and not future.done():
                    future.set_result(event)

        loop.add_reader(pair.decode.session.fileno(), read)
        try:
            return await asyncio.wait_for(future, LONG)
        finally:
            loop.remove_reader(pair.decode.session.fileno())

    assert asyncio.run(landed()).outcome is kvloom.Outcome.landed


def test_events_are_kept_only_where_they_are_wished_for():
    decode = make_decode(kvloom.Side(shape(), "tp=1"))
    with pytest.raises(kvloom.InvalidArgument, match="events=True"):
        decode.session.poll()
    with pytest.raises(kvloom.InvalidArgument, match="events=True"):
        decode.session.fileno()
    with pytest.raises(kvloom.InvalidArgument, match="trace=True"):
        decode.session.trace()
    decode.session.close()


def switches() -> dict[str, int]:
    """How often each thread of this process but the caller's has gone to sleep so far."""
    out = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            out[task.name] = int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)[1])
    return out


def test_an_idle_sessions_threads_sleep(pair):
    pair.decode.session.poll(0.2)
    before = switches()
    assert len(before) >= 4  # of both sessions, and libzmq's
    assert pair.decode.session.poll(0.5) == []
    assert switches() == before


def test_metrics_and_trace(pair):
    of = key()
    transfer(pair, of)
    computed(pair, of)
    pair.decode.session.wait_released(of, LONG)
    text = pair.decode.session.metrics()
    assert 'kvloom_transfers_total{rank="0",side="decode",outcome="landed"} 1\n' in text
    assert f'kvloom_landed_bytes_total{{rank="0",side="decode"}} {TOKENS * 4 * 4 * 64}\n' in text
    trace = pair.decode.session.trace()
    assert "landed" in trace
    assert json.loads(kvloom.merge_traces([trace, trace]))["traceEvents"]


def test_curve_keys_are_asked_for():
    server, client, stranger = kvloom.make_curve_keys(), kvloom.make_curve_keys(), kvloom.make_curve_keys()
    side = kvloom.Side(shape(), "tp=1,page=16")
    prefill = make_prefill(side, keys=server, clients=[client[0]])
    for keys, outcome in ((client, kvloom.Outcome.landed), (stranger, kvloom.Outcome.failed)):
        decode = make_decode(side, keys=keys)
        of = key()
        prefill.offer(of, SOURCE_PAGES)
        for layer in range(4):
            prefill.session.ready(of, layer, TOKENS)
        decode.session.begin(of, decode.geometry, [(prefill.session.address, server[0])], (0, TOKENS),
                             {"kv": kvloom.CacheTable(SOURCE_PAGES, 64)}, LONG if outcome is kvloom.Outcome.landed else 0.5)
        assert decode.session.wait(of, LONG).outcome is outcome
        decode.session.close()
    prefill.session.close()


def test_a_session_that_is_dropped_is_closed():
    gc.collect()
    before = set(switches())
    made = Pair()
    transfer(made, key())
    del made
    gc.collect()
    assert set(switches()) <= before


def test_geometries_change_between_requests(pair):
    other = kvloom.LocalCache(kvloom.Side(shape(), "tp=1,page=16,layout=hnd"), 0, [])
    geometry = pair.decode.session.describe(other)
    pair.decode.session.forget_geometry(geometry)
    with pytest.raises(kvloom.InvalidArgument, match=f"geometry {geometry}"):
        pair.decode.session.begin(key(), geometry, pair.sources, (0, 8), {}, LONG)
