"""The connector's half in a worker: its endpoints, its memory, and the order in which vLLM calls.

    get_mem_pool_context ─► register_kv_caches ─► each step: handle_preemptions, bind, layers, sweep, results ─► shutdown

One session a role, each with a transport of its own; both see the same memory. What a step brings is begun when its metadata is bound: before
the layers in every version. An idle step (no tokens) with transfers under way waits a moment for news, so that an engine that steps on
until they are over does not take a whole core.
Thread: the worker's. The sessions' threads never take the GIL.
"""

from __future__ import annotations

import logging
import os
import pathlib
import select
from contextlib import AbstractContextManager
from typing import Any

import torch

import kvloom
from kvloom.vllm.decode_side import DecodeSide, Landed
from kvloom.vllm.layouts import Placed, place
from kvloom.vllm.memory import SharedAllocation
from kvloom.vllm.regions import lend, local_cache
from kvloom.vllm.metadata import Handshake, Step
from kvloom.vllm.params import Settings, refuse
from kvloom.vllm.prefill_side import PrefillSide
from kvloom.vllm.stats import Counts, KVLoomStats
from kvloom.vllm.steps import Steps

logger = logging.getLogger("vllm.kvloom")

NEWS = 0.002  # seconds that an idle step waits


def rank_of(config: Any) -> int:
    """Of this worker in its engine: tp fastest, then context parallel, then pp, as kvloom counts."""
    return int(config.parallel_config.rank)


def port_offset(config: Any) -> int:
    """Engines of one server (data parallel) listen one after another."""
    parallel = config.parallel_config
    return int(getattr(parallel, "data_parallel_rank", 0) or 0) * int(parallel.world_size)


def computes_in_parts(config: Any) -> bool:
    """Dual batch overlap: a step's tokens are computed in parts, each with hooks of its own, so a layer's first hook is too early for all."""
    parallel = config.parallel_config
    return bool(getattr(parallel, "use_ubatching", getattr(parallel, "enable_dbo", False)))


class WorkerSide:
    def __init__(self, config: Any, cache_config: Any, settings: Settings, prefills: bool, decodes: bool) -> None:
        self._config, self._cache_config, self._settings = config, cache_config, settings
        self._prefills, self._decodes = prefills, decodes
        self._rank = rank_of(config)
        if settings.trace and not pathlib.Path(settings.trace).is_dir():
            refuse(f"kv_connector_extra_config.trace={settings.trace!r}: there is no such folder here; traces are written when the server ends")
        self._counts = Counts()
        self._allocation: SharedAllocation | None = None
        self._source_transport: kvloom.Transport | None = None
        self.prefill: PrefillSide | None = None
        self.decode: DecodeSide | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._placed: Placed | None = None
        self._step: Step | None = None
        self._steps = Steps(f"rank {self._rank}: the engine") if settings.trace else None

    # ---- memory ----

    def _transport(self, listen: str, device: torch.device) -> kvloom.Transport:
        kind = self._settings.transport
        if kind == "auto":
            kind = "cuda" if device.type == "cuda" else "shm"
        if kind == "cuda":
            return kvloom.cuda_transport(listen, device.index if device.index is not None else torch.cuda.current_device())
        if device.type != "cpu":
            refuse(f"kv_connector_extra_config.transport=shm, but the KV cache is on {device}: wanted auto or cuda")
        return kvloom.shm_transport(listen, self._settings.copy_threads)

    def allocation(self, device_type: str) -> AbstractContextManager[Any] | None:
        """Where vLLM has to allocate the cache; None: anywhere."""
        if device_type != "cpu" or not self._prefills:
            return None
        self._source_transport = self._transport("", torch.device("cpu"))
        self._allocation = SharedAllocation(self._source_transport)
        return self._allocation

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """@error what can't be moved (layouts.place); Unavailable: the control port is taken."""
        if self._placed is not None:
            return
        tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        self._placed = place(self._config, self._cache_config, tensors, self._rank)
        self.tensors = tensors
        device = next(iter(tensors.values())).device
        if self._prefills:
            self._start_prefill(tensors, device)
        if self._decodes:
            self._start_decode(tensors, device)
        logger.info("kvloom: rank %d of %s, geometry %s", self._rank, self._placed.side.sharding, self._placed.side.digest)

    def _common(self) -> dict[str, Any]:
        settings = self._settings
        return dict(
            name=f"rank {self._rank}", keys=settings.keys, heartbeat=settings.heartbeat, silence=settings.silence, grace=settings.grace,
            events=True, trace=bool(settings.trace), log=settings.log,
        )  # fmt: skip

    def _start_prefill(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        assert self._placed is not None
        transport = self._source_transport or self._transport("", device)
        shared = self._allocation.regions if self._allocation else []
        if transport.source_must_be_allocated and not shared:
            refuse(
                "this vLLM does not let a connector say in what memory the KV cache of a CPU is allocated, so no other process can read it: "
                "a prefill server on CPUs needs vLLM 0.31 or newer"
            )
        cache = local_cache(self._placed, tensors, lend(transport, tensors.values(), shared))
        settings = self._settings
        session = kvloom.SourceSession(
            transport, cache, address=settings.address(port_offset(self._config) + self._rank), clients=list(settings.control_clients),
            open_to_all=settings.control_open_to_all, **self._common(),
        )  # fmt: skip
        record = (lambda: transport.record(torch.cuda.current_stream(device).cuda_stream)) if device.type == "cuda" else None
        self.prefill = PrefillSide(session, self._placed, self._counts, record, hooks=not computes_in_parts(self._config))

    def _start_decode(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        assert self._placed is not None
        transport = self._transport("*", device)
        cache = local_cache(self._placed, tensors, lend(transport, tensors.values()))
        session = kvloom.TargetSession(transport, rank=self._rank, **self._common())
        self.decode = DecodeSide(session, session.describe(cache), self._placed, self._counts)

    def handshake(self) -> Handshake | None:
        if self._placed is None:
            return None
        return Handshake(self._rank, self._placed.side.digest, self.prefill.session.address if self.prefill else "")

    # ---- each step ----

    def preempt(self, step: Step) -> None:
        """Before blocks are overwritten."""
        if step.preempted and self.prefill:
            self.prefill.preempted(step.preempted)

    def bind(self, step: Step) -> None:
        self._step = step
        if self._steps:
            self._steps.begin(step)
        self.preempt(step)
        if self.prefill:
            self.prefill.begin(step)
        if self.decode:
            self.decode.begin(step)

    def sweep(self) -> None:
        if self.prefill:
            self.prefill.sweep()
        if self.decode:
            self.decode.end_step()

    def results(self) -> tuple[set[str], Landed]:
        """(sent, landed): what is over since the last time."""
        if self._step is not None and self._step.idle:
            self._wait_for_news()
        sent = self.prefill.heard() if self.prefill else set()
        return sent, self.decode.heard() if self.decode else Landed()

    def _wait_for_news(self) -> None:
        asked = [side.session for side in (self.prefill, self.decode) if side is not None and side.open]
        if not asked:
            return
        news = select.poll()  # select.select refuses descriptors from 1024 on, and a GPU's worker has as many
        for session in asked:
            news.register(session, select.POLLIN)
        news.poll(1e3 * NEWS)

    def unbind(self) -> None:
        self._step = None
        if self._steps:
            self._steps.end()

    def stats(self) -> KVLoomStats | None:
        return self._counts.take()

    # ---- the end ----

    def close(self) -> None:
        for name, side in (("prefill", self.prefill), ("decode", self.decode)):
            if side is None or side.session.closed:
                continue
            if self._steps:
                trace = self._steps.beside(side.session.trace())
                pathlib.Path(self._settings.trace, f"{name}-{self._rank}-{os.getpid()}.json").write_text(trace)
            if side is self.decode:
                self.decode.close()
            side.session.close()
