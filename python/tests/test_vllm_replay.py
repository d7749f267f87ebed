"""KVLoomConnector called as a real vLLM was seen to call (vllm_stand_in): attached and unused in every recording; where blocks are kept, as a prefill
server whose transfers nobody asks for, so that they end by their time; and where tokens are loaded, as a decode server that meets a prefill rank.

Loads of recordings in which the recording connector answered what ours answers (all but the last token of the prompt) are replayed: with real
bytes from a real session, in each release. The others stand for what vLLM does with other answers.
"""

from __future__ import annotations

import dataclasses
import random
import socket
import time

import numpy as np
import pytest
from vllm_stand_in import RELEASES, Recording, Release, Replay, installed, read, recordings
from vllm_stand_in.engine import bytes_of

import kvloom

PREFILLS = [name for name in recordings() if not any(call.name == "get_num_new_matched_tokens" and call.gives[0] for call in read(name).calls())]
KEEPS = {name: kept for name in PREFILLS if (kept := {
    call.given["request"]["id"] for call in read(name).calls() if call.name.startswith("request_finished") and call.gives[0]
})}  # fmt: skip


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def replay(name: str, release: str, port: int, params: dict) -> Replay:
    from kvloom.vllm import KVLoomConnector

    done = Replay(KVLoomConnector, read(name), release, params=params, extra={"control_port": port})
    try:
        done.run()
    finally:
        for side in done.sides.values():
            side.shutdown()
    return done


@pytest.mark.parametrize("name", [name for name in PREFILLS if name not in KEEPS])
def test_attached_and_unused(name, port):
    with installed("0.32.0"):
        replay(name, "0.32.0", port, {})


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", list(KEEPS))
def test_blocks_are_kept_until_a_transfers_time_is_up(name, release, port):
    params = {request: {"kvloom": {"role": "prefill", "transfer": f"{name}-{request}", "seconds": 0.3}} for request in KEEPS[name]}
    with installed(release):
        if Release(release).has("get_mem_pool_context"):
            replay(name, release, port, params)
        else:  # CPUs: nobody else could read the cache
            with pytest.raises(kvloom.InvalidArgument, match="does not let a connector say in what memory"):
                replay(name, release, port, params)


# ---- loads ----

BLOCK = 20  # the prefill rank's first one of a group; each group has blocks of its own
SECONDS = 30.0
SOON = 2.0  # of a prompt that is never computed: a decode rank that leaves before the two have met can't tell


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The request of a recording that loads all but its last prompt token."""

    request: str
    prompt: int
    local: int  # tokens that decode has already
    tables: tuple[list[int], ...]


def loaded(name: str) -> Loaded | None:
    for call in read(name).calls():
        if call.name == "get_num_new_matched_tokens" and call.gives[0] == call.given["request"]["prompt"] - 1 - call.given["computed"]:
            request = call.given["request"]["id"]
            given = [c.given for c in read(name).calls() if c.name == "update_state_after_alloc" and c.given["request"]["id"] == request]
            return Loaded(request, call.given["request"]["prompt"], call.given["computed"], tuple(given[0]["blocks"]))
    return None


LOADS = {name: load for name in recordings() if (load := loaded(name))}


def as_role(recording: Recording, role: str) -> Recording:
    """The same, of a server with another kv_role."""
    begin = tuple(dataclasses.replace(c, given={**c.given, "kv_role": role}) if c.name == "__init__" else c for c in recording.steps[0])
    return dataclasses.replace(recording, steps=(begin, *recording.steps[1:]))


class Prefill:
    """A prefill worker of ours with the recording's caches, full of random bytes."""

    def __init__(self, name: str, port: int) -> None:
        from kvloom.vllm import KVLoomConnector

        recording = as_role(read(name), "kv_producer")
        made = Replay(KVLoomConnector, recording, "0.32.0", extra={"control_port": port})
        for call in recording.steps[0]:
            if call.side == "worker":
                made._drive(call)
        self.connector = made.sides["worker"]
        self.tables = tuple([BLOCK * (group + 1) + column for column in range(len(table))] for group, table in enumerate(LOADS[name].tables))
        for array in memory_of(self.connector).values():
            array[:] = np.frombuffer(random.Random(name).randbytes(array.size), np.uint8)

    def step(self, **said) -> set[str]:
        """One step of its engine; requests whose blocks are its own again."""
        from kvloom.vllm.metadata import Step

        self.connector.bind_connector_metadata(Step(**said))
        self.connector.wait_for_save()
        sent, _ = self.connector.get_finished(set())
        self.connector.clear_connector_metadata()
        return sent or set()

    def compute(self, load: Loaded, key: str, whole: bool = True) -> None:
        """The request comes, and its prompt is computed or not."""
        from kvloom.vllm.metadata import Chunk, Offer

        chunks = [Chunk("p", load.prompt, self.tables, True)] if whole else []
        self.step(offers=[Offer("p", key, SECONDS if whole else SOON)], chunks=chunks)

    def end(self) -> None:
        """Its blocks come back."""
        sent, until = self.step(held=["p"]), time.monotonic() + SECONDS
        while not sent and time.monotonic() < until:
            sent = self.step(idle=True)
        assert sent == {"p"}


def memory_of(connector) -> dict[tuple[str, int], np.ndarray]:
    """(group, layer) -> bytes of its pool."""
    from kvloom.vllm.regions import extent

    worker = connector._worker
    layouts = {group.name: group.layout for group in worker._placed.side.groups}
    found = {}
    for group in worker._placed.groups:
        length = extent(layouts[group.name], worker._placed.pool[group.name])
        for cache in group.caches:
            found[group.name, cache.layer] = bytes_of(worker.tensors[cache.name], length)
    return found


def sums_of(connector, tables: tuple[list[int], ...], begin: int, end: int) -> dict[tuple[str, int], int]:
    """Checksums of the rows of tokens [begin, end), of a window's group those within the window."""
    placed, memory, found = connector._worker._placed, memory_of(connector), {}
    for group in placed.groups:
        pages = placed.table(group, tables, end).pages
        first = begin if group.shape.window is None else max(begin, end - group.shape.window.tokens)
        for cache in group.caches:
            place = group.name, cache.layer
            found[place], _ = kvloom.checksum(
                placed.side, group.name, placed.rank, cache.layer, memory[place], [max(0, page) for page in pages], (first, end), end
            )
    return found


ONE_GROUP = {name for name, load in LOADS.items() if len(load.tables) == 1}
TAKEN = [(name, release) for name in LOADS for release in RELEASES if name in ONE_GROUP or Release(release).has("get_transfer_results")]


@pytest.mark.parametrize(("name", "release"), TAKEN)
def test_loads(name, release, port):
    load, fails = LOADS[name], "fail" in name
    address = f"tcp://127.0.0.1:{1 if fails else port}"  # nobody listens at 1
    params = {load.request: {"kvloom": {"role": "decode", "transfer": name, "seconds": SECONDS, "prefill": [address]}}}
    with installed(release):
        from kvloom.vllm import KVLoomConnector

        prefill = None if fails else Prefill(name, port)
        extra = {"per_layer_start": True} if name.startswith("sync") else {}
        decode = Replay(KVLoomConnector, as_role(read(name), "kv_consumer"), release, params=params, extra=extra)
        try:
            if prefill:
                prefill.compute(load, name, whole="abort" not in name)
            decode.run()
            if prefill:
                prefill.end()
            if prefill and "abort" not in name:
                sent, landed = (
                    sums_of(side, tables, load.local, load.prompt - 1)
                    for side, tables in ((prefill.connector, prefill.tables), (decode.sides["worker"], load.tables))
                )
                assert landed == sent and len(set(sent.values())) == len(sent)
        finally:
            for side in (*decode.sides.values(), *([prefill.connector] if prefill else ())):
                side.shutdown()


@pytest.mark.parametrize("release", RELEASES)
def test_loads_of_several_groups_are_refused_where_one_that_fails_would_end_the_engine(release):
    with installed(release):
        from kvloom.vllm import KVLoomConnector

        begin = [call for call in as_role(read("window_load"), "kv_consumer").steps[0] if call.name == "__init__"]
        made = Replay(KVLoomConnector, as_role(read("window_load"), "kv_consumer"), release)
        if Release(release).has("get_transfer_results"):
            made._drive(begin[0])
        else:
            with pytest.raises(kvloom.InvalidArgument, match="--disable-hybrid-kv-cache-manager"):
                made._drive(begin[0])


def test_there_are_loads_of_every_end():
    wanted = {"async_load", "async_load_after_hit", "sync_load", "abort_loading", "failed_load_recompute", "failed_load_fail", "window_load"}
    assert wanted <= set(LOADS)
