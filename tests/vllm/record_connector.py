"""A KV connector that writes down each call of vLLM's connector interface, as JSON lines, and answers as it is told.

The recordings in recordings/ are its work in a real vLLM (record.py); the stand-in (python/tests/vllm_stand_in) drives connectors by them where
there is no vLLM. One line is one call: {"side": "scheduler" or "worker", "call": name, "with": what it was given, "gives": what it answered}.
Only what a connector may rely on is written: no addresses, times or process ids. Calls that the base class makes itself are not written twice.

--kv-transfer-config: kv_connector_extra_config {"file": path}. How it answers, by request, in kv_transfer_params {"record": {...}}:
    match    tokens that it claims to have beyond those in the local cache: a number of tokens from the prompt's start, "all",
             or "but the last" (as KVLoomConnector answers)
    async    whether they are loaded between steps (true), or within the step (false)
    later    how many times it says "ask again later" first
    steps    how many steps an asynchronous load takes (1)
    fail     "request": the load fails, told by request; "blocks": told by block, the last block of it
    hold     how many steps the request's blocks are kept after its end (absent: not at all)
Nothing is loaded: the tokens of such a request are nobody's text.
"""

import dataclasses
import json

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA


@dataclasses.dataclass
class Orders(KVConnectorMetadata):
    """What the scheduler's side tells the worker's in a step: loads that begin, sends that begin. Request -> (steps, failure, last block)."""

    loads: dict[str, tuple[int, str, int]] = dataclasses.field(default_factory=dict)
    holds: dict[str, int] = dataclasses.field(default_factory=dict)


def request_of(request) -> dict:
    """What a connector can see of a request."""
    return {
        "id": request.request_id, "tokens": request.num_tokens, "prompt": request.num_prompt_tokens, "computed": request.num_computed_tokens,
        "outputs": request.num_output_tokens, "status": request.status.name, "hashes": len(request.block_hashes),
        "preemptions": request.num_preemptions, "params": request.kv_transfer_params,
    }  # fmt: skip


def scheduled(output) -> dict:
    """A SchedulerOutput, as far as connectors read it."""
    cached = output.scheduled_cached_reqs
    return {
        "new": [
            {"id": new.req_id, "blocks": list(new.block_ids), "computed": new.num_computed_tokens, "prompt": len(new.prompt_token_ids)}
            for new in output.scheduled_new_reqs
        ],
        "cached": [
            {"id": name, "blocks": None if blocks is None else list(blocks), "computed": computed, "outputs": outputs}
            for name, blocks, computed, outputs in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens
            )
        ],
        "resumed": sorted(cached.resumed_req_ids),
        "tokens": output.num_scheduled_tokens,
        "finished": sorted(output.finished_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "sync_loads": getattr(output, "has_sync_kv_loads", None),
    }


def runs(slots) -> list[list[int]]:
    """Slots as [first, count] of ascending runs."""
    found: list[list[int]] = []
    for slot in slots.tolist():
        if found and slot == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([slot, 1])
    return found


def batch_of(metadata) -> dict | None:
    """Attention metadata of one layer: how many tokens, and the slots that they were written to."""
    if metadata is None:
        return None
    slots = getattr(metadata, "slot_mapping", None)
    count = getattr(metadata, "num_actual_tokens", None)
    return {"tokens": count, "slots": runs(slots[:count]) if slots is not None else None}


def tensors_of(caches: dict) -> dict:
    """Registered caches; `storage` numbers the allocations, as several layers may lie in one."""
    known: dict[int, int] = {}
    return {
        name: {
            "shape": list(cache.shape), "stride": list(cache.stride()), "dtype": str(cache.dtype).removeprefix("torch."),
            "offset": cache.storage_offset(), "storage": known.setdefault(cache.untyped_storage().data_ptr(), len(known)),
        }
        for name, cache in caches.items()
    }  # fmt: skip


def config_of(vllm_config, kv_cache_config) -> dict:
    """What the engine was set up with."""
    cache, parallel, scheduler = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.scheduler_config
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        fields = {
            name: str(value).removeprefix("torch.") if name == "dtype" else value
            for name in ("block_size", "num_kv_heads", "head_size", "dtype", "sliding_window")
            if (value := getattr(spec, name, None)) is not None
        }
        groups.append({"layers": list(group.layer_names), "spec": type(spec).__name__, **fields})
    transfer = vllm_config.kv_transfer_config
    return {
        "block": cache.block_size, "blocks": kv_cache_config.num_blocks, "groups": groups, "prefix_caching": cache.enable_prefix_caching,
        "tensors": [dataclasses.asdict(one) for one in kv_cache_config.kv_cache_tensors],
        "tp": parallel.tensor_parallel_size, "pp": parallel.pipeline_parallel_size, "chunk": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling), "kv_role": transfer.kv_role,
        "load_failure": getattr(transfer, "kv_load_failure_policy", None),
    }  # fmt: skip


class RecordConnector(KVConnectorBase_V1, SupportsHMA):
    """One side of it; both sides append to one file, line by line."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self._side = "scheduler" if role == KVConnectorRole.SCHEDULER else "worker"
        self._file = open(self._kv_transfer_config.kv_connector_extra_config["file"], "a", buffering=1)  # noqa: SIM115 lives as long as vLLM
        self._asked: dict[str, int] = {}
        self._orders = Orders()
        self._loading: dict[str, tuple[int, str, int]] = {}
        self._holding: dict[str, int] = {}
        self._failed_blocks: set[int] = set()
        self._loaded: set[str] = set()
        self._write("__init__", config_of(vllm_config, kv_cache_config))

    def _write(self, call: str, given=None, gives=None) -> None:
        line = {"side": self._side, "call": call, "with": given, "gives": gives}
        self._file.write(json.dumps({name: value for name, value in line.items() if value is not None}, default=str) + "\n")

    @staticmethod
    def _told(request) -> dict:
        return (request.kv_transfer_params or {}).get("record", {})

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager):
        self._kv_cache_manager = kv_cache_manager
        self._write("bind_kv_cache_manager")

    def bind_gpu_block_pool(self, gpu_block_pool):
        self._write("bind_gpu_block_pool")

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        self._write("set_xfer_handshake_metadata_pp_aware", [list(place) for place in metadata])

    def set_xfer_handshake_metadata(self, metadata):
        self._write("set_xfer_handshake_metadata", list(metadata))

    def on_new_request(self, request):
        self._write("on_new_request", {**request_of(request), "ids": list(request.prompt_token_ids)})

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        told = self._told(request)
        words = {"all": request.num_prompt_tokens, "but the last": request.num_prompt_tokens - 1}
        match = words.get(told.get("match"), told.get("match", 0))
        asked = self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        gives: tuple = (0, False)
        if asked <= told.get("later", 0):
            gives = (None, False)
        elif match > num_computed_tokens and request.request_id not in self._loaded:
            gives = (match - num_computed_tokens, bool(told.get("async")))
        self._write("get_num_new_matched_tokens", {"request": request_of(request), "computed": num_computed_tokens}, list(gives))
        return gives

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        told, ids = self._told(request), blocks.get_block_ids()
        given = {"request": request_of(request), "blocks": list(ids), "external": num_external_tokens}
        self._write("update_state_after_alloc", given)
        if num_external_tokens:
            self._loaded.add(request.request_id)
            if told.get("async"):
                self._orders.loads[request.request_id] = (told.get("steps", 1), told.get("fail", ""), ids[0][-1])

    def build_connector_meta(self, scheduler_output):
        self._write("build_connector_meta", scheduled(scheduler_output))
        orders, self._orders = self._orders, Orders()
        return orders

    def update_connector_output(self, connector_output):
        names = ("finished_sending", "finished_recving", "failed_recving", "invalid_block_ids")
        given = {name: sorted(value) for name in names if (value := getattr(connector_output, name, None))}
        self._write("update_connector_output", given)

    def _finished(self, call: str, request, block_ids):
        hold = self._told(request).get("hold")
        if hold is not None:
            self._orders.holds[request.request_id] = hold
        params = {"record": {"was": request.request_id}}
        self._write(call, {"request": request_of(request), "blocks": list(block_ids)}, [hold is not None, params])
        return hold is not None, params

    def request_finished(self, request, block_ids):
        return self._finished("request_finished", request, block_ids)

    def request_finished_all_groups(self, request, block_ids):
        return self._finished("request_finished_all_groups", request, block_ids)

    def take_events(self):
        self._write("take_events")
        return ()

    def has_pending_block_frees(self):
        self._write("has_pending_block_frees", gives=False)
        return False

    # The worker's side.

    def register_kv_caches(self, kv_caches):
        self._write("register_kv_caches", tensors_of(kv_caches))

    def set_host_xfer_buffer_ops(self, copy_operation):
        self._write("set_host_xfer_buffer_ops")

    def get_handshake_metadata(self):
        self._write("get_handshake_metadata")
        return None

    def get_mem_pool_context(self):
        self._write("get_mem_pool_context")
        return None

    def handle_preemptions(self, kv_connector_metadata):
        self._write("handle_preemptions")

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self._loading |= connector_metadata.loads
        self._holding |= connector_metadata.holds
        self._write("bind_connector_metadata")

    def clear_connector_metadata(self):
        super().clear_connector_metadata()
        self._write("clear_connector_metadata")

    def start_load_kv(self, forward_context, **kwargs):
        metadata = forward_context.attn_metadata
        self._write("start_load_kv", {"layers": sorted(metadata) if isinstance(metadata, dict) else None})

    def wait_for_layer_load(self, layer_name):
        self._write("wait_for_layer_load", layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self._write("save_kv_layer", {"layer": layer_name, "shape": list(kv_layer.shape), "batch": batch_of(attn_metadata)})

    def finish_forward(self):
        self._write("finish_forward")

    def wait_for_save(self):
        self._write("wait_for_save")

    def _results(self) -> tuple[set[str], set[str], set[str]]:
        """Sends and loads that end in this step, and which loads failed."""
        received, failed = set(), set()
        for name, (steps, fail, block) in list(self._loading.items()):
            self._loading[name] = (steps - 1, fail, block)
            if steps <= 1:
                del self._loading[name]
                received.add(name)
                failed |= {name} if fail == "request" else set()
                self._failed_blocks |= {block} if fail == "blocks" else set()
        sent = {name for name, steps in self._holding.items() if steps <= 1}
        self._holding = {name: steps - 1 for name, steps in self._holding.items() if name not in sent}
        return sent, received, failed

    def get_finished(self, finished_req_ids):
        sent, received, _ = self._results()
        self._write("get_finished", sorted(finished_req_ids), [sorted(sent), sorted(received)])
        return sent, received

    def get_transfer_results(self, finished_req_ids):
        sent, received, failed = self._results()
        self._write("get_transfer_results", sorted(finished_req_ids), [sorted(sent), sorted(received), sorted(failed)])
        return base.KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self):
        blocks, self._failed_blocks = self._failed_blocks, set()
        self._write("get_block_ids_with_load_errors", gives=sorted(blocks))
        return blocks

    def get_kv_connector_stats(self):
        self._write("get_kv_connector_stats")
        return None

    def get_kv_connector_kv_cache_events(self):
        self._write("get_kv_connector_kv_cache_events")
        return None

    def build_connector_worker_meta(self):
        self._write("build_connector_worker_meta")
        return None

    def shutdown(self):
        self._write("shutdown")
