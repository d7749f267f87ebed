"""Whether anybody listens at a prefill rank's control address: asked in a thread of its own, so that a load from a server that is gone ends at once.

kvloom itself waits for a server that does not answer until the transfer's time is up: it may be starting. vLLM's proxy names servers that
were up a moment ago, so where the operating system says that nobody listens (ECONNREFUSED), nobody will come in time. All other troubles, slow
networks among them, are left to the transfer's time.
Thread: `ask` by the worker; `refused` is called by the probe's own thread, which sleeps on a queue and never holds the process up.
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
    def __init__(self, refused: Callable[[kvloom.TransferKey, str], None]) -> None:
        self._refused = refused
        self._asked: queue.SimpleQueue[tuple[kvloom.TransferKey, list[str]] | None] = queue.SimpleQueue()
        self._good: dict[str, float] = {}  # address -> until when
        self._thread: threading.Thread | None = None

    def ask(self, key: kvloom.TransferKey, addresses: list[str]) -> None:
        """`refused(key, why)` if one of them says that nobody is there."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvloom-reach", daemon=True)
            self._thread.start()
        self._asked.put((key, addresses))

    def close(self) -> None:
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(2 * PATIENCE)

    def _run(self) -> None:
        while asked := self._asked.get():
            key, addresses = asked
            for address in addresses:
                if why := self._look(address):
                    with contextlib.suppress(kvloom.Error):  # the session was closed meanwhile
                        self._refused(key, why)
                    break

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
