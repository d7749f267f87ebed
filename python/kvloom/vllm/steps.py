"""When an engine computed what: its steps beside the sessions' own events in a trace, so that one sees what left while the next was computed.

A step is a span "step" of track "forward", from its metadata bound (before the first layer) to its end (after the last one, and its results);
of a prefill rank its argument `chunks` says up to which token each transfer's prompt is computed then. Steps without tokens aren't kept.
Bounded: MOST steps, later ones are counted as dropped.  Clock: CLOCK_MONOTONIC, as in session/trace.h.  Thread: the worker's.
"""

from __future__ import annotations

import json
import os
import time

import kvloom
from kvloom.vllm.metadata import Step

MOST = 1 << 16
TRACK = 1


class Steps:
    def __init__(self, name: str) -> None:
        """`name`: of the process that they are shown as."""
        self._name = name
        self._done: list[tuple[float, float, dict[str, int]]] = []  # begin and end, seconds of time.monotonic()
        self._keys: dict[str, str] = {}  # by request, of those that were offered
        self._open: tuple[float, dict[str, int]] | None = None
        self._dropped = 0

    def begin(self, step: Step) -> None:
        """Its metadata was bound."""
        for offer in step.offers:
            self._keys[offer.request] = str(kvloom.TransferKey(offer.key))
        if not step.idle:
            self._open = (time.monotonic(), {self._keys.get(chunk.request, chunk.request): chunk.tokens for chunk in step.chunks})
        for name in step.held:
            self._keys.pop(name, None)

    def end(self) -> None:
        if self._open is None:
            return
        (begin, chunks), self._open = self._open, None
        if len(self._done) < MOST:
            self._done.append((begin, time.monotonic(), chunks))
        else:
            self._dropped += 1

    def beside(self, trace: str) -> str:
        """A session's trace with these steps in it. @error ParseError: it is none."""
        pid = os.getpid()
        events = [self._named("process_name", self._name), self._named("thread_name", "forward")]
        for begin, end, chunks in self._done:
            span = {"ph": "X", "name": "step", "cat": "engine", "pid": pid, "tid": TRACK, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
            events.append(span | ({"args": {"chunks": chunks}} if chunks else {}))
        own = {"otherData": {"clock": "CLOCK_MONOTONIC", "dropped_events": self._dropped}, "traceEvents": events}
        return kvloom.merge_traces([trace, json.dumps(own)])

    @staticmethod
    def _named(what: str, name: str) -> dict[str, object]:
        return {"ph": "M", "name": what, "pid": os.getpid(), "tid": TRACK, "args": {"name": name}}
