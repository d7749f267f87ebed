"""Replay: a connector class, called as a recording says.  Both sides in this process, metadata handed over as vLLM would.

What is asked of the connector:
  - its answers are those of the recording: tokens matched, blocks kept;
  - each load and each kept request is reported once, none is reported that wasn't open;
  - a load that the recording saw fail fails, others don't.
When a report comes is the connector's: one that is early is taken, one that isn't there yet is waited for with empty steps, as a vLLM would take
that has nothing else to do, up to `patience` seconds.  Thread: the caller's.
"""

import contextlib
import dataclasses
import threading
import types
from typing import Any

from vllm_stand_in import engine, modules
from vllm_stand_in.recording import Call, Recording
from vllm_stand_in.versions import Release

PACE = 0.002  # seconds between empty steps
IDLE = ("build_connector_meta handle_preemptions bind_connector_metadata start_load_kv wait_for_save get_transfer_results "
        "get_block_ids_with_load_errors get_kv_connector_stats get_kv_connector_kv_cache_events build_connector_worker_meta "
        "clear_connector_metadata update_connector_output take_events").split()  # fmt: skip
SCHEDULERS = {"build_connector_meta", "update_connector_output", "take_events"}
EMPTY = {"new": [], "cached": [], "resumed": [], "tokens": {}, "finished": [], "preempted": [], "sync_loads": False}


class Differs(AssertionError):
    """The connector did what the interface, or the recording, doesn't allow."""


class Slots(list):
    """A one-dimensional tensor of slots, as far as it is read."""

    def __getitem__(self, key):
        return Slots(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

    def tolist(self) -> list[int]:
        return list(self)

    def numel(self) -> int:
        return len(self)


class Replay:
    """One connector class by one recording, as one release. @pre within `installed` of that release."""

    def __init__(self, connector: type, recording: Recording, release: str = "0.32.0", params: dict[str, dict] | None = None,
                 extra: dict | None = None, patience: float = 10.0):  # fmt: skip
        self._connector, self._recording, self._release = connector, recording, Release(release)
        self._params, self._extra, self._patience = params, extra or {}, patience
        self.sides: dict[str, Any] = {}
        self.caches: dict[str, Any] = {}
        self.requests: dict[str, engine.Request] = {}
        self.pool: engine.Pool | None = None
        self.returned: dict[str, dict | None] = {}  # request -> the params that its end gave
        self._metadata: list = []  # made by the scheduler's side, not bound by the worker's yet
        self._output = modules.KVConnectorOutput()
        self._open: dict[str, set[str]] = {"sending": set(), "recving": set()}
        self._due: dict[str, set[str]] = {"sending": set(), "recving": set()}
        self._failed: set[str] = set()
        self._may_fail: set[str] = set()
        self._batches: dict[str, Any] = {}

    def run(self) -> None:
        """All of it. @error Differs."""
        for step in self._recording.steps:
            calls = self._release.order(list(step))
            self._batches = {call.given["layer"]: self._batch(call.given["batch"]) for call in calls if call.name == "save_kv_layer"}
            for call in calls:
                self._drive(call)
            self._wait_for_due()
        if any(self._open.values()):
            raise Differs(f"never reported: {self._open}")
        if self.pool is not None and self.pool.held:
            raise Differs(f"blocks that the connector held itself and did not give back: {self.pool.held}")
        if self._failed != self._may_fail:
            raise Differs(f"loads that failed: {sorted(self._failed)}, and in the recording {sorted(self._may_fail)}")

    # Steps.

    def _drive(self, call: Call) -> None:
        if call.name == "request_finished_all_groups" and not isinstance(self.sides["scheduler"], modules.SupportsHMA):
            call = dataclasses.replace(call, name="request_finished", given={**call.given, "blocks": call.given["blocks"][0]})
        own = getattr(self, f"_{call.name.strip('_')}", None)
        if own is not None:
            own(call)
        else:
            getattr(self.sides[call.side], call.name)()

    def _wait_for_due(self) -> None:
        """Empty steps until all that the recording saw reported by now is."""
        for _ in range(int(self._patience / PACE)):
            if not any(self._due.values()):
                return
            threading.Event().wait(PACE)
            empty = [Call("scheduler" if name in SCHEDULERS else "worker", name, EMPTY if name == "build_connector_meta" else None) for name in IDLE]
            self._batches = {}
            for call in self._release.order(empty):
                self._drive(call)
        raise Differs(f"after {self._patience:g} s of empty steps not reported: {self._due}")

    # The beginning.

    def _init(self, call: Call) -> None:
        said = call.given
        self._said = said
        role = modules.KVConnectorRole[call.side.upper()]
        config, caches = self._configurations(said)
        self.sides[call.side] = self._connector(config, role, caches)

    def _configurations(self, said: dict) -> tuple[types.SimpleNamespace, types.SimpleNamespace]:
        """(vLLM's, the caches')"""
        groups, first = [], said["groups"][0]
        for group in said["groups"]:
            fields = {name: value for name, value in group.items() if name not in ("layers", "spec")}
            groups.append((modules.SPECS[group["spec"]](**fields), list(group["layers"])))
        config = engine.vllm_config(
            groups, first.get("num_kv_heads", 1), said["kv_role"], self._extra, tp=said["tp"], pp=said["pp"], dtype=first.get("dtype"),
            prefix_caching=said["prefix_caching"], chunk=said["chunk"], async_scheduling=said["async_scheduling"],
            kv_load_failure_policy=said["load_failure"],
        )  # fmt: skip
        return config, engine.cache_config(groups, said["blocks"], [modules.KVCacheTensor(**one) for one in said["tensors"]])

    def _pool(self) -> engine.Pool:
        self.pool = self.pool or engine.Pool(self._said["blocks"])
        return self.pool

    def _bind_kv_cache_manager(self, _call: Call) -> None:
        self.sides["scheduler"].bind_kv_cache_manager(types.SimpleNamespace(block_pool=self._pool()))

    def _bind_gpu_block_pool(self, _call: Call) -> None:
        self.sides["scheduler"].bind_gpu_block_pool(self._pool())

    def _get_mem_pool_context(self, _call: Call) -> None:
        self._memory = self.sides["worker"].get_mem_pool_context()

    def _register_kv_caches(self, call: Call) -> None:
        """Memory as it was laid out: a storage for each that there was, and views into it."""
        import torch

        lengths: dict[int, int] = {}
        for said in call.given.values():
            last = said["offset"] + sum((size - 1) * step for size, step in zip(said["shape"], said["stride"]))
            lengths[said["storage"]] = max(lengths.get(said["storage"], 0), (last + 1) * getattr(torch, said["dtype"]).itemsize)
        with getattr(self, "_memory", None) or contextlib.nullcontext():
            storages = {number: torch.zeros(length, dtype=torch.int8) for number, length in lengths.items()}
        for name, said in call.given.items():
            typed = storages[said["storage"]].view(getattr(torch, said["dtype"]))
            self.caches[name] = typed.as_strided(said["shape"], said["stride"], said["offset"])
        self.sides["worker"].register_kv_caches(self.caches)

    def _set_host_xfer_buffer_ops(self, _call: Call) -> None:
        self.sides["worker"].set_host_xfer_buffer_ops(lambda *_: None)

    def _get_handshake_metadata(self, _call: Call) -> None:
        self._handshake = self.sides["worker"].get_handshake_metadata()

    def _set_xfer_handshake_metadata_pp_aware(self, _call: Call) -> None:
        self.sides["scheduler"].set_xfer_handshake_metadata_pp_aware({(0, 0): self._handshake} if self._handshake is not None else {})

    # The scheduler's side.

    def _on_new_request(self, call: Call) -> None:
        said = call.given
        params = said["params"] if self._params is None else self._params.get(said["id"])
        self.requests[said["id"]] = engine.Request(said["id"], said["ids"], params, self._said["block"]).update(said)
        self.sides["scheduler"].on_new_request(self.requests[said["id"]])

    def _request(self, said: dict) -> engine.Request:
        return self.requests[said["id"]].update(said)

    def _get_num_new_matched_tokens(self, call: Call) -> None:
        request = self._request(call.given["request"])
        answer = self.sides["scheduler"].get_num_new_matched_tokens(request, call.given["computed"])
        if list(answer) != call.gives:
            raise Differs(f"{request.request_id}: get_num_new_matched_tokens gave {answer}, and in the recording {tuple(call.gives)}")

    def _update_state_after_alloc(self, call: Call) -> None:
        request, external = self._request(call.given["request"]), call.given["external"]
        blocks = modules.KVCacheBlocks(tuple([modules.KVCacheBlock(number) for number in group] for group in call.given["blocks"]))
        self.sides["scheduler"].update_state_after_alloc(request, blocks, external)
        if external and self._asynchronous(request.request_id):
            self._open["recving"].add(request.request_id)

    def _asynchronous(self, name: str) -> bool:
        """Whether the recording answered that the load of this request is asynchronous."""
        matched = [call for call in self._recording.calls() if call.name == "get_num_new_matched_tokens" and call.given["request"]["id"] == name]
        return any(call.gives[0] and call.gives[1] for call in matched)

    def _build_connector_meta(self, call: Call) -> None:
        self._metadata.append(self.sides["scheduler"].build_connector_meta(self._scheduler_output(call.given)))
        self._finished = set(call.given["finished"])

    def _scheduler_output(self, said: dict) -> types.SimpleNamespace:
        tokens, fields = said["tokens"], {"has_sync_kv_loads": said["sync_loads"]} if self._release.loads_after_layers else {}
        new = {
            one["id"]: (tuple(one["blocks"]), one["computed"], tokens[one["id"]], 0, self.requests[one["id"]].prompt_token_ids)
            for one in said["new"]
        }
        cached = {
            one["id"]: (None if one["blocks"] is None else tuple(one["blocks"]), one["computed"], tokens[one["id"]], one["outputs"])
            for one in said["cached"]
        }
        return engine.output(new, cached, said["resumed"], said["preempted"], said["finished"], **fields)

    def _update_connector_output(self, _call: Call) -> None:
        output, self._output = self._output, modules.KVConnectorOutput()
        self.sides["scheduler"].update_connector_output(output)

    def _request_finished(self, call: Call) -> None:
        self._ended(call, self.sides["scheduler"].request_finished, call.given["blocks"])

    def _request_finished_all_groups(self, call: Call) -> None:
        self._ended(call, self.sides["scheduler"].request_finished_all_groups, tuple(call.given["blocks"]))

    def _ended(self, call: Call, ended, blocks) -> None:
        request = self._request(call.given["request"])
        kept, self.returned[request.request_id] = ended(request, blocks)
        if kept != call.gives[0]:
            raise Differs(f"{request.request_id}: its blocks are kept: {kept}, and in the recording: {call.gives[0]}")
        if kept:
            self._open["sending"].add(request.request_id)

    def _has_pending_block_frees(self, _call: Call) -> None:
        self.sides["scheduler"].has_pending_block_frees()

    # The worker's side.

    def _handle_preemptions(self, _call: Call) -> None:
        self.sides["worker"].handle_preemptions(self._metadata[0])

    def _bind_connector_metadata(self, _call: Call) -> None:
        self.sides["worker"].bind_connector_metadata(self._metadata.pop(0))

    def _batch(self, said: dict | None) -> types.SimpleNamespace | None:
        if said is None:
            return None
        slots = Slots(slot for first, count in said["slots"] or () for slot in range(first, first + count))
        return types.SimpleNamespace(num_actual_tokens=said["tokens"], slot_mapping=slots)

    def _start_load_kv(self, _call: Call) -> None:
        layers = {name: types.SimpleNamespace(kv_cache=cache) for name, cache in self.caches.items()}
        context = types.SimpleNamespace(no_compile_layers=layers, attn_metadata=dict(self._batches) or None, slot_mapping={})
        self.sides["worker"].start_load_kv(context)

    def _wait_for_layer_load(self, call: Call) -> None:
        self.sides["worker"].wait_for_layer_load(call.given)

    def _save_kv_layer(self, call: Call) -> None:
        name = call.given["layer"]
        self.sides["worker"].save_kv_layer(name, self.caches[name], self._batches[name])

    def _get_transfer_results(self, call: Call) -> None:
        got = self.sides["worker"].get_transfer_results(set(self._finished))
        self._reported(call, set(got.finished_sending), set(got.finished_recving), set(got.failed_recving))

    def _get_finished(self, call: Call) -> None:
        sent, received = self.sides["worker"].get_finished(set(self._finished))
        self._reported(call, set(sent or ()), set(received or ()), set())

    def _reported(self, call: Call, sent: set[str], received: set[str], failed: set[str]) -> None:
        if not failed <= received:
            raise Differs(f"a failed load must be reported as received, too: {failed - received}")
        recorded = call.gives or [[], [], []]
        for kind, now, then in (("sending", sent, recorded[0]), ("recving", received, recorded[1])):
            if wrong := now - self._open[kind]:
                raise Differs(f"reported as finished {kind}, and not open, or for the second time: {sorted(wrong)}")
            self._open[kind] -= now
            self._due[kind] = (self._due[kind] | set(then)) & self._open[kind]
        self._failed |= failed - self.returned.keys()  # of a request that has ended vLLM looks at nothing but that its load is over
        self._may_fail |= set(recorded[2]) if self._release.has("get_transfer_results") else set()
        self._output.finished_sending, self._output.finished_recving, self._output.failed_recving = sent, received, failed

    def _get_block_ids_with_load_errors(self, _call: Call) -> None:
        self._output.invalid_block_ids = set(self.sides["worker"].get_block_ids_with_load_errors())
