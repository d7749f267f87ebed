"""The connector's half in a decode worker: loads begin, land or fail, and are reported to vLLM once each, when their blocks are its own again.

Law: a load is reported when the session has released its pages, never before: until then somebody may write them. Law: what fails is reported
by request; where this vLLM can't take that, by blocks. Law: who was named by the proxy is told of the end: a load whose client has left is followed
by a farewell, an empty load under the same key. Its cancel alone would not do: it is not sent to ranks that were not met yet, so prefill would
keep the blocks for the transfer's whole time.  Thread: the worker's.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import kvloom
from kvloom.vllm.layouts import NULL_BLOCK, Placed
from kvloom.vllm.metadata import Load, Step
from kvloom.vllm.reach import Probe
from kvloom.vllm.stats import Counts

logger = logging.getLogger("vllm.kvloom")

GRACE = 5.0  # seconds for a failed transfer's pages to come back
FAREWELL = 10.0  # seconds, for the two to meet and for a prefill request that is still on its way


@dataclasses.dataclass
class Incoming:
    load: Load
    begun: float
    failed: bool = False
    quiet: bool = False  # vLLM does not wait for it: nothing is loaded, or the forward pass waits itself
    left: bool = False  # its client has
    farewell: bool = False


@dataclasses.dataclass
class Landed:
    """Since the last time: requests that are over, those of them that failed, and the blocks of the failed."""

    over: set[str] = dataclasses.field(default_factory=set)
    failed: set[str] = dataclasses.field(default_factory=set)
    blocks: set[int] = dataclasses.field(default_factory=set)


class DecodeSide:
    def __init__(self, session: kvloom.TargetSession, geometry: int, placed: Placed, counts: Counts) -> None:
        self.session, self._geometry, self._placed, self._counts = session, geometry, placed, counts
        self._layers = {cache.name: cache.layer for group in placed.groups for cache in group.caches}
        self._in: dict[kvloom.TransferKey, Incoming] = {}
        self._key: dict[str, kvloom.TransferKey] = {}
        self._waited: list[Incoming] = []  # that this step's forward pass waits for
        self._landed = Landed()
        self._probe = Probe(session.cancel, self._settled)

    @property
    def open(self) -> bool:
        return bool(self._in)

    def begin(self, step: Step) -> None:
        for load in step.loads:
            self._begin(load)
        for name, why in step.cancelled:
            if key := self._key.get(name):
                self._in[key].left = True
                self.session.cancel(key, why)

    def _settled(self, key: kvloom.TransferKey) -> bool:
        """Whether nobody needs to ask for its peers any more: bytes have come, or it is over, which an engine that sleeps hears of much later.
        Thread: the probe's."""
        try:
            if self.session.covered(key):
                return True
            self.session.wait(key, 0)
        except kvloom.DeadlineExceeded:
            return False
        except kvloom.Error:  # forgotten, or the session was closed
            return True
        return True

    def _begin(self, load: Load, farewell: bool = False) -> None:
        incoming = Incoming(load, time.monotonic(), quiet=load.sync or load.begin == load.end, farewell=farewell)
        if load.refused:
            self._fail(incoming, load.refused)
            return
        key = kvloom.TransferKey(load.key)
        end = self._placed.up(load.end)
        tables = {group.name: self._placed.table(group, load.tables, end) for group in self._placed.groups}
        try:
            self.session.begin(key, self._geometry, load.sources, (load.begin, end), tables, load.seconds)
        except kvloom.Error as error:
            self._fail(incoming, str(error))
            return
        self._in[key] = incoming
        self._probe.ask(key, [source if isinstance(source, str) else source[0] for source in load.sources])
        if load.end > load.begin:
            self._key[load.request] = key
        if load.sync:
            self._waited.append(incoming)

    def _fail(self, incoming: Incoming, why: Any) -> None:
        """It could not begin."""
        if incoming.farewell:
            return  # nobody waits for it, and there is nothing to load
        logger.error("kvloom: request %s can't be loaded: %s", incoming.load.request, why)
        self._counts.refused += 1
        incoming.failed = True
        if incoming.load.sync:
            self._blame(incoming.load)
        elif not incoming.quiet:
            self._report(incoming)

    def _report(self, incoming: Incoming) -> None:
        name = incoming.load.request
        self._landed.over.add(name)
        if incoming.failed:
            self._landed.failed.add(name)
            self._blame(incoming.load)

    def _blame(self, load: Load) -> None:
        """Blocks that were to be written. Those before them are this server's own."""
        for group in self._placed.groups:
            first = load.begin // group.block_tokens
            self._landed.blocks |= set(load.tables[group.table][first:]) - {NULL_BLOCK}

    def wait_layer(self, name: str) -> None:
        """Before a layer's attention: what it reads is there, or its load has failed and is reported with this step."""
        layer = self._layers.get(name) if self._waited else None
        if layer is None:
            return
        for incoming in [waited for waited in self._waited if not waited.failed]:
            key = kvloom.TransferKey(incoming.load.key)
            try:
                self.session.wait_layer(key, layer, incoming.load.seconds + GRACE)
            except kvloom.Error as error:
                logger.error("kvloom: request %s: layer %s is not there: %s", incoming.load.request, name, error)
                incoming.failed = True
                self._blame(incoming.load)
                self._quieten(key)

    def _quieten(self, key: kvloom.TransferKey) -> None:
        """vLLM computes these blocks again at once: nobody may write them any more."""
        self.session.cancel(key, "a layer came too late")
        try:
            self.session.wait_released(key, GRACE)
        except kvloom.Error as error:
            logger.error("kvloom: pages of transfer %s are used though they may still be written: %s", key, error)

    def close(self) -> None:
        self._probe.close()

    def end_step(self) -> None:
        """Layers without a hook, too: vLLM takes all blocks of this step for its own."""
        if self._waited:
            self.wait_layer(max(self._layers, key=self._layers.__getitem__))
        self._waited = []

    def heard(self) -> Landed:
        """Each request once."""
        if self._in:
            for event in self.session.poll():
                self._hear(event)
        landed, self._landed = self._landed, Landed()
        return landed

    def _hear(self, event: Any) -> None:
        incoming = self._in.get(event.key)
        if incoming is None:
            return
        if isinstance(event, kvloom.TargetEnded):
            self._end(event, incoming)
        elif isinstance(event, kvloom.TargetReleased):
            del self._in[event.key]
            self._probe.over(event.key)
            self._key.pop(incoming.load.request, None)
            self.session.forget(event.key)
            if not incoming.quiet:
                self._report(incoming)
            if incoming.left:
                self._part(incoming.load)

    def _part(self, load: Load) -> None:
        """The farewell. Where the load was sent and ended, prefill refuses it at once, which is as good."""
        empty: tuple[list[int], ...] = tuple([] for _ in load.tables)
        self._begin(dataclasses.replace(load, begin=0, end=0, tables=empty, seconds=min(load.seconds, FAREWELL), sync=False), farewell=True)

    def _end(self, event: kvloom.TargetEnded, incoming: Incoming) -> None:
        if incoming.farewell:
            return
        self._counts.ended_loading(event.outcome, event.bytes, event.at - incoming.begun)
        if event.outcome is not kvloom.Outcome.landed:
            incoming.failed = True
            logger.warning("kvloom: request %s was not loaded: %s", incoming.load.request, event.why)
