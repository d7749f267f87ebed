"""Prefill and decode as two processes, as two engines would be: only an address and a key go between them."""

# Prints: 131072 bytes landed, checksums are equal

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import kvloom

SHAPE = kvloom.CacheShape("tiny", 4, [kvloom.CacheGroup("kv", [0, 1, 2, 3], 4, [kvloom.PlaneShape("k", 64), kvloom.PlaneShape("v", 64)])])
TOKENS, POOL = 64, 32
PREFILL_PAGES, DECODE_PAGES = [7, 3, 30, 4], [1, 0, 9, 8, 20, 21, 17, 2]


class Rank:
    """One tensor a layer, in one region."""

    def __init__(self, words: str, transport: kvloom.Transport) -> None:
        self.side = kvloom.Side(SHAPE, words)
        self.size = self.side.groups[0].layout.page_stride * POOL
        self.region = transport.allocate(self.size * SHAPE.layers)
        self.memory = memoryview(self.region.array())
        parts = {layer: [kvloom.TensorPart(self.region, layer * self.size, self.size)] for layer in range(SHAPE.layers)}
        self.cache = kvloom.LocalCache(self.side, 0, [kvloom.PlacedTensor("kv", layer, part) for layer, part in parts.items()])

    def tensor(self, layer: int) -> memoryview:
        return self.memory[layer * self.size : (layer + 1) * self.size]

    def checksum(self, pages: list[int]) -> int:
        """Does not depend on pages, layout or sharding."""
        return sum(kvloom.checksum(self.side, "kv", 0, n, self.tensor(n), pages, (0, TOKENS))[0] for n in range(SHAPE.layers)) % 2**64


def prefill(channel: Connection) -> None:
    transport = kvloom.shm_transport()
    rank = Rank("tp=1,page=16", transport)
    with kvloom.SourceSession(transport, rank.cache) as session:
        channel.send(session.address)
        key = channel.recv()
        session.offer(key, time=30)
        session.set_table(key, "kv", kvloom.CacheTable(PREFILL_PAGES, POOL))
        for layer in range(SHAPE.layers):
            rank.tensor(layer)[:] = os.urandom(rank.size)
            session.ready(key, layer, TOKENS)
        session.wait_released(key, at_most=30)
        channel.send(rank.checksum(PREFILL_PAGES))
        channel.recv()


def decode() -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=(there,))
    process.start()
    transport = kvloom.shm_transport("*")
    rank = Rank("tp=1,page=8,layout=hnd", transport)
    with kvloom.TargetSession(transport) as session:
        geometry = session.describe(rank.cache)
        key = kvloom.TransferKey("request-17")
        session.begin(key, geometry, [here.recv()], (0, TOKENS), {"kv": kvloom.CacheTable(DECODE_PAGES, POOL)}, time=30)
        here.send(key)
        ended = session.wait(key, at_most=30)
        if ended.why is not None:
            raise ended.why
        assert here.recv() == rank.checksum(DECODE_PAGES)
        print(f"{ended.bytes} bytes landed, checksums are equal")
        here.send("over")
    process.join()


if __name__ == "__main__":
    decode()
