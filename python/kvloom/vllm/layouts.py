"""vLLM's KV cache in kvloom's words: from configuration, cache groups and the registered tensors to a Side and the place of each tensor.

Law: nothing is assumed of a tensor's bytes. Strides are read from the tensor; what lies inside a page is known by the attention back end's name
or refused. Both sides must come to the same groups and layer ids from the same model, whatever their sharding, so names are made of what the
model says alone: kind, window, first layer.

| registered tensor                                   | back end                    | layout                                         |
|-----------------------------------------------------|-----------------------------|------------------------------------------------|
| [blocks, heads, tokens, K and V]                    | all of 0.29 and later       | strides as they are                            |
| the same, on the CPU                                | CPU_ATTN, isa vec, vec16    | K as [content, tokens], then V, in each head   |
| the same, on the CPU                                | CPU_ATTN, isa amx, neon, .. | packed by blocks: moved whole, block to block  |
| [blocks, 1, tokens, latent], [blocks, tokens, latent] | MLA                       | strides as they are                            |
| [2, blocks, tokens, heads, content], [blocks, 2, ...] | 0.24 to 0.28              | K and V planes, strides as they are            |

Packed pages: tokens are interleaved with content (AMX keeps V's in pairs), so only whole blocks of a head are moved, and what is inside is
nobody's business. The planes' names say the order and the block's tokens: sides that differ in either are refused when they meet.

Sources: vllm/v1/worker/utils.py (allocate_kv_cache), csrc/cpu/cpu_attn_vec.hpp and cpu_attn_vec16.hpp (K is kept transposed), cpu_attn_amx.hpp,
vllm/v1/kv_cache_interface.py. Strides of torch in elements, ours in bytes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import kvloom
from kvloom.vllm.params import refuse

if TYPE_CHECKING:
    import torch

TRANSPOSED_K = ("vec", "vec16")
NULL_BLOCK = 0  # vLLM's, in every group
NO_NAME = re.compile(r"[^a-z0-9]+")  # what a group's name has none of
LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclasses.dataclass(frozen=True)
class Cache:
    """One layer's cache, as kvloom names it."""

    name: str
    """vLLM's: model.layers.0.self_attn.attn."""
    layer: int
    """kvloom's layer id."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Caches of one kind and one block table."""

    name: str
    table: int
    """Index of vLLM's KV cache group, whose block table it is."""
    caches: tuple[Cache, ...]
    block_tokens: int
    """Of a block of the scheduler's."""
    shape: kvloom.CacheGroup
    isa: str = ""
    """Of CPU_ATTN: how it keeps K and V in a page; else empty."""

    @property
    def packed(self) -> bool:
        """Only whole blocks may be moved."""
        return bool(self.isa) and self.isa not in TRANSPOSED_K


@dataclasses.dataclass(frozen=True)
class Placed:
    """A rank's memory under its side."""

    side: kvloom.Side
    rank: int
    groups: tuple[Group, ...]
    ratio: dict[str, int]
    """By group: pages in a block of the scheduler's."""
    pool: dict[str, int]
    """By group: pages of the pool."""

    @property
    def whole(self) -> int:
        """Tokens that are moved together: 1, or those of a block where some group's pages are packed."""
        return max((group.block_tokens for group in self.groups if group.packed), default=1)

    def up(self, tokens: int) -> int:
        return -(-tokens // self.whole) * self.whole

    def down(self, tokens: int) -> int:
        return tokens // self.whole * self.whole

    def table(self, group: Group, tables: Sequence[Sequence[int]], tokens: int) -> kvloom.CacheTable:
        """The page table for a request's first `tokens` tokens, from vLLM's block ids."""
        ratio = self.ratio[group.name]
        pages: list[int] = []
        for block in tables[group.table]:
            pages += [-1] * ratio if block == NULL_BLOCK else range(block * ratio, (block + 1) * ratio)
        return kvloom.CacheTable(pages[: self.side.columns(group.name, self.rank, tokens)], self.pool[group.name])


# ---- which caches there are ----


def kinds_of(spec: Any) -> set[str]:
    """Names of a spec's classes: what it is, whichever of vLLM's modules defines them."""
    return {cls.__name__ for cls in type(spec).__mro__}


def specs_of(group: Any) -> Iterable[tuple[str, Any]]:
    """(layer name, its own spec) of a KV cache group."""
    together = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, (together[name] if together else group.kv_cache_spec)


def is_latent(spec: Any) -> bool:
    return any("MLA" in kind for kind in kinds_of(spec))


def window_of(spec: Any) -> kvloom.Window | None:
    """Of the tokens that a layer reads when the next one comes, which it has itself: one less than vLLM's window, which counts it."""
    kinds = kinds_of(spec)
    if "ChunkedLocalAttentionSpec" in kinds:
        return kvloom.Window(kvloom.Window.Kind.chunked, spec.attention_chunk_size)
    if "SlidingWindowSpec" in kinds:
        return kvloom.Window(kvloom.Window.Kind.sliding, max(1, spec.sliding_window - 1))
    return None


def layer_number(name: str) -> int:
    found = LAYER_NUMBER.findall(name)
    return int(found[0]) if found else 0


def check_kind(name: str, spec: Any) -> None:
    """@error Unsupported: kinds whose bytes are not a row a token."""
    kinds = kinds_of(spec)
    if "AttentionSpec" not in kinds or kinds & {"CrossAttentionSpec", "EncoderOnlyAttentionSpec", "CircularBufferSpec", "HiddenStateCacheSpec"}:
        raise kvloom.Unsupported(
            f"layer {name} has a cache of the kind {type(spec).__name__}: kvloom moves attention caches, GQA and MLA, with and without windows",
            kvloom.Code.unsupported,
            kvloom.Scope.process,
        )


def total_heads(spec: Any, held: int, config: Any) -> int:
    """KV heads of the whole model for a layer of which this rank holds `held`. @error InvalidArgument: they can't be told."""
    if is_latent(spec):
        return 1
    tp = config.parallel_config.tensor_parallel_size
    shards = getattr(spec, "max_tp_shards", None)
    if shards is not None:
        return held * min(tp, int(shards))
    total = int(config.model_config.get_total_num_kv_heads())
    if max(1, total // tp) != held:
        refuse(f"a rank holds {held} KV heads of a layer, of {total} over tp={tp}: kvloom can't tell which")
    return total


def name_group(spec: Any, layers: Sequence[int], model: str) -> str:
    """kvloom compares groups by name, and not models: so the name says of which model it is, too, in words that a refusal can show."""
    kind = "latent" if is_latent(spec) else "kv"
    window = window_of(spec)
    return f"{kind}{f'_w{window.tokens}' if window else ''}_l{layers[0]}_of_{NO_NAME.sub('_', model.lower())}"


def layer_ids(names: Iterable[str]) -> dict[str, int]:
    """An id for each cache: its layer's number where no two share one, else its place among all, drafts last."""
    ordered = sorted(names, key=lambda name: ("draft" in name or "mtp" in name, layer_number(name), name))
    numbers = [layer_number(name) for name in ordered]
    if len(set(numbers)) == len(numbers):
        return dict(zip(ordered, numbers, strict=True))
    return {name: place for place, name in enumerate(ordered)}


# ---- where their bytes lie ----


def content(spec: Any, tensor: torch.Tensor, mark: str) -> list[kvloom.PlaneShape]:
    """What a token's row is made of. `mark`: of packed pages, behind the planes' names. @error Unsupported: bytes that are neither K nor V."""
    item, wide = tensor.element_size(), tensor.shape[-1]
    if is_latent(spec):
        return [kvloom.PlaneShape("latent", wide * item, item)]
    keys, values = spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size
    if tensor.ndim == 5:
        keys = values = wide
    elif wide != keys + values:
        raise kvloom.Unsupported(
            f"a cache row of {wide} elements, where K has {keys} and V {values}: scales beside them are not known here",
            kvloom.Code.unsupported, kvloom.Scope.process,
        )  # fmt: skip
    return [kvloom.PlaneShape("k" + mark, keys * item, item), kvloom.PlaneShape("v" + mark, values * item, item)]


def in_heads(shape: kvloom.CacheGroup, tensor: torch.Tensor, is_packed: bool) -> kvloom.PageLayout:
    """CPU_ATTN: in each (block, head) K, as [content, tokens] unless packed, then V, as [tokens, content]."""
    _, heads, tokens, wide = tensor.shape
    item = tensor.element_size()
    if tensor.stride(3) != 1 or tensor.stride(2) != wide:
        refuse(f"a CPU cache with strides {tensor.stride()}: the tokens of a head must lie together")
    keys, values = shape.planes
    head = tensor.stride(1) * item
    token, step = (keys.bytes, 0) if is_packed else (item, tokens * item)
    return kvloom.PageLayout.planes(heads, tokens, tensor.stride(0) * item, [
        kvloom.PlaneLayout(keys.name, 0, token, head, keys.bytes, step, item),
        kvloom.PlaneLayout(values.name, tokens * keys.bytes, values.bytes, head, values.bytes, 0, item),
    ])  # fmt: skip


def apart(shape: kvloom.CacheGroup, tensor: torch.Tensor, blocks: int) -> kvloom.PageLayout:
    """0.24 to 0.28 on GPUs: K and V along an axis of their own, [2, blocks, tokens, heads, content] or [blocks, 2, ...]."""
    item, axis = tensor.element_size(), split_axis(tensor, blocks)
    block, token, head = (tensor.stride(at) * item for at in (1 - axis, 2, 3))
    keys, values = shape.planes
    return kvloom.PageLayout.planes(tensor.shape[3], tensor.shape[2], block, [
        kvloom.PlaneLayout(keys.name, 0, token, head, keys.bytes, 0, item),
        kvloom.PlaneLayout(values.name, tensor.stride(axis) * item, token, head, values.bytes, 0, item),
    ])  # fmt: skip


def split_axis(tensor: torch.Tensor, blocks: int) -> int:
    """Which axis has K and V. @error InvalidArgument."""
    for axis in (0, 1):
        if tensor.shape[axis] == 2 and tensor.shape[1 - axis] % blocks == 0:
            return axis
    refuse(f"a cache of shape {tuple(tensor.shape)} with {blocks} blocks: wanted K and V along the first or second axis")


def page_layout(group: Group, tensor: torch.Tensor, blocks: int) -> kvloom.PageLayout:
    shape, item = group.shape, tensor.element_size()
    if tensor.ndim == 5:
        return apart(shape, tensor, blocks)
    if group.isa:
        return in_heads(shape, tensor, group.packed)
    if tensor.ndim == 3:
        block, token, step = (stride * item for stride in tensor.stride())
        return kvloom.PageLayout.strided(shape, 1, tensor.shape[1], block, tensor.shape[1] * token, token, step)
    block, head, token, step = (stride * item for stride in tensor.stride())
    return kvloom.PageLayout.strided(shape, tensor.shape[1], tensor.shape[2], block, head, token, step)


def extent(layout: kvloom.PageLayout, pages: int) -> int:
    """Bytes from a tensor's first to its last."""
    last = 0
    for plane in layout.plane_layouts:
        elements = plane.bytes // plane.element_bytes
        inside = (elements - 1) * plane.content_stride + plane.element_bytes if plane.content_stride else plane.bytes
        last = max(last, plane.offset + (layout.page_tokens - 1) * plane.token_stride + (layout.heads - 1) * plane.head_stride + inside)
    return (pages - 1) * layout.page_stride + last


# ---- together ----


def held_heads(spec: Any, tensor: torch.Tensor) -> int:
    if is_latent(spec):
        return 1
    if tensor.ndim == 5:
        return tensor.shape[3]
    return tensor.shape[1]


def find_groups(config: Any, cache_config: Any, tensors: dict[str, torch.Tensor]) -> tuple[Group, ...]:
    """Caches by block table and kind. @error InvalidArgument, Unsupported."""
    own = {name for group in cache_config.kv_cache_groups for name in group.layer_names if name in tensors}
    ids = layer_ids(own)
    groups: list[Group] = []
    for table, group in enumerate(cache_config.kv_cache_groups):
        alike: dict[tuple[Any, ...], list[tuple[Cache, Any]]] = {}
        for name, spec in specs_of(group):
            if name not in tensors:
                continue
            check_kind(name, spec)
            tensor, window = tensors[name], window_of(spec)
            kind = (is_latent(spec), window and (str(window.kind), window.tokens), held_heads(spec, tensor), tensor.dtype, tuple(tensor.shape[1:]))
            alike.setdefault((*kind, spec.block_size), []).append((Cache(name, ids[name]), spec))
        for found in alike.values():
            groups.append(make_group(config, table, sorted(found, key=lambda pair: pair[0].layer), tensors))
    return tuple(groups)


def make_group(config: Any, table: int, found: list[tuple[Cache, Any]], tensors: dict[str, torch.Tensor]) -> Group:
    caches, spec = tuple(cache for cache, _ in found), found[0][1]
    tensor = tensors[caches[0].name]
    layers = [cache.layer for cache in caches]
    if config.parallel_config.pipeline_parallel_size > 1:
        layers = list(range(config.model_config.get_total_num_hidden_layers()))
    name = name_group(spec, layers, model_name(config, tensors))
    heads = total_heads(spec, held_heads(spec, tensor), config)
    isa = isa_of(config, caches[0].name, spec, tensor)
    mark = f"_{isa}{spec.block_size}" if isa and isa not in TRANSPOSED_K else ""
    shape = kvloom.CacheGroup(name, layers, heads, content(spec, tensor, mark), window=window_of(spec))
    return Group(name, table, caches, spec.block_size, shape, isa)


def sharding_words(config: Any, page: int) -> str:
    """@error Unsupported: prefill context parallel."""
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    dcp = getattr(parallel, "decode_context_parallel_size", 1) or 1
    pcp = getattr(parallel, "prefill_context_parallel_size", 1) or 1
    words = [f"tp={tp}"]
    if dcp > 1:
        stripe = getattr(parallel, "cp_kv_cache_interleave_size", None) or getattr(parallel, "dcp_kv_cache_interleave_size", 1)
        words.append(f"dcp={dcp}:stripe={stripe}")
    if pcp > 1:
        words.append(f"cp={pcp}:replicated")
    if pp > 1:
        words.append(f"pp={pp}:{','.join(str(layers) for layers in stage_layers(config, pp))}")
    return ",".join([*words, f"page={page}"])


def stage_layers(config: Any, stages: int) -> list[int]:
    """Layers of each pipeline stage, as vLLM cuts them."""
    from vllm.distributed.utils import get_pp_indices

    total = config.model_config.get_total_num_hidden_layers()
    return [end - begin for begin, end in (get_pp_indices(total, stage, stages) for stage in range(stages))]


def model_name(config: Any, tensors: dict[str, torch.Tensor]) -> str:
    """Of the model, as far as its configuration tells: sides of two models must not meet."""
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    whole = config.model_config.hf_config
    text = getattr(config.model_config, "hf_text_config", None) or whole
    sizes = [str(getattr(text, size, 0)) for size in ("hidden_size", "num_hidden_layers", "vocab_size")]
    return "-".join([*(getattr(whole, "architectures", None) or ["model"]), *sizes, *kinds])


def isa_of(config: Any, name: str, spec: Any, tensor: torch.Tensor) -> str:
    """By which instruction set CPU_ATTN packs pages: as the layer says, else as the back end would choose. Empty: it is not CPU_ATTN.
    @error Unsupported: a CPU's cache that is not known."""
    if tensor.device.type != "cpu" or is_latent(spec):
        return ""
    if isa := getattr(config.compilation_config.static_forward_context.get(name), "isa", None):
        return str(isa)
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        _get_attn_isa = None
    if _get_attn_isa is None or tensor.ndim != 4:
        raise kvloom.Unsupported(
            f"layer {name}: how this vLLM keeps K and V in a page on the CPU is not known; 0.32 is",
            kvloom.Code.unsupported, kvloom.Scope.process,
        )  # fmt: skip
    return str(_get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size))


def place(config: Any, cache_config: Any, tensors: dict[str, torch.Tensor], rank: int) -> Placed:
    """@error InvalidArgument, Unsupported: what can't be moved, and why."""
    groups = find_groups(config, cache_config, tensors)
    if not groups:
        refuse("no KV cache was registered: a model without attention caches has nothing to move")
    if config.parallel_config.pipeline_parallel_size > 1 and len(groups) > 1:
        refuse("pipeline parallel with more than one kind of cache: stages can't tell each other's layers")
    dcp = getattr(config.parallel_config, "decode_context_parallel_size", 1) or 1
    layers = 1 + max(layer for group in groups for layer in group.shape.layers)
    shape = kvloom.CacheShape(model_name(config, tensors), layers, [group.shape for group in groups])
    side = kvloom.Side(shape, sharding_words(config, groups[0].block_tokens), groups[0].block_tokens)
    ratio, pool = {}, {}
    for group in groups:
        tensor = tensors[group.caches[0].name]
        blocks = cache_config.num_blocks
        pages = tensor.shape[1 - split_axis(tensor, blocks)] if tensor.ndim == 5 else tensor.shape[0]
        layout = page_layout(group, tensor, blocks)
        side = side.with_layout(group.name, layout)
        ratio[group.name], rest = divmod(group.block_tokens, layout.page_tokens)
        pool[group.name] = pages
        if rest or (dcp > 1 and ratio[group.name] != 1):
            refuse(f"group {group.name}: blocks of {group.block_tokens} tokens in pages of {layout.page_tokens}, dcp={dcp}")
        if group.packed and (ratio[group.name] != 1 or dcp > 1):
            refuse(f"group {group.name}: the CPU packs blocks of {group.block_tokens} tokens, and pages have {layout.page_tokens}, dcp={dcp}")
    return Placed(side, rank, groups, ratio, pool)
