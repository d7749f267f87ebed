"""Two ranks of a small model on one host, as an engine would hold them; and the command line."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from vllm_stand_in import installed

import kvloom

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONG = 20.0  # s; nothing takes as long, unless it hangs
POOL = 64  # pages

collect_ignore = ["proxy"] if sys.version_info < (3, 11) else []  # which the proxy wants

_names = itertools.count()


def key(epoch: int = 1) -> kvloom.TransferKey:
    return kvloom.TransferKey(f"req-{next(_names)}", epoch)


def shape(layers: int = 4, heads: int = 4) -> kvloom.CacheShape:
    planes = [kvloom.PlaneShape("k", 32), kvloom.PlaneShape("v", 32)]
    return kvloom.CacheShape("tiny", layers, [kvloom.CacheGroup("kv", list(range(layers)), heads, planes)])


def command_line(*words: str, **options) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run([sys.executable, "-m", "kvloom", *words], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False, **options)


def tensors_of(side: kvloom.Side, rank: int, region: kvloom.Region) -> tuple[list[kvloom.PlacedTensor], int]:
    """One after another in one region: where each lies, and the bytes of one."""
    length = side.groups[0].layout.page_stride * POOL
    parts = [(group, layer, kvloom.TensorPart(region, n * length, length)) for n, (group, layer) in enumerate(side.held(rank))]
    return [kvloom.PlacedTensor(group, layer, [part]) for group, layer, part in parts], length


def cache_bytes(side: kvloom.Side, rank: int) -> int:
    return len(side.held(rank)) * side.groups[0].layout.page_stride * POOL


@dataclasses.dataclass
class Prefill:
    side: kvloom.Side
    rank: int
    transport: kvloom.Transport
    memory: np.ndarray  # uint8 [tensors, bytes]
    session: kvloom.SourceSession

    def offer(self, of: kvloom.TransferKey, pages: list[int], time: float = LONG, has_payload: bool = False) -> None:
        self.session.offer(of, time, has_payload)
        self.session.set_table(of, "kv", kvloom.CacheTable(pages, POOL))

    def layers(self) -> list[int]:
        return [layer for _, layer in self.side.held(self.rank)]

    def tensor(self, layer: int) -> np.ndarray:
        return self.memory[self.layers().index(layer)]


@dataclasses.dataclass
class Decode(Prefill):
    session: kvloom.TargetSession
    geometry: int

    def begin(self, of: kvloom.TransferKey, sources: list[str], tokens: tuple[int, int], pages: list[int], time: float = LONG) -> None:
        self.session.begin(of, self.geometry, sources, tokens, {"kv": kvloom.CacheTable(pages, POOL)}, time)


def make_prefill(side: kvloom.Side, rank: int = 0, **options) -> Prefill:
    transport = kvloom.shm_transport()
    region = transport.allocate(cache_bytes(side, rank))
    placed, length = tensors_of(side, rank, region)
    memory = np.asarray(region.array()).reshape(-1, length)
    memory[:] = np.random.default_rng(rank).integers(0, 256, memory.shape, np.uint8)
    session = kvloom.SourceSession(transport, kvloom.LocalCache(side, rank, placed), **options)
    return Prefill(side, rank, transport, memory, session)


def make_decode(side: kvloom.Side, rank: int = 0, **options) -> Decode:
    transport = kvloom.shm_transport("*")
    memory = np.zeros((len(side.held(rank)), side.groups[0].layout.page_stride * POOL), np.uint8)
    placed, _ = tensors_of(side, rank, transport.register_memory(memory))
    session = kvloom.TargetSession(transport, rank=rank, **options)
    geometry = session.describe(kvloom.LocalCache(side, rank, placed))
    return Decode(side, rank, transport, memory, session, geometry)


def checksum_of(rank: Prefill, pages: list[int], tokens: tuple[int, int], layers: list[int] | None = None) -> int:
    """Of what the rank holds of these tokens, all its layers."""
    sums = [kvloom.checksum(rank.side, "kv", rank.rank, layer, rank.tensor(layer), pages, tokens)[0] for layer in layers or rank.layers()]
    return sum(sums) % 2**64


class Pair:
    """One prefill and one decode rank with pages of other sizes and orders."""

    def __init__(self, **options) -> None:
        self.prefill = make_prefill(kvloom.Side(shape(), "tp=1,page=16,layout=hnd"), events=True, **options)
        self.decode = make_decode(kvloom.Side(shape(), "tp=1,page=8"), events=True, trace=True)

    @property
    def sources(self) -> list[str]:
        return [self.prefill.session.address]

    def close(self) -> None:
        self.decode.session.close()
        self.prefill.session.close()


@pytest.fixture
def stand_in():
    """Within vLLM's stand-in, where the test's own file was imported: its modules, and what they import later, are the same."""
    with installed():
        yield


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()
