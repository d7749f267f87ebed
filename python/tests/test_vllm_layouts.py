"""vLLM's caches in kvloom's words, from tensors' shapes and strides: every layout that docs/vllm.md names, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from vllm_stand_in import installed
from vllm_stand_in.engine import Groups, alike, cache_config, layer_names, tensor_of, vllm_config
from vllm_stand_in.modules import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

import kvloom

with installed():
    from kvloom.vllm.layouts import Placed, extent, layer_ids, place, window_of

pytestmark = pytest.mark.usefixtures("stand_in")
ONE, TWO, THREE = layer_names(3)
BLOCKS = 8


def tensor(*shape: int, dtype: type = np.float32, device: str = "cpu"):
    """Of zeros. A CPU's shape: [blocks, heads, tokens, content]."""
    return tensor_of(np.zeros(shape, dtype), device)


def placed_of(heads: int, groups: Groups, *tensors, **config) -> Placed:
    """What becomes of the layers' tensors, in order; `config`: vllm_config's."""
    named = dict(zip(layer_names(len(tensors)), tensors, strict=True))
    return place(vllm_config(groups, heads, **config), cache_config(groups, BLOCKS), named, config.get("rank", 0))


def test_a_cpus_pages_have_k_transposed():
    cache = tensor(BLOCKS, 4, 32, 16)
    placed = placed_of(4, alike(2, 32), cache, cache)
    (group,) = placed.side.groups
    assert group.layout == kvloom.PageLayout.make("cpu", placed.groups[0].shape, 4, 32)
    assert extent(group.layout, BLOCKS) == cache.untyped_storage().nbytes()
    assert placed.table(placed.groups[0], [[0, 3, 5]], 70).pages == [-1, 3, 5]


def test_packed_pages_move_whole_and_meet_their_like_alone():
    kinds = (("amx", 32), ("amx", 64), ("vec", 32))
    made = {(isa, block): placed_of(4, alike(1, block), tensor(BLOCKS, 4, block, 16), isa=isa) for isa, block in kinds}
    packed = made["amx", 32]
    assert (packed.whole, packed.up(33), packed.down(33), made["vec", 32].up(33)) == (32, 64, 32, 33)
    kvloom.compile(packed.side, packed.side)
    for other in (made["amx", 64], made["vec", 32]):
        with pytest.raises(kvloom.Error):
            kvloom.compile(packed.side, other.side)


def test_gpu_pages_are_strided_as_the_tensor_is():
    heads_first = np.zeros((BLOCKS, 4, 16, 16), np.float16)
    tokens_first = np.zeros((BLOCKS, 16, 4, 16), np.float16).swapaxes(1, 2)
    for array, order in ((heads_first, "packed-hnd"), (tokens_first, "packed-nhd")):
        placed = placed_of(4, alike(1, 16), tensor_of(array, "cuda"))
        assert placed.side.groups[0].layout == kvloom.PageLayout.make(order, placed.groups[0].shape, 4, 16)


def test_old_layouts_with_k_and_v_apart():
    """0.24 on GPUs: [blocks, 2, tokens, heads, content], and [2, blocks, ...]."""
    both = [tensor(*first, 16, 4, 8, dtype=np.float16, device="cuda") for first in ((BLOCKS, 2), (2, BLOCKS))]
    layouts = [placed_of(4, alike(1, 16), t).side.groups[0].layout for t in both]
    assert [plane.offset for layout in layouts for plane in layout.plane_layouts] == [0, 16 * 4 * 16, 0, 8 * 16 * 4 * 16]
    assert [layout.page_stride for layout in layouts] == [2 * 16 * 4 * 16, 16 * 4 * 16]
    assert [extent(layout, BLOCKS) for layout in layouts] == [t.untyped_storage().nbytes() for t in both]


def test_blocks_of_several_pages():
    placed = placed_of(4, alike(1, 64), tensor(2 * BLOCKS, 4, 32, 16))
    assert placed.table(placed.groups[0], [[0, 3]], 100).pages == [-1, -1, 6, 7]
    assert placed.table(placed.groups[0], [[0, 3]], 70).pages == [-1, -1, 6]


def test_latent_rows_are_one_head_on_every_rank():
    placed = placed_of(8, [(MLAAttentionSpec(16, head_size=576), [ONE])], tensor(BLOCKS, 1, 16, 576), tp=2, rank=1)
    (group,) = placed.side.groups
    assert (group.name.split("_of_")[0], group.heads, [plane.name for plane in group.planes], len(group.places)) == ("latent_l0", 1, ["latent"], 2)


def test_windows_have_groups_of_their_own():
    groups = [(FullAttentionSpec(32, head_size=8), [TWO]), (SlidingWindowSpec(32, head_size=8, sliding_window=64), [ONE, THREE])]
    placed = placed_of(4, groups, *[tensor(BLOCKS, 4, 32, 16) for _ in range(3)])
    found = [(group.name.split("_of_")[0], group.table, list(group.shape.layers)) for group in placed.groups]
    assert found == [("kv_l1", 0, [1]), ("kv_w63_l0", 1, [0, 2])]
    assert window_of(groups[1][0]) == kvloom.Window(kvloom.Window.Kind.sliding, 63)


@pytest.mark.parametrize(
    ("spec", "heads", "words"),
    [
        (MambaSpec(16), 4, "a cache of the kind MambaSpec"),
        (FullAttentionSpec(32, head_size=6, head_size_v=8), 4, "16 elements, where K has 6"),
        (FullAttentionSpec(32, head_size=8), 9, "9 over tp=1"),
    ],
)
def test_what_can_not_be_moved_is_refused(spec, heads, words):
    with pytest.raises(kvloom.Error, match=words):
        placed_of(heads, [(spec, [ONE])], tensor(BLOCKS, 4, 32, 16))


def test_layers_of_one_number_have_ids_of_their_own():
    assert layer_ids(["model.layers.1.attn", "model.layers.0.attn"]) == {"model.layers.0.attn": 0, "model.layers.1.attn": 1}
    names = ["m.layers.0.attn", "m.layers.0.indexer", "draft.layers.0.attn"]
    assert layer_ids(names) == dict(zip(names, range(3), strict=True))
