"""What an engine hands to its connector: configurations, caches and their pool, requests, a scheduler's output. As a connector reads them.

The replay (replay.py) makes them of a recording; tests that call the connector's halves in an order of their own make them of a few numbers.
Tokens that nobody gave are zeros, and so are those generated: only their number matters.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import math
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm_stand_in import fake_torch, modules

plain = types.SimpleNamespace
Groups = list[tuple[modules.KVCacheSpec, list[str]]]  # of caches: what kind, and of which layers


# ---- configurations ----


def layer_names(layers: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)]


def alike(layers: int, block: int) -> Groups:
    """One group of small caches. `block`: tokens."""
    return [(modules.FullAttentionSpec(block, head_size=8), layer_names(layers))]


def vllm_config(groups: Groups, heads: int, role: str = "kv_both", extra: dict | None = None, isa: str = "vec", tp: int = 1, pp: int = 1,
                rank: int = 0, dtype: object = "float32", prefix_caching: bool = True, chunk: int = 2048, async_scheduling: bool = False,
                **transfer: Any) -> types.SimpleNamespace:  # fmt: skip
    """`heads`: KV heads of the whole model. `extra`: the connector's own. `transfer`: more of what stands in --kv-transfer-config."""
    names = [name for _, layers in groups for name in layers]
    extra = dict(extra or {})
    told = plain(
        kv_role=role, is_kv_producer=role in ("kv_producer", "kv_both"), is_kv_consumer=role in ("kv_consumer", "kv_both"), engine_id="stand-in",
        kv_connector_extra_config=extra, get_from_extra_config=lambda name, default: extra.get(name, default),
        kv_buffer_device="cpu", kv_ip="127.0.0.1", kv_port=0, **transfer,
    )  # fmt: skip
    text = plain(architectures=["StandIn"], hidden_size=256, num_hidden_layers=len(names))
    model = plain(model="stand-in", dtype=dtype, hf_config=text, hf_text_config=text, max_model_len=2048,
                  get_total_num_kv_heads=lambda: heads, get_total_num_hidden_layers=lambda: len(names))  # fmt: skip
    return plain(
        kv_transfer_config=told, model_config=model, cache_config=plain(block_size=groups[0][0].block_size, enable_prefix_caching=prefix_caching),
        parallel_config=plain(tensor_parallel_size=tp, pipeline_parallel_size=pp, rank=rank, world_size=tp * pp,
                              decode_context_parallel_size=1, prefill_context_parallel_size=1, data_parallel_rank=0),
        scheduler_config=plain(max_num_batched_tokens=chunk, async_scheduling=async_scheduling),
        compilation_config=plain(static_forward_context={name: plain(isa=isa, impl=plain(isa=isa)) for name in names}),
    )  # fmt: skip


def cache_config(groups: Groups, blocks: int, tensors: Iterable[modules.KVCacheTensor] = ()) -> types.SimpleNamespace:
    """`blocks`: in the pool."""
    made = [modules.KVCacheGroupSpec(names, spec) for spec, names in groups]
    return plain(num_blocks=blocks, kv_cache_groups=made, kv_cache_tensors=list(tensors), kv_cache_layout="LBHNC")


# ---- caches ----


def tensor_of(array: np.ndarray, device: str = "cpu") -> Any:
    """A tensor over numpy's memory. Of another device it is one in name, for who looks at shapes and strides alone."""
    if device != "cpu":
        tensor = fake_torch.from_dlpack(array)
        tensor.device = fake_torch.Device(device)
        return tensor
    import torch

    return torch.from_dlpack(array)


def bytes_of(tensor: Any, length: int) -> np.ndarray:
    """uint8 [length], from the tensor's first byte on. @pre the tensor lives as long."""
    return np.frombuffer((ctypes.c_uint8 * length).from_address(tensor.data_ptr()), np.uint8)


def allocate(worker: Any, names: Iterable[str], shape: tuple[int, ...]) -> np.ndarray:
    """The layers' caches, all in one tensor of float32, where the worker's connector wants them; it is told of them. `shape`: of one.
    @pre over a MiB together, as caches are    @return their memory, [layers, *shape]"""
    import torch

    names, each = list(names), math.prod(shape)
    with worker.get_mem_pool_context() or contextlib.nullcontext():
        whole = torch.zeros(len(names) * each, dtype=torch.float32)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    worker.register_kv_caches({name: whole.as_strided(shape, steps, n * each) for n, name in enumerate(names)})
    return bytes_of(whole, len(names) * each * whole.element_size()).view(np.float32).reshape(len(names), *shape)


class Pool:
    """vLLM's BlockPool, as far as a connector may count on it: references of its own, and what is in the prefix cache."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks, self.blocks = blocks, [modules.KVCacheBlock(number) for number in range(blocks)]
        self.held: list[int] = []

    def touch(self, blocks: Iterable[modules.KVCacheBlock]) -> None:
        self.held += [block.block_id for block in blocks]

    def free_blocks(self, ordered_blocks: Iterable[modules.KVCacheBlock]) -> None:
        for block in ordered_blocks:
            self.held.remove(block.block_id)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        for number in block_ids:
            assert self.blocks[number].block_hash is not None, f"block {number} is not in the prefix cache"
            self.blocks[number].block_hash = None

    def cache(self, *block_ids: int) -> None:
        """As vLLM does it, when a block is full."""
        for number in block_ids:
            self.blocks[number].block_hash = b"hash"

    def cached(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.block_hash is not None]


# ---- requests ----


class Request:
    """vLLM's Request, as a connector reads it. `prompt`: its tokens, or how many they are. `block`: tokens of one that is hashed."""

    def __init__(self, request_id: str, prompt: int | list[int], params: dict | None = None, block: int = 16) -> None:
        self.request_id, self.kv_transfer_params, self._block = request_id, params, block
        self.prompt_token_ids = [0] * prompt if isinstance(prompt, int) else list(prompt)
        self.num_prompt_tokens, self.max_tokens, self.arrival_time, self.priority = len(self.prompt_token_ids), 16, 0.0, 0
        self.sampling_params, self.pooling_params, self.lora_request, self.cache_salt = None, None, None, None
        self.mm_features: list = []
        self.block_hashes: list[bytes] = []
        self.update({"computed": 0, "outputs": 0, "preemptions": 0, "tokens": self.num_prompt_tokens, "status": "WAITING", "hashes": 0})

    def update(self, said: dict) -> "Request":
        """To the state of a snapshot (tests/vllm/record_connector.py: request_of)."""
        self.num_computed_tokens, self.num_output_tokens, self.num_preemptions = said["computed"], said["outputs"], said["preemptions"]
        self.num_tokens = said["tokens"]
        self.status = modules.RequestStatus[said["status"]]
        self.all_token_ids = self.prompt_token_ids + [0] * self.num_output_tokens
        self.output_token_ids = self.all_token_ids[self.num_prompt_tokens :]
        for number in range(len(self.block_hashes), said["hashes"]):
            before = self.block_hashes[-1] if self.block_hashes else b""
            tokens = repr(self.all_token_ids[number * self._block : (number + 1) * self._block]).encode()
            self.block_hashes.append(hashlib.sha256(before + tokens).digest())
        return self

    def is_finished(self) -> bool:
        return modules.RequestStatus.is_finished(self.status)


@dataclasses.dataclass
class Part:
    """What a step computes of one request, in tokens. `blocks`: by group, all of a new request; of one that goes on those that are new, or None."""

    blocks: tuple[list[int], ...] | None
    computed: int  # before the step
    scheduled: int  # in it
    outputs: int = 0
    prompt: list[int] = dataclasses.field(default_factory=list)


def output(new: dict[str, tuple] | None = None, cached: dict[str, tuple] | None = None, resumed: Iterable[str] = (), preempted: Iterable[str] = (),
           finished: Iterable[str] = (), **more: Any) -> types.SimpleNamespace:  # fmt: skip
    """A SchedulerOutput. `new`, `cached`: request -> the fields of its Part. `more`: what not all releases have."""
    begun, again = ({name: Part(*said) for name, said in (parts or {}).items()} for parts in (new, cached))
    tokens = {name: part.scheduled for name, part in {**again, **begun}.items()}
    return plain(
        scheduled_new_reqs=[
            plain(req_id=name, prompt_token_ids=part.prompt, block_ids=part.blocks, mm_features=[], num_computed_tokens=part.computed,
                  sampling_params=None, lora_request=None)
            for name, part in begun.items()
        ],
        scheduled_cached_reqs=plain(
            req_ids=list(again), resumed_req_ids=set(resumed), new_token_ids=[], all_token_ids={},
            new_block_ids=[part.blocks for part in again.values()], num_computed_tokens=[part.computed for part in again.values()],
            num_output_tokens=[part.outputs for part in again.values()], num_reqs=len(again),
        ),
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()), preempted_req_ids=set(preempted),
        finished_req_ids=set(finished), scheduled_spec_decode_tokens={}, new_block_ids_to_zero=None, kv_connector_block_state=None, **more,
    )  # fmt: skip
