"""A prefill and a decode rank, here in one process: each layer is pushed when it is computed, and decode waits for it by itself."""

# Prints: layer 3 landed
# The two sides have pages of other sizes: the transfer is the reshard.

from __future__ import annotations

import kvloom

LAYERS, POOL = 4, 16  # pages of each rank's pool

shape = kvloom.CacheShape(
    "tiny",
    LAYERS,
    [kvloom.CacheGroup("kv", list(range(LAYERS)), heads=2, planes=[kvloom.PlaneShape("k", 128), kvloom.PlaneShape("v", 128)])],
)


def place(side: kvloom.Side, region: kvloom.Region) -> kvloom.LocalCache:
    """A tensor a layer, one after another in one region."""
    size = side.groups[0].layout.page_stride * POOL
    return kvloom.LocalCache(
        side, 0, [kvloom.PlacedTensor("kv", layer, [kvloom.TensorPart(region, layer * size, size)]) for layer in range(LAYERS)]
    )


def bytes_of(side: kvloom.Side) -> int:
    return LAYERS * side.groups[0].layout.page_stride * POOL


# Prefill: its cache lies in memory of its transport, which decode's process maps.
prefill_side = kvloom.Side(shape, "tp=1,page=32")
prefill_transport = kvloom.shm_transport()
cache = prefill_transport.allocate(bytes_of(prefill_side))
source = kvloom.SourceSession(prefill_transport, place(prefill_side, cache))

# Decode: any memory, here a bytearray; a torch tensor is the same.
decode_side = kvloom.Side(shape, "tp=1,page=16")
decode_transport = kvloom.shm_transport("*")
landed = bytearray(bytes_of(decode_side))
target = kvloom.TargetSession(decode_transport, events=True)
geometry = target.describe(place(decode_side, decode_transport.register_memory(landed)))

with source, target:
    key = kvloom.TransferKey("request-17", epoch=1)
    tokens = 64
    target.begin(key, geometry, [source.address], (0, tokens), {"kv": kvloom.CacheTable([3, 9, 0, 12], POOL)}, time=30)
    source.offer(key, time=30)
    source.set_table(key, "kv", kvloom.CacheTable([5, 2], POOL))
    memory = memoryview(cache.array())
    for layer in range(LAYERS):
        size = len(memory) // LAYERS
        memory[layer * size : (layer + 1) * size] = bytes([layer + 1]) * size  # the forward pass of this layer
        source.ready(key, layer, tokens)
        target.wait_layer(key, layer, at_most=30)
        print(f"layer {layer} landed")
    target.wait(key, at_most=30)
    source.wait_released(key, at_most=30)  # prefill's pages are its own again
    print(*target.poll(), sep="\n")
    assert landed[3 * decode_side.groups[0].layout.page_stride] == 1
