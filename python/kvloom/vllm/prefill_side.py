"""The connector's half in a prefill worker: chunks and layers become ready, the session pushes them, blocks come back.

Law: the engine's thread never waits for a transfer here; the one wait is `preempted`, whose blocks are about to be overwritten: until the
session does not read them any more, at the most FENCE. Law: a layer is told ready once a step, by its hook or by `sweep`.
Nothing is done in a step without transfers.  Thread: the worker's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import kvloom
from kvloom.vllm.layouts import Placed
from kvloom.vllm.metadata import Chunk, Offer, Step
from kvloom.vllm.stats import Counts

logger = logging.getLogger("vllm.kvloom")

FENCE = 5.0  # seconds; a session ends its posts within its grace, and cuts off who hangs


@dataclasses.dataclass
class Outgoing:
    key: kvloom.TransferKey
    released: bool = False
    held: bool = False  # the scheduler waits for our word


class PrefillSide:
    def __init__(
        self, session: kvloom.SourceSession, placed: Placed, counts: Counts, record: Callable[[], kvloom.DeviceWork] | None = None,
        hooks: bool = True,
    ) -> None:  # fmt: skip
        """`record`: marks what the GPU has been given so far; None: caches are ready when the hook is called. `hooks`: a layer's hook is called
        when all of the step's tokens are in its cache; else all layers are ready at the step's end."""
        self.session, self._placed, self._counts, self._record, self._hooks = session, placed, counts, record, hooks
        self._layers = {cache.name: cache.layer for group in placed.groups for cache in group.caches}
        self._out: dict[str, Outgoing] = {}
        self._of: dict[kvloom.TransferKey, str] = {}
        self._ready: list[tuple[kvloom.TransferKey, int]] = []
        self._left: set[int] = set()  # layers that have not been told in this step
        self._sent: set[str] = set()  # to be reported

    @property
    def open(self) -> bool:
        return bool(self._of)

    def begin(self, step: Step) -> None:
        for offer in step.offers:
            self._offer(offer)
        for name, why in step.cancelled:
            if (out := self._out.get(name)) and not out.released:  # one that was refused may have another's key
                self.session.cancel(out.key, why)
        for chunk in step.chunks:
            self._grow(chunk)
        if self._ready:
            self._left = set(self._layers.values())
        for name in step.held:
            self._hold(name)

    def _offer(self, offer: Offer) -> None:
        key = kvloom.TransferKey(offer.key)
        out = self._out[offer.request] = Outgoing(key)
        try:
            self.session.offer(key, offer.seconds)
            self._of[key] = offer.request
        except kvloom.Error as error:
            logger.error("kvloom: request %s can't be sent: %s", offer.request, error)
            self._counts.refused += 1
            out.released = True

    def _grow(self, chunk: Chunk) -> None:
        out = self._out.get(chunk.request)
        if out is None or out.released:
            return
        tokens = self._placed.up(chunk.tokens) if chunk.last else self._placed.down(chunk.tokens)
        if not tokens:
            return
        try:
            for group in self._placed.groups:
                self.session.set_table(out.key, group.name, self._placed.table(group, chunk.tables, tokens))
        except kvloom.Error as error:
            logger.error("kvloom: request %s is not sent any further: %s", chunk.request, error)
            self.session.cancel(out.key, str(error))
            return
        self._ready.append((out.key, tokens))

    def layer(self, name: str) -> None:
        """The hook of a layer: its tokens of this step are in the cache, or will be once the GPU is done with what it has been given."""
        if not self._ready or not self._hooks:
            return
        layer = self._layers.get(name)
        if layer in self._left:
            self._left.discard(layer)
            self.session.ready_all(self._ready, layer, self._record() if self._record else None)

    def sweep(self) -> None:
        """The step's end: layers whose hook was not called are ready, too."""
        if not self._ready:
            return
        after = self._record() if self._record and self._left else None
        for layer in sorted(self._left):
            self.session.ready_all(self._ready, layer, after)
        self._ready, self._left = [], set()

    def preempted(self, names: list[str]) -> None:
        lost = [out for name in names if (out := self._out.get(name)) and not out.released]
        for out in lost:
            self.session.cancel(out.key, "prefill was preempted")
        for out in lost:
            try:
                self.session.wait_released(out.key, FENCE)
            except kvloom.Error as error:
                logger.error("kvloom: blocks of transfer %s are overwritten though they may be read: %s", out.key, error)

    def _hold(self, name: str) -> None:
        out = self._out.get(name)
        if out is None or out.released:
            self._report(name)
        else:
            out.held = True

    def _report(self, name: str) -> None:
        self._out.pop(name, None)
        self._sent.add(name)

    def heard(self) -> set[str]:
        """Finished requests whose blocks nobody reads any more, each once."""
        if self._of:
            for event in self.session.poll():
                self._hear(event)
        sent, self._sent = self._sent, set()
        return sent

    def _hear(self, event: Any) -> None:
        name = self._of.get(event.key)
        if name is None:
            return
        if isinstance(event, kvloom.SourceEnded):
            self._counts.ended_sending(event.outcome)
            if event.outcome is kvloom.Outcome.landed:
                self._counts.exposed.append(event.exposed_tail)
            else:
                logger.warning("kvloom: request %s was not sent: %s", name, event.why)
        elif isinstance(event, kvloom.SourceReleased):
            del self._of[event.key]
            self.session.forget(event.key)
            out = self._out[name]
            out.released = True
            if out.held:
                self._report(name)
