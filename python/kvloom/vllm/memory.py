"""The KV cache's memory: made where decode ranks can reach it, and lent to a transport.

A prefill rank's cache on the CPU has to lie in memory that other processes may map (docs/decisions/0002): `SharedAllocation` is the context in
which vLLM allocates it (KVConnectorBase_V1.get_mem_pool_context). On GPUs, and on a decode rank, memory of any allocation will do.
Thread: the worker's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import kvloom
from kvloom.vllm.layouts import Placed, extent

LEAST = 1 << 20  # bytes; smaller tensors are not caches


class SharedAllocation(TorchFunctionMode):
    """Within it, large CPU tensors of zeros lie in memory of `transport`, which they keep."""

    def __init__(self, transport: kvloom.Transport) -> None:
        super().__init__()
        self._transport = transport
        self.regions: list[kvloom.Region] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.zeros, torch.empty) and torch.device(kwargs.get("device") or "cpu").type == "cpu" and not kwargs.get("out"):
            size = args[0] if len(args) == 1 and not isinstance(args[0], int) else kwargs.get("size", args)
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            length = math.prod(size) * dtype.itemsize
            if length >= LEAST:
                return self._make(length).view(dtype).view(tuple(size))
        return func(*args, **kwargs)

    def _make(self, length: int) -> torch.Tensor:
        region = self._transport.allocate(length)
        self.regions.append(region)
        return torch.from_dlpack(region.array())  # zeros, and keeps the region


def lend(transport: kvloom.Transport, tensors: Iterable[torch.Tensor], known: Iterable[kvloom.Region] = ()) -> list[kvloom.Region]:
    """A region for each storage that the tensors lie in: one of `known`, else it is registered."""
    regions = list(known)
    for tensor in tensors:
        if not any(holds(region, tensor.data_ptr()) for region in regions):
            storage = tensor.untyped_storage()
            regions.append(transport.register_pointer(storage.data_ptr(), storage.nbytes(), storage))
    return regions


def holds(region: kvloom.Region, address: int) -> bool:
    return region.base <= address < region.base + region.length


def local_cache(placed: Placed, tensors: dict[str, torch.Tensor], regions: list[kvloom.Region]) -> kvloom.LocalCache:
    """Where each tensor of the rank lies in its regions."""
    layouts = {group.name: group.layout for group in placed.side.groups}
    parts = []
    for group in placed.groups:
        length = extent(layouts[group.name], placed.pool[group.name])
        for cache in group.caches:
            address = tensors[cache.name].data_ptr()
            region = next(region for region in regions if holds(region, address))
            parts.append(kvloom.PlacedTensor(group.name, cache.layer, [kvloom.TensorPart(region, address - region.base, length)]))
    return kvloom.LocalCache(placed.side, placed.rank, parts)
