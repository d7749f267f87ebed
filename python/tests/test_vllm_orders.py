"""KVLoomConnector against stand-ins of vLLM's order of calls: as 0.24 calls it, and as 0.32 does. Both sides are real: sessions, bytes.

The orders: vllm/v1/worker/kv_connector_model_runner_mixin.py (0.24 and 0.32), vllm/v1/worker/gpu/kv_connector.py (0.32).
"""

from __future__ import annotations

import socket
import time
import types
from typing import Any

import numpy as np
import pytest
from conftest import LONG
from vllm_stand_in import installed
from vllm_stand_in.engine import Request, alike, allocate, cache_config, layer_names, output, vllm_config
from vllm_stand_in.modules import KVCacheBlock, KVCacheBlocks, KVConnectorRole

import kvloom

with installed():
    from kvloom.vllm import connector, versions

pytestmark = pytest.mark.usefixtures("stand_in")

BLOCKS, HEADS, BLOCK, WIDE, LAYERS = 128, 2, 32, 16, 3  # what vLLM allocates at once is more than a MiB, as a cache is
NAMES = layer_names(LAYERS)


class Old:
    """0.24: loads are started before the layers; results are two sets, and failed blocks."""

    @staticmethod
    def step(worker: Any, step: Any, hooks: list[str]) -> tuple[set[str], set[str], set[str]]:
        worker.handle_preemptions(set(step.preempted))
        worker.bind_connector_metadata(step)
        worker.start_load_kv(None)
        for name in hooks:
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, None, None)
        worker.wait_for_save()
        sent, landed = worker.get_finished(set())
        blocks = worker.get_block_ids_with_load_errors()
        worker.clear_connector_metadata()
        return sent or set(), landed or set(), (landed or set()) if blocks else set()


class New:
    """0.32: loads are started after the layers; failed requests are named."""

    @staticmethod
    def step(worker: Any, step: Any, hooks: list[str]) -> tuple[set[str], set[str], set[str]]:
        worker.handle_preemptions(step)
        worker.bind_connector_metadata(step)
        for name in hooks:
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, None, None)
        worker.finish_forward() if hasattr(worker, "finish_forward") else None
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        assert worker.get_block_ids_with_load_errors() == set()
        worker.clear_connector_metadata()
        return results.finished_sending, results.finished_recving, results.failed_recving


class Engine:
    """A scheduler's connector and a worker's, with the cache between them."""

    def __init__(self, role: str, order: Any, **extra: Any) -> None:
        groups = alike(LAYERS, BLOCK)
        config, caches = vllm_config(groups, HEADS, role, extra), cache_config(groups, BLOCKS)
        self.order = order
        self.scheduler = connector.KVLoomConnector(config, KVConnectorRole.SCHEDULER, caches)
        self.worker = connector.KVLoomConnector(config, KVConnectorRole.WORKER, caches)
        self.memory = allocate(self.worker, NAMES, (BLOCKS, HEADS, BLOCK, WIDE))
        if role == "kv_producer":
            self.memory[:] = np.random.default_rng(3).random(self.memory.shape, np.float32)
        self.scheduler.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})

    def step(self, scheduled: Any = None, hooks: int = 0) -> tuple[set[str], set[str], set[str]]:
        step = self.scheduler.build_connector_meta(scheduled or output())
        sent, landed, failed = self.order.step(self.worker, step, NAMES[:hooks])
        self.scheduler.update_connector_output(types.SimpleNamespace(finished_sending=sent, finished_recving=landed))
        return sent, landed, failed

    def until(self, name: str) -> tuple[set[str], set[str], set[str]]:
        """Empty steps, as an engine takes them while something is pending."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            said = self.step()
            if name in said[0] | said[1]:
                return said
        raise AssertionError(f"nothing of {name}")


@pytest.fixture(params=[Old, New], ids=["0.24", "0.32"])
def engines(request):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = Engine("kv_producer", request.param, control_port=port), Engine("kv_consumer", request.param)
    pair[0].address = f"tcp://127.0.0.1:{port}"
    yield pair
    for engine in pair:
        engine.worker.shutdown()


def requests(prefill: Engine) -> tuple[Request, Request]:
    said = {"transfer": "key", "seconds": LONG}
    return (
        Request("p", 100, {"kvloom": {"role": "prefill", **said}}),
        Request("d", 100, {"kvloom": {"role": "decode", "prefill": [prefill.address], **said}}),
    )


def ask(decode: Engine, request: Request, blocks: list[int]) -> None:
    wanted, _ = decode.scheduler.get_num_new_matched_tokens(request, 0)
    assert wanted == request.num_prompt_tokens - 1
    decode.scheduler.update_state_after_alloc(request, KVCacheBlocks(([KVCacheBlock(number) for number in blocks],)), wanted)


@pytest.mark.parametrize("told", [True, False])  # old versions do not call on_new_request
def test_a_request_in_two_chunks(engines, told):
    prefill, decode = engines
    sends, loads = requests(prefill)
    if told:
        prefill.scheduler.on_new_request(sends)
    assert prefill.scheduler.get_num_new_matched_tokens(sends, 0) == (0, False)
    ask(decode, loads, [4, 5, 6, 7])
    decode.step()
    prefill.step(output(new={"p": (([1, 2],), 0, 64)}), hooks=LAYERS)
    prefill.step(output(cached={"p": (([3, 9],), 64, 36)}), hooks=1)
    assert decode.until("d") == (set(), {"d"}, set())
    assert np.array_equal(decode.memory[:, 4:7], prefill.memory[:, 1:4])
    assert prefill.scheduler.request_finished_all_groups(sends, ([1, 2, 3, 9],)) == (True, None)
    assert prefill.scheduler.has_pending_push_work()
    assert prefill.until("p")[0] == {"p"}
    assert not prefill.scheduler.has_pending_push_work()
    assert decode.scheduler.request_finished_all_groups(loads, ([4, 5, 6, 7],)) == (False, None)


def test_a_preemption_fails_the_load(engines):
    prefill, decode = engines
    sends, loads = requests(prefill)
    prefill.scheduler.on_new_request(sends)
    ask(decode, loads, [4, 5, 6, 7])
    decode.step()
    prefill.step(output(new={"p": (([1, 2],), 0, 64)}), hooks=LAYERS)
    prefill.step(output(preempted={"p"}))
    prefill.memory[:] = 0  # overwritten by who came next
    assert decode.until("d") == (set(), {"d"}, {"d"})
    assert decode.scheduler.get_num_new_matched_tokens(loads, 0) == (0, False)  # computed here
    prefill.step(output(cached={"p": (([5, 6, 7, 8],), 0, 100)}, resumed={"p"}), hooks=LAYERS)
    assert prefill.scheduler.request_finished_all_groups(sends, ([],))[0] and prefill.until("p")[0] == {"p"}


def test_an_idle_engine_asks_nothing_of_its_sessions(engines):
    for engine in engines:
        assert engine.step(output(new={"plain": (([1],), 0, 10)}), hooks=LAYERS) == (set(), set(), set())
        assert not engine.scheduler.has_pending_push_work()


def test_versions_that_are_too_old_are_refused():
    with pytest.raises(kvloom.InvalidArgument, match=r"0\.23\.1: kvloom works with 0\.24 to 0\.33"):
        versions.check("0.23.1")
    assert versions.head_major(versions.check("0.24.0")) == "HND" and versions.head_major(versions.check("0.0.0.dev1")) == "LBHNC"
