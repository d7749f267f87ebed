"""The KV cache's memory, made where decode ranks can reach it.

A prefill rank's cache on the CPU has to lie in memory that other processes may map (docs/decisions/0002): `SharedAllocation` is the context in
which vLLM allocates it (KVConnectorBase_V1.get_mem_pool_context). On GPUs, and on a decode rank, memory of any allocation will do.
Thread: the worker's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import kvloom

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
