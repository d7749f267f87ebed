"""The modules and names of vLLM that a connector imports, as one release has them, put in vLLM's place for a while.

The names, fields and defaults are vLLM's (vllm/v1/request.py, v1/core/sched/output.py, v1/kv_cache_interface.py, v1/outputs.py,
distributed/kv_transfer/kv_connector/v1/base.py and metrics.py, forward_context.py); what they do is written here, and is as little as a
connector can notice. Where torch is installed it is the real one.
"""

import contextlib
import dataclasses
import enum
import importlib.util
import logging
import sys
import types
from abc import ABC, abstractmethod

from vllm_stand_in import fake_torch
from vllm_stand_in.versions import SINCE, Release

TORCH_IS_THERE = importlib.util.find_spec("torch") is not None
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
KVConnectorRole = enum.Enum("KVConnectorRole", {"SCHEDULER": 0, "WORKER": 1})
STATES = ("WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STREAMING_REQ", "RUNNING", "PREEMPTED",
          "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR", "FINISHED_REPETITION")  # fmt: skip


class RequestStatus(enum.IntEnum):
    """vLLM's states of a request."""

    _ignore_ = ["number", "name"]
    for number, name in enumerate(STATES, 1):
        locals()[name] = number

    @staticmethod
    def is_finished(status: "RequestStatus") -> bool:
        return status > RequestStatus.PREEMPTED


class KVConnectorMetadata(ABC): ...


class KVConnectorHandshakeMetadata(ABC): ...


class KVConnectorWorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other): ...


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...


@dataclasses.dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = dataclasses.field(default_factory=set)
    finished_recving: set[str] = dataclasses.field(default_factory=set)
    failed_recving: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class KVConnectorOutput:
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: object = None
    kv_cache_events: object = None
    kv_connector_worker_meta: object = None
    invalid_block_ids: set[int] = dataclasses.field(default_factory=set)
    failed_recving: set[str] = dataclasses.field(default_factory=set)
    expected_finished_count: int = 0


@dataclasses.dataclass
class KVConnectorStats:
    data: dict = dataclasses.field(default_factory=dict)

    def is_empty(self) -> bool:
        return not self.data


class KVConnectorPromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._metric_types, self._labelnames, self.per_engine_labelvalues = metric_types, labelnames, per_engine_labelvalues


class KVConnectorBase:
    """vLLM's KVConnectorBase_V1 of 0.32: what is abstract there is abstract here, and what answers by default answers the same."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._connector_metadata = self._kv_cache_manager = None

    @property
    def role(self):
        return self._role

    @property
    def requires_kv_delivery(self) -> bool:
        return self._kv_transfer_config.is_kv_producer

    def bind_connector_metadata(self, connector_metadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata

    def bind_kv_cache_manager(self, kv_cache_manager) -> None:
        self._kv_cache_manager = kv_cache_manager
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def get_finished(self, finished_req_ids):
        return None, None

    def get_transfer_results(self, finished_req_ids):
        sent, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(set(sent or ()), set(received or ()))

    def get_block_ids_with_load_errors(self):
        return set()

    def set_xfer_handshake_metadata_pp_aware(self, metadata) -> None:
        if any(pp for pp, _ in metadata):
            raise ValueError(f"{type(self).__name__} got the handshake of a pipeline's later stage, and doesn't say that it can use one")
        self.set_xfer_handshake_metadata({tp: handshake for (_, tp), handshake in metadata.items()})

    def request_finished(self, request, block_ids):
        return False, None

    def take_events(self):
        return ()

    def has_pending_push_work(self) -> bool:
        return False

    def has_pending_block_frees(self) -> bool:
        return False

    def get_external_cache_hit_sources(self, request, num_external_tokens):
        return {}

    def get_loaded_kv_cache_group_ids(self, request):
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config) -> bool:
        return False


NOTHING = ("register_kv_caches", "set_host_xfer_buffer_ops", "get_mem_pool_context", "handle_preemptions", "finish_forward", "reset_capture_state",
           "shutdown", "get_kv_connector_stats", "get_kv_connector_kv_cache_events", "get_handshake_metadata", "build_connector_worker_meta",
           "bind_gpu_block_pool", "on_new_request", "update_connector_output", "get_finished_count", "set_xfer_handshake_metadata", "reset_cache")  # fmt: skip
ABSTRACT = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_num_new_matched_tokens", "update_state_after_alloc",
            "build_connector_meta")  # fmt: skip


def base_class(release: Release) -> type:
    """KVConnectorBase_V1 as `release` has it: without what came later."""
    content = {name: value for name, value in vars(KVConnectorBase).items() if not name.startswith("__") or name == "__init__"}
    content |= {name: (lambda self, *_, **__: None) for name in NOTHING}
    content |= {name: abstractmethod(lambda self, *_, **__: None) for name in ABSTRACT}
    later = {name for name in SINCE if not release.has(name)}
    return type(ABC)("KVConnectorBase_V1", (ABC,), {name: value for name, value in content.items() if name not in later})


@dataclasses.dataclass(frozen=True)
class KVCacheSpec:
    block_size: int


@dataclasses.dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    num_kv_heads: int = 1
    head_size: int = 1
    dtype: object = None
    head_size_v: int | None = None
    sliding_window: int | None = None
    max_tp_shards: int | None = None

    def __post_init__(self):
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)


class FullAttentionSpec(AttentionSpec): ...


class MLAAttentionSpec(FullAttentionSpec): ...


class SlidingWindowSpec(AttentionSpec): ...


class MambaSpec(KVCacheSpec): ...


SPECS = {spec.__name__: spec for spec in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)}


@dataclasses.dataclass(frozen=True)
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    enable_kv_transfer: bool = True


@dataclasses.dataclass(frozen=True)
class KVCacheTensor:
    """0.29's and newer, with the name that older ones have for the layers."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False

    @property
    def shared_by(self) -> list[str]:
        return self.layers


@dataclasses.dataclass
class KVCacheBlock:
    block_id: int
    block_hash: bytes | None = None


@dataclasses.dataclass(frozen=True)
class KVCacheBlocks:
    blocks: tuple

    def get_block_ids(self, allow_none: bool = False, *, group_ids=None):
        groups = self.blocks if group_ids is None else tuple(self.blocks[number] for number in group_ids)
        if allow_none and not any(groups):
            return None
        return tuple([block.block_id for block in group] for group in groups)


def stage_of(layers: int, rank: int, size: int) -> tuple[int, int]:
    """A pipeline stage's layers. What is left over goes to the stages before the last one, from behind (vllm/distributed/utils.py)."""
    each, over = divmod(layers, size)
    counts = [each + (size - 1 - over <= stage < size - 1) for stage in range(size)]
    return sum(counts[:rank]), sum(counts[: rank + 1])


def named(release: Release) -> dict[str, dict]:
    """What each module holds."""
    base = {"KVConnectorBase_V1": base_class(release), "KVConnectorRole": KVConnectorRole, "SupportsHMA": SupportsHMA}
    base |= {kind.__name__: kind for kind in (KVConnectorMetadata, KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata)}
    base["supports_hma"] = lambda one: issubclass(one, SupportsHMA) if isinstance(one, type) else isinstance(one, SupportsHMA)
    if release.has("get_transfer_results"):
        base["KVConnectorTransferResults"] = KVConnectorTransferResults
    specs = SPECS | {kind.__name__: kind for kind in (KVCacheSpec, AttentionSpec, KVCacheGroupSpec)}
    return {
        "vllm": {"__version__": release.name},
        f"{CONNECTOR}.base": base,
        f"{CONNECTOR}.metrics": {"KVConnectorStats": KVConnectorStats, "KVConnectorPromMetrics": KVConnectorPromMetrics},
        "vllm.v1.request": {"RequestStatus": RequestStatus},
        "vllm.v1.outputs": {"KVConnectorOutput": KVConnectorOutput},
        "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks": KVCacheBlocks},
        "vllm.v1.kv_cache_interface": specs,
        "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": lambda dtype, block_size, *_, **__: "vec" if block_size % 32 == 0 else "vec16"},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(device_type="cpu", is_cpu=lambda: True, is_cuda=lambda: False)},
        "vllm.distributed.utils": {"get_pp_indices": stage_of},
        "vllm.logger": {"init_logger": logging.getLogger},
    }


def made(release: Release) -> dict[str, types.ModuleType]:
    """The modules by name, each with those below it."""
    modules: dict[str, types.ModuleType] = {} if TORCH_IS_THERE else fake_torch.module()
    for name, content in named(release).items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in modules:
                modules[path] = types.ModuleType(path)
                modules[path].__path__ = []
                if depth > 1:
                    setattr(modules[".".join(parts[: depth - 1])], parts[depth - 1], modules[path])
        vars(modules[name]).update(content)
    return modules


# By release: its modules, and those that were imported within it and hold names of them. Another release's would go on with this one's.
_found: dict[str, dict[str, types.ModuleType]] = {}
HOLDERS = ("vllm", "kvloom.vllm", "record_connector", *(() if TORCH_IS_THERE else ("torch",)))


@contextlib.contextmanager
def installed(version: str = "0.32.0"):
    """Within it, `import vllm...` finds the stand-in, as that release.

    What was imported within it, kvloom.vllm too, is gone behind it, and is there again, the same, within the next one of that release: so a
    file of tests imports within it, its tests run within it (conftest.py: `stand_in`), and neither sees what others import.
    @pre not within another one."""
    around = _exchange(_found.get(version) or made(Release(version)))
    try:
        yield
    finally:
        _found[version] = _exchange(around)


def _exchange(modules: dict[str, types.ModuleType]) -> dict[str, types.ModuleType]:
    """@return what was there in their place."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if any(f"{name}.".startswith(f"{holder}.") for holder in HOLDERS)}
    sys.modules.update(modules)
    if package := modules.get("kvloom.vllm"):
        sys.modules["kvloom"].vllm = package  # `kvloom.vllm.proxy` is looked up there
    return before
