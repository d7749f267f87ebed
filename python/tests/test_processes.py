"""Two processes: bytes cross, a peer is killed, a rank restarts; and what is left open when a process ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from conftest import LONG, checksum_of, key, make_decode, make_prefill, shape

import kvloom

SOURCE_PAGES, TARGET_PAGES, TOKENS = [9, 4, 30], [7, 60, 2, 1, 33, 12], 48


def sides() -> tuple[kvloom.Side, kvloom.Side]:
    return kvloom.Side(shape(), "tp=1,page=16"), kvloom.Side(shape(), "tp=1,page=8")


def serve_prefill(channel) -> None:
    """Offers what it is told, all layers but the last, and the last when it is told so."""
    rank = make_prefill(sides()[0])
    channel.send(rank.session.address)
    while (word := channel.recv()) is not None:
        of, last = word
        if not last:
            rank.offer(of, SOURCE_PAGES)
        for layer in [3] if last else [0, 1, 2]:
            rank.session.ready(of, layer, TOKENS)
        channel.send(checksum_of(rank, SOURCE_PAGES, (0, TOKENS)))
    rank.session.close()


class Peer:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=serve_prefill, args=(theirs,))
        self.process.start()
        theirs.close()
        self.address = self.channel.recv()

    def say(self, of: kvloom.TransferKey, last: bool) -> int:
        self.channel.send((of, last))
        return self.channel.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def stop(self) -> int | None:
        self.channel.send(None)
        self.process.join(LONG)
        return self.process.exitcode


@pytest.fixture
def decode():
    rank = make_decode(sides()[1])
    yield rank
    rank.session.close()


def test_bytes_cross_processes(decode):
    peer = Peer()
    of = key()
    decode.begin(of, [peer.address], (0, TOKENS), TARGET_PAGES)
    peer.say(of, False)
    decode.session.wait_layer(of, 2, LONG)
    sent = peer.say(of, True)
    assert decode.session.wait(of, LONG).outcome is kvloom.Outcome.landed
    assert checksum_of(decode, TARGET_PAGES, (0, TOKENS)) == sent
    assert peer.stop() == 0


def test_a_killed_peer_fails_its_transfers_and_a_new_one_serves(decode):
    peer = Peer()
    of = key()
    decode.begin(of, [peer.address], (0, TOKENS), TARGET_PAGES)
    peer.say(of, False)
    decode.session.wait_layer(of, 2, LONG)
    peer.kill()
    ended = decode.session.wait(of, LONG)
    assert ended.outcome is kvloom.Outcome.failed
    assert (ended.why.code, type(ended.why)) == (kvloom.Code.unavailable, kvloom.Unavailable)
    assert "prefill rank 0" in ended.why.message
    with pytest.raises(kvloom.Unavailable):
        decode.session.wait_layer(of, 3, LONG)
    decode.session.wait_released(of, LONG)
    peer.process.join(LONG)

    again = Peer()
    retry = kvloom.TransferKey(of.name, of.epoch + 1)
    decode.begin(retry, [again.address], (0, TOKENS), TARGET_PAGES)
    again.say(retry, False)
    sent = again.say(retry, True)
    assert decode.session.wait(retry, LONG).outcome is kvloom.Outcome.landed
    assert checksum_of(decode, TARGET_PAGES, (0, TOKENS)) == sent
    assert again.stop() == 0


@pytest.mark.parametrize("left", ["in a cycle", "waited for by a daemon thread"])
def test_sessions_that_are_open_when_python_ends_are_closed(left):
    code = """
        import sys, threading
        from conftest import *
        prefill = make_prefill(kvloom.Side(shape(), "tp=1"))
        decode = make_decode(kvloom.Side(shape(), "tp=1"), events=True)
        of = key()
        decode.begin(of, [prefill.session.address], (0, 8), [1])
        prefill.offer(of, [1])
        kept = [prefill, decode]
        kept.append(kept)
        if "daemon" in sys.argv[1]:
            begun = threading.Semaphore(0)
            for wait in (lambda: decode.session.wait(of, 3600), lambda: decode.session.poll(3600)):
                threading.Thread(target=lambda: (begun.release(), wait()), daemon=True).start()
            begun.acquire(), begun.acquire()
        print("over")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), left], cwd=os.path.dirname(__file__), capture_output=True, text=True,
                          timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert "terminate" not in done.stderr and "leak" not in done.stderr


def test_a_forked_child_is_refused_and_harms_nobody():
    code = """
        import gc, os, sys, warnings
        from conftest import *
        warnings.simplefilter("ignore")  # Python's own, of forking beside threads
        pair = Pair()
        child = os.fork()
        if child == 0:
            for call in (lambda: pair.prefill.offer(key(), [0]), lambda: pair.decode.session.poll(), lambda: pair.prefill.transport.allocate(1)):
                try:
                    call()
                    os._exit(1)
                except kvloom.Unsupported as error:
                    assert "forked" in str(error)
            del pair
            gc.collect()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        of = key()
        pair.decode.begin(of, pair.sources, (0, 8), [1])
        pair.prefill.offer(of, [1])
        for layer in range(4):
            pair.prefill.session.ready(of, layer, 8)
        print(pair.decode.session.wait(of, LONG).outcome.name)
        pair.close()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=os.path.dirname(__file__), capture_output=True, text=True, timeout=60,
                          check=False)
    assert (done.returncode, done.stdout) == (0, "landed\n"), done.stderr
