"""What the scheduler's half tells the workers' halves with each step, and what workers say of themselves at the start.  Values; pickled by vLLM.

Block ids are the scheduler's: one list a KV cache group of vLLM's, by column; 0 is vLLM's null block. Times: seconds from now.
"""

from __future__ import annotations

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

Tables = tuple[list[int], ...]


@dataclasses.dataclass
class Offer:
    """A request that will be prefilled here and is wanted elsewhere."""

    request: str
    key: str
    seconds: float


@dataclasses.dataclass
class Chunk:
    """This step computes a request's tokens below `tokens`; its blocks so far are `tables`."""

    request: str
    tokens: int
    tables: Tables
    last: bool
    """It is all of the prompt."""


@dataclasses.dataclass
class Load:
    """Tokens [begin, end) are wanted of the prefill ranks, into these blocks. `begin == end`: none are, and they are told."""

    request: str
    key: str
    seconds: float
    sources: list[str | tuple[str, str]]
    begin: int
    end: int
    tables: Tables
    sync: bool = False
    """The step's forward pass waits for it, layer by layer."""
    refused: str = ""
    """Why it can't begin at all; else empty."""


@dataclasses.dataclass
class Step(KVConnectorMetadata):
    """All of one step. Empty lists: nothing new."""

    offers: list[Offer] = dataclasses.field(default_factory=list)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    loads: list[Load] = dataclasses.field(default_factory=list)
    preempted: list[str] = dataclasses.field(default_factory=list)
    """Prefills whose blocks are about to be overwritten."""
    cancelled: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """(request, why): loads and offers that nobody wants any more."""
    held: list[str] = dataclasses.field(default_factory=list)
    """Finished prefills whose blocks the scheduler keeps until the workers say so."""
    idle: bool = False
    """No tokens are computed in this step."""


@dataclasses.dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Of one worker."""

    rank: int
    side: str
    """kvloom.Side.digest of its geometry."""
    address: str
    """Where it listens for decode ranks; empty: it does not prefill."""
