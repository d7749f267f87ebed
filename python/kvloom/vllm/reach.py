"""Whether anybody listens at a prefill rank's control address: asked in a thread of its own, so that a load from a server that is gone ends soon.

kvloom itself waits for a server that does not answer until the transfer's time is up: it may be starting. vLLM's proxy names servers that
were up a moment ago, so where the operating system says that nobody listens (ECONNREFUSED), nobody will come in time. All other troubles, slow
networks among them, are left to the transfer's time. Asked once is not enough: a server that is killed still listens for the moment in which its last
threads end, and one may go after it was asked and before the two have met. So it is asked again, every AGAIN, until the load is over or bytes of it
have come: from then on the session sees by itself that a peer is gone. Over is what `settled` says, too: `over` is called in a step of the engine, and one
that sleeps takes none.
Thread: `ask` and `over` by the worker; `refused` and `settled` are called by the probe's own thread, which sleeps on a queue while nothing is loading.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import kvloom

AGAIN = 0.5  # seconds for which an answer is good
PATIENCE = 1.0  # seconds


class Probe:
    def __init__(self, refused: Callable[[kvloom.TransferKey, str], None], settled: Callable[[kvloom.TransferKey], bool] = lambda key: False) -> None:
        self._refused, self._settled = refused, settled
        self._asked: queue.SimpleQueue[tuple[kvloom.TransferKey, list[str]] | None] = queue.SimpleQueue()
        self._watched: dict[kvloom.TransferKey, list[str]] = {}  # the thread's own
        self._good: dict[str, float] = {}  # address -> until when; the thread's own
        self._thread: threading.Thread | None = None

    def ask(self, key: kvloom.TransferKey, addresses: list[str]) -> None:
        """`refused(key, why)` as soon as one of them says that nobody is there, until `over` or `settled`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvloom-reach", daemon=True)
            self._thread.start()
        self._asked.put((key, addresses))

    def over(self, key: kvloom.TransferKey) -> None:
        """@pre it was asked for."""
        self._asked.put((key, []))

    def close(self) -> None:
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(2 * PATIENCE)

    def _run(self) -> None:
        while True:
            try:
                asked = self._asked.get(timeout=AGAIN if self._watched else None)
            except queue.Empty:
                for key in [key for key in self._watched if self._settled(key)]:
                    del self._watched[key]
                for key in list(self._watched):
                    self._look_for(key)
                continue
            if asked is None:
                return
            key, addresses = asked
            if addresses:
                self._watched[key] = addresses
                self._look_for(key)
            else:
                self._watched.pop(key, None)

    def _look_for(self, key: kvloom.TransferKey) -> None:
        for address in self._watched[key]:
            if why := self._look(address):
                del self._watched[key]
                with contextlib.suppress(kvloom.Error):  # the session was closed meanwhile
                    self._refused(key, why)
                return

    def _look(self, address: str) -> str:
        """Why nobody is there; empty: somebody is, or it can't be told."""
        if self._good.get(address, 0.0) > time.monotonic():
            return ""
        try:
            place = urlsplit(address)
            if place.scheme != "tcp" or not place.hostname or not place.port:
                return ""
            socket.create_connection((place.hostname, place.port), PATIENCE).close()
        except ConnectionRefusedError:
            return f"nobody listens at {address}"
        except (OSError, ValueError):
            return ""
        self._good[address] = time.monotonic() + AGAIN
        return ""
