"""Where tensors lie, in a transport's words: the regions of their storages, and each tensor's part.  Thread: the worker's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import kvloom
from kvloom.vllm.layouts import Placed, extent

if TYPE_CHECKING:
    import torch


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
