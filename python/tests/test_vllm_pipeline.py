"""KVLoomConnector in a pipeline: one scheduler, a worker a stage, several batches on their way at once. Sessions and bytes are real.

With pp stages vLLM schedules up to pp batches before the first one's results are there (step_with_batch_queue, vllm/v1/engine/core.py), each stage
works them in order, and a request is told over once every stage has said so (KVOutputAggregator, vllm/distributed/kv_transfer/kv_connector/utils.py).
"""

from __future__ import annotations

import collections
import socket
import time
import types

import numpy as np
import pytest
from conftest import LONG
from vllm_stand_in import installed
from vllm_stand_in.engine import Request, alike, allocate, cache_config, layer_names, output, tensor_of, vllm_config
from vllm_stand_in.modules import FullAttentionSpec, KVCacheBlock, KVCacheBlocks, KVConnectorOutput, KVConnectorRole, SlidingWindowSpec

import kvloom

with installed():
    from kvloom.vllm import connector
    from kvloom.vllm.layouts import place, stage_layers

pytestmark = pytest.mark.usefixtures("stand_in")

BLOCKS, HEADS, BLOCK, WIDE, LAYERS = 512, 2, 32, 16, 5  # one layer is more than a MiB, as caches are
SHAPE = (BLOCKS, HEADS, BLOCK, WIDE)
NAMES = layer_names(LAYERS)
STAGES = {1: [range(5)], 2: [range(3), range(3, 5)], 3: [range(2), range(2, 4), range(4, 5)]}  # as vLLM cuts five layers


def config_of(pp: int, rank: int = 0, role: str = "kv_both", extra: dict | None = None):
    return vllm_config(alike(LAYERS, BLOCK), HEADS, role, extra, pp=pp, rank=rank)


def names_of(layers: range) -> list[str]:
    return NAMES[layers.start : layers.stop]


def caches_of(layers: range):
    return cache_config([(FullAttentionSpec(BLOCK, head_size=WIDE // 2), names_of(layers))], BLOCKS)


def tensors_of(names: list[str]) -> dict:
    return {name: tensor_of(np.zeros(SHAPE, np.float32)) for name in names}


def placed(pp: int, rank: int):
    layers = STAGES[pp][rank]
    return place(config_of(pp, rank), caches_of(layers), tensors_of(names_of(layers)), rank)


# ---- the geometry ----


@pytest.mark.parametrize("pp", STAGES)
def test_all_stages_come_to_one_geometry_and_hold_their_own_layers(pp):
    sides = [placed(pp, rank).side for rank in range(pp)]
    assert len({side.digest for side in sides}) == 1
    assert [[layer for _, layer in side.held(rank)] for rank, side in enumerate(sides)] == [list(layers) for layers in STAGES[pp]]
    assert stage_layers(config_of(pp), pp) == [len(layers) for layers in STAGES[pp]]


@pytest.mark.parametrize(
    ("prefill", "decode", "sources"), [(2, 1, [[0, 1]]), (1, 2, [[0], [0]]), (2, 2, [[0], [1]]), (2, 3, [[0], [0, 1], [1]])]
)
def test_a_decode_stage_asks_whoever_holds_its_layers(prefill, decode, sources):
    plan = kvloom.compile(placed(prefill, 0).side, placed(decode, 0).side)
    assert [kvloom.granted_sources(plan, rank) for rank in range(decode)] == sources


def test_two_kinds_of_caches_in_stages_are_refused():
    kinds = FullAttentionSpec(BLOCK, head_size=WIDE // 2), SlidingWindowSpec(BLOCK, head_size=WIDE // 2, sliding_window=64)
    both = cache_config([(kind, [name]) for kind, name in zip(kinds, NAMES, strict=False)], BLOCKS)
    with pytest.raises(kvloom.InvalidArgument, match="pipeline parallel with more than one kind of cache"):
        place(config_of(2), both, tensors_of(NAMES[:2]), 0)


# ---- batches in flight ----


class Stage:
    """A worker."""

    def __init__(self, role: str, pp: int, rank: int, extra: dict) -> None:
        layers = STAGES[pp][rank]
        self.names = names_of(layers)
        self.worker = connector.KVLoomConnector(config_of(pp, rank, role, extra), KVConnectorRole.WORKER, caches_of(layers))
        self.memory = allocate(self.worker, self.names, SHAPE)
        if role == "kv_producer":
            self.memory[:] = np.random.default_rng(rank).random(self.memory.shape, np.float32)
        self.todo: collections.deque = collections.deque()

    def work(self) -> tuple[set[str], set[str], set[str]]:
        """The oldest batch that it hasn't worked."""
        self.worker.bind_connector_metadata(self.todo.popleft())
        for name in self.names:
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, None, None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        self.worker.clear_connector_metadata()
        return results.finished_sending, results.finished_recving, results.failed_recving


class Pipeline:
    """An engine."""

    def __init__(self, role: str, pp: int, **extra) -> None:
        config = config_of(pp, role=role, extra=extra)
        self.scheduler = connector.KVLoomConnector(config, KVConnectorRole.SCHEDULER, caches_of(STAGES[pp][0]))
        self.stages = [Stage(role, pp, rank, extra) for rank in range(pp)]
        self.said: list[dict[str, int]] = [collections.Counter() for _ in range(3)]  # sent, landed, failed: by how many stages
        said = {(rank, 0): stage.worker.get_handshake_metadata() for rank, stage in enumerate(self.stages)}
        self.addresses = [each.address for each in said.values()]
        self.scheduler.set_xfer_handshake_metadata_pp_aware(said)

    @property
    def memory(self) -> np.ndarray:
        return np.concatenate([stage.memory for stage in self.stages])

    def schedule(self, scheduled: types.SimpleNamespace | None = None) -> None:
        """A batch is on its way to all stages."""
        step = self.scheduler.build_connector_meta(scheduled or output())
        for stage in self.stages:
            stage.todo.append(step)

    def work(self, rank: int) -> None:
        """One stage works its next batch. Who is over on all of them is told the scheduler."""
        for counts, names in zip(self.said, self.stages[rank].work(), strict=True):
            counts.update(names)
        over = [{name for name in counts if counts[name] == len(self.stages)} for counts in self.said[:2]]
        for counts, names in zip(self.said, over, strict=False):
            for name in names:
                del counts[name]
        self.scheduler.update_connector_output(KVConnectorOutput(finished_sending=over[0], finished_recving=over[1]))
        self.over = over[0] | over[1]

    def until(self, name: str) -> None:
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            self.schedule()
            for rank, stage in enumerate(self.stages):
                while stage.todo:
                    self.work(rank)
                    if name in self.over:
                        return
        raise AssertionError(f"nothing of {name}")

    def close(self) -> None:
        for stage in self.stages:
            stage.worker.shutdown()


def free_ports(count: int) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first


@pytest.fixture
def meet():
    made: list[Pipeline] = []

    def make(prefill: int, decode: int) -> tuple[Pipeline, Pipeline, Request, Request]:
        made.append(Pipeline("kv_producer", prefill, control_port=free_ports(prefill)))
        made.append(Pipeline("kv_consumer", decode))
        said = {"transfer": "key", "seconds": LONG}
        sends = Request("p", 100, {"kvloom": {"role": "prefill", **said}})
        loads = Request("d", 100, {"kvloom": {"role": "decode", "prefill": made[0].addresses, **said}})
        made[0].scheduler.on_new_request(sends)
        return *made, sends, loads

    yield make
    for pipeline in made:
        pipeline.close()


def ask(decode: Pipeline, request: Request, blocks: list[int]) -> None:
    wanted, _ = decode.scheduler.get_num_new_matched_tokens(request, 0)
    decode.scheduler.update_state_after_alloc(request, KVCacheBlocks(([KVCacheBlock(number) for number in blocks],)), wanted)
    decode.schedule()
    for rank in range(len(decode.stages)):
        decode.work(rank)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2), (3, 2)])
def test_chunks_of_one_request_are_in_flight_together(meet, prefill, decode):
    source, target, sends, loads = meet(prefill, decode)
    ask(target, loads, [4, 5, 6, 7])
    source.schedule(output(new={"p": (([1, 2],), 0, 64)}))
    source.work(0)
    source.schedule(output(cached={"p": (([3, 9],), 64, 36)}))
    source.work(0)  # the second chunk, while the later stages have not begun with the first
    for rank in range(1, prefill):
        source.work(rank)
        source.work(rank)
    target.until("d")
    assert not target.said[2]
    assert np.array_equal(target.memory[:, 4:7], source.memory[:, 1:4])
    assert source.scheduler.request_finished_all_groups(sends, ([1, 2, 3, 9],)) == (True, None)
    source.until("p")
    assert not source.scheduler.has_pending_push_work()


def test_blocks_stay_until_the_last_stage_has_sent_them(meet):
    """The client leaves when the prompt is computed on stage 0 alone: the rest is on its way, and is sent."""
    source, target, sends, loads = meet(2, 1)
    ask(target, loads, [4, 5, 6, 7])
    source.schedule(output(new={"p": (([1, 2, 3, 9],), 0, 100)}))
    source.work(0)
    assert source.scheduler.request_finished_all_groups(sends, ([1, 2, 3, 9],)) == (True, None)
    source.schedule()
    end = time.monotonic() + LONG
    while source.said[0]["p"] < 1 and time.monotonic() < end:  # stage 0 has sent its own
        if not source.stages[0].todo:
            source.schedule()
        source.work(0)
    assert source.said[0]["p"] == 1 and source.scheduler.has_pending_push_work()
    while source.stages[1].todo:
        source.work(1)
    target.until("d")
    assert not target.said[2] and np.array_equal(target.memory[:, 4:7], source.memory[:, 1:4])
    if source.said[0]["p"]:
        source.until("p")
    assert not source.scheduler.has_pending_push_work()


def test_stages_that_differ_in_their_geometry_stop_the_server():
    one, other = (connector.Handshake(rank, side, "") for rank, side in ((0, "a"), (1, "b")))
    scheduler = connector.KVLoomConnector(config_of(2, role="kv_consumer"), KVConnectorRole.SCHEDULER, caches_of(STAGES[2][0]))
    with pytest.raises(kvloom.InvalidArgument, match=r"differ in their geometry: \[\(0, 'a'\), \(1, 'b'\)\]"):
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): one, (1, 0): other})
