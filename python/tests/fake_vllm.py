"""Of vLLM as little as the connector's halves touch: base classes, requests, a scheduler's output, cache configurations, tensors over numpy memory.

`install()` puts modules in vLLM's place where it is not there. What the real one does in which order: tests/vllm (real engines).
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import sys
import types
from typing import Any

import numpy as np

BASE = "vllm.distributed.kv_transfer.kv_connector.v1"


def install() -> None:
    """@post kvloom.vllm's halves can be imported: with the real vLLM if there is one."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return
    class Stats:
        def __init__(self, data: dict | None = None) -> None:
            self.data = data or {}
            self.__post_init__()

    packages = [".".join(BASE.split(".")[:n]) for n in range(1, 6)]
    for name in (*packages, f"{BASE}.base", f"{BASE}.metrics", "vllm.distributed.utils", "vllm.platforms", "torch", "torch.overrides"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules[BASE].base = base = sys.modules[f"{BASE}.base"]
    base.KVConnectorMetadata = base.KVConnectorHandshakeMetadata = object
    base.KVConnectorBase_V1, base.SupportsHMA = Base, type("SupportsHMA", (), {})
    base.KVConnectorRole, base.KVConnectorTransferResults = Role, types.SimpleNamespace
    metrics = sys.modules[f"{BASE}.metrics"]
    metrics.KVConnectorStats, metrics.KVConnectorPromMetrics = Stats, object
    sys.modules["vllm"].__version__ = "0.32.0"
    sys.modules["vllm.platforms"].current_platform = types.SimpleNamespace(device_type="cpu")
    sys.modules["vllm.distributed.utils"].get_pp_indices = pp_indices
    torch = sys.modules["torch"]
    torch.Tensor, torch.device, torch.from_dlpack = Tensor, Device, np.asarray
    torch.zeros = torch.empty = None
    sys.modules["torch.overrides"].TorchFunctionMode = object


def pp_indices(layers: int, rank: int, size: int) -> tuple[int, int]:
    """Layers of a pipeline's stage. What is left over goes to the stages before the last one, from behind (vllm/distributed/utils.py)."""
    each, over = divmod(layers, size)
    counts = [each + (size - 1 - over <= stage < size - 1) for stage in range(size)]
    return sum(counts[:rank]), sum(counts[: rank + 1])


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """KVConnectorBase_V1, as far as it does anything."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._kv_cache_config, self._connector_metadata = kv_cache_config, None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None


@dataclasses.dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict | None = None


@dataclasses.dataclass
class Output:
    """Of a scheduler. `new`: name -> (blocks by group, computed before, scheduled); `cached`: the same, blocks new ones or None."""

    new: dict[str, tuple] = dataclasses.field(default_factory=dict)
    cached: dict[str, tuple] = dataclasses.field(default_factory=dict)
    resumed: set[str] = dataclasses.field(default_factory=set)
    preempted_req_ids: set[str] = dataclasses.field(default_factory=set)

    @property
    def scheduled_new_reqs(self) -> list[Any]:
        return [types.SimpleNamespace(req_id=name, block_ids=said[0], num_computed_tokens=said[1]) for name, said in self.new.items()]

    @property
    def scheduled_cached_reqs(self) -> Any:
        return types.SimpleNamespace(
            req_ids=list(self.cached), new_block_ids=[said[0] for said in self.cached.values()],
            num_computed_tokens=[said[1] for said in self.cached.values()], resumed_req_ids=self.resumed,
        )  # fmt: skip

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {name: said[2] for name, said in {**self.new, **self.cached}.items()}

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


# ---- caches ----


@dataclasses.dataclass
class KVCacheSpec:
    block_size: int


@dataclasses.dataclass
class AttentionSpec(KVCacheSpec):
    head_size: int = 8
    head_size_v: int = 8
    max_tp_shards: int | None = None


class FullAttentionSpec(AttentionSpec): ...


class MLAAttentionSpec(FullAttentionSpec): ...


@dataclasses.dataclass
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 0


class MambaSpec(KVCacheSpec): ...


@dataclasses.dataclass(frozen=True)
class Device:
    type: str = "cpu"
    index: int | None = None


class Tensor:
    """A torch.Tensor's shape and strides over numpy memory."""

    def __init__(self, array: np.ndarray, device: str = "cpu") -> None:
        self.array, self.device, self.dtype = array, Device(device), f"torch.{array.dtype}"
        self.shape, self.ndim = array.shape, array.ndim

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self, axis: int | None = None) -> Any:
        steps = tuple(step // self.array.itemsize for step in self.array.strides)
        return steps if axis is None else steps[axis]

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def cache_config(groups: list[tuple[KVCacheSpec, list[str]]], blocks: int) -> Any:
    made = [types.SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups]
    return types.SimpleNamespace(kv_cache_groups=made, num_blocks=blocks)


def config(heads: int, layers: int, isa: str = "vec", tp: int = 1, rank: int = 0, **more: Any) -> Any:
    parallel = dict(tensor_parallel_size=tp, pipeline_parallel_size=1, rank=rank, world_size=tp) | more
    hugging_face = types.SimpleNamespace(architectures=["Tiny"], hidden_size=64, num_hidden_layers=layers)
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(**parallel),
        model_config=types.SimpleNamespace(
            get_total_num_kv_heads=lambda: heads, get_total_num_hidden_layers=lambda: layers, hf_config=hugging_face,
            hf_text_config=hugging_face, dtype="float32",
        ),
        compilation_config=types.SimpleNamespace(static_forward_context={name_of(n): types.SimpleNamespace(isa=isa) for n in range(layers)}),
    )  # fmt: skip


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def plain(layers: int, block: int, **spec) -> list:
    return [(FullAttentionSpec(block, **spec), [name_of(n) for n in range(layers)])]
