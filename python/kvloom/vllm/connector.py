"""KVLoomConnector: vLLM's KVConnectorBase_V1, told in kvloom's words.  One class, two lives: in the scheduler and in each worker.

vLLM makes one object with role SCHEDULER and one with role WORKER in each worker's process; what one learns reaches the other only with a
step's metadata (down) and its results (up). Here calls are handed on and nothing is decided: scheduler_side.py and worker_side.py do that.
Source: vllm/distributed/kv_transfer/kv_connector/v1/base.py; the order of calls: vllm/v1/core/sched/scheduler.py, vllm/v1/worker/gpu/kv_connector.py.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvloom.vllm import versions
from kvloom.vllm.decode_side import Landed
from kvloom.vllm.layouts import window_of
from kvloom.vllm.metadata import Handshake, Step
from kvloom.vllm.params import Settings, refuse
from kvloom.vllm.scheduler_side import SchedulerSide
from kvloom.vllm.stats import KVLoomPromMetrics, KVLoomStats
from kvloom.vllm.worker_side import WorkerSide

logger = logging.getLogger("vllm.kvloom")


def windows_of(cache_config: Any) -> dict[int, tuple[int, int]]:
    """By index of a KV cache group with a window: (its tokens, those of a block)."""
    specs = {index: group.kv_cache_spec for index, group in enumerate(cache_config.kv_cache_groups)}
    return {
        index: (spec.sliding_window, spec.block_size)
        for index, spec in specs.items()
        if not hasattr(spec, "kv_cache_specs") and window_of(spec) is not None and hasattr(spec, "sliding_window")
    }


def check_groups(sync: bool) -> None:
    """Several KV cache groups on a decode server. @error InvalidArgument: failed loads would be told by block, which then ends vLLM's engine."""
    if sync:
        refuse("kv_connector_extra_config.per_layer_start: vLLM can't take failed loads of a model with several KV cache groups")
    if not hasattr(base, "KVConnectorTransferResults"):
        refuse(
            "this vLLM can't take failed loads of a model with several KV cache groups: decode with 0.30 or newer, or say "
            "--disable-hybrid-kv-cache-manager to both servers"
        )


class KVLoomConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any = None) -> None:
        """@error InvalidArgument: a version of vLLM or a setting that won't do."""
        if kv_cache_config is None:
            refuse("this vLLM makes connectors without a KV cache configuration: kvloom works with 0.24 and newer")
        versions.check()
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        prefills, decodes = bool(transfer.is_kv_producer), bool(transfer.is_kv_consumer)
        self._settings = Settings.parse(transfer.kv_connector_extra_config, prefills)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._landed = Landed()
        sync = self._settings.per_layer_start
        if decodes and len(kv_cache_config.kv_cache_groups) > 1:
            check_groups(sync)
        if role == base.KVConnectorRole.SCHEDULER:
            groups = len(kv_cache_config.kv_cache_groups)
            self._scheduler = SchedulerSide(prefills, decodes, groups, windows_of(kv_cache_config), sync)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, self._settings, prefills, decodes)

    # ---- what it can do ----

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads first, so that what a head has in a page lies together whatever tp is on the other side. MLA: no matter."""
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return versions.head_major(versions.check())

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers' hooks are skipped where a whole step is one graph."""
        return True

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All: blocks are the request's own, and arrive whole."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    # ---- scheduler ----

    @property
    def _requests(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler's call in a worker"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._requests.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._requests.know(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._requests.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._requests.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._requests.landed(connector_output.finished_recving)
        self._requests.sent(connector_output.finished_sending)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._requests.finished(request), None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        return self._requests.pending()

    def set_xfer_handshake_metadata(self, metadata: dict[int, base.KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): said for rank, said in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], base.KVConnectorHandshakeMetadata]) -> None:
        """@error InvalidArgument: workers of this server have come to different geometries."""
        said = [each for each in metadata.values() if isinstance(each, Handshake)]
        if len({each.side for each in said}) > 1:
            refuse(f"workers of one server differ in their geometry: {sorted((each.rank, each.side) for each in said)}")
        addresses = [each.address for each in sorted(said, key=lambda each: each.rank) if each.address]
        if addresses:
            logger.info("kvloom: prefill ranks listen at %s", ", ".join(addresses))

    # ---- worker ----

    @property
    def _rank(self) -> WorkerSide:
        assert self._worker is not None, "a worker's call in the scheduler"
        return self._worker

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        from vllm.platforms import current_platform

        return self._rank.allocation(current_platform.device_type)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._rank.register(kv_caches)

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        return self._rank.handshake()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if isinstance(kv_connector_metadata, Step):  # older versions name requests, and say the same in the step's metadata
            self._rank.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Step)
        self._rank.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._rank.unbind()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begun already, when the step's metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        if decode := self._rank.decode:
            decode.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if prefill := self._rank.prefill:
            prefill.layer(layer_name)

    def wait_for_save(self) -> None:
        """Nothing is waited for: layers without a hook are ready, too."""
        self._rank.sweep()

    def _collect(self) -> tuple[set[str], Landed]:
        sent, landed = self._rank.results()
        self._landed.blocks |= landed.blocks
        return sent, landed

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, landed = self._collect()
        return sent or None, landed.over or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, landed = self._collect()
        if not self._settings.per_layer_start:
            self._landed = Landed()  # by request is enough, and by block too would be twice
        return base.KVConnectorTransferResults(finished_sending=sent, finished_recving=landed.over, failed_recving=landed.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._landed = self._landed.blocks, Landed()
        return blocks

    def get_kv_connector_stats(self) -> KVLoomStats | None:
        return self._worker.stats() if self._worker else None

    def shutdown(self) -> None:
        if self._worker:
            self._worker.close()

    # ---- statistics ----

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVLoomStats:
        return KVLoomStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVLoomPromMetrics:
        return KVLoomPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
