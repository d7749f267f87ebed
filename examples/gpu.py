"""Caches in GPU memory: a layer leaves when the CUDA stream that computes it has come so far, and lands without the host.

Wants kvloom built with CUDA (docs/python.md), torch and a GPU; elsewhere it says what is missing. Both ranks are in this process, on one GPU.
"""

# Prints: cuda:

from __future__ import annotations

import importlib
from typing import Any

import kvloom

LAYERS, POOL, TOKENS = 8, 64, 512
SHAPE = kvloom.CacheShape(
    "tiny", LAYERS, [kvloom.CacheGroup("kv", list(range(LAYERS)), 4, [kvloom.PlaneShape("k", 256), kvloom.PlaneShape("v", 256)])]
)
SIDE = kvloom.Side(SHAPE, "tp=1,page=16")
PAGE = SIDE.groups[0].layout.page_stride


def cache_of(region: kvloom.Region) -> kvloom.LocalCache:
    parts = [kvloom.TensorPart(region, layer * PAGE * POOL, PAGE * POOL) for layer in range(LAYERS)]
    return kvloom.LocalCache(SIDE, 0, [kvloom.PlacedTensor("kv", layer, [part]) for layer, part in enumerate(parts)])


def run(torch: Any, sending: kvloom.Transport, landing: kvloom.Transport) -> None:
    computed = torch.zeros((LAYERS, POOL, PAGE), dtype=torch.uint8, device="cuda")
    landed = torch.zeros_like(computed)
    source_pages, target_pages = torch.randperm(POOL)[: TOKENS // 16].tolist(), torch.randperm(POOL)[: TOKENS // 16].tolist()
    stream = torch.cuda.Stream()
    with (
        kvloom.SourceSession(sending, cache_of(sending.register_memory(computed))) as source,
        kvloom.TargetSession(landing) as target,
    ):
        geometry = target.describe(cache_of(landing.register_memory(landed)))
        key = kvloom.TransferKey("request-17")
        target.begin(key, geometry, [source.address], (0, TOKENS), {"kv": kvloom.CacheTable(target_pages, POOL)}, time=30)
        source.offer(key, time=30)
        source.set_table(key, "kv", kvloom.CacheTable(source_pages, POOL))
        for layer in range(LAYERS):
            with torch.cuda.stream(stream):
                computed[layer] = torch.randint(0, 256, (POOL, PAGE), dtype=torch.uint8, device="cuda")
            source.ready(key, layer, TOKENS, after=sending.record(stream.cuda_stream))
        ended = target.wait(key, at_most=30)
        if ended.why is not None:
            raise ended.why
        stream.synchronize()
        equal = torch.equal(computed[:, source_pages], landed[:, target_pages])
        print(f"cuda: {ended.bytes} bytes landed, {'equal' if equal else 'WRONG'}")
        source.wait_released(key, at_most=30)


if __name__ == "__main__":
    try:
        transports = kvloom.cuda_transport(), kvloom.cuda_transport("*")
        run(importlib.import_module("torch"), *transports)
    except (kvloom.Unsupported, ImportError) as missing:
        print(f"cuda: not here: {missing}")
