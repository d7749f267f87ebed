"""vLLM's caches in kvloom's words, from tensors' shapes and strides: every layout that docs/vllm.md names, and what is refused."""

from __future__ import annotations

import fake_vllm
import numpy as np
import pytest
from fake_vllm import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec, Tensor, name_of, plain

import kvloom

fake_vllm.install()

from kvloom.vllm.layouts import extent, layer_ids, place, window_of  # noqa: E402


def cpu_tensor(blocks: int, heads: int, tokens: int, wide: int) -> Tensor:
    return Tensor(np.zeros((blocks, heads, tokens, wide), np.float32))


def test_a_cpus_pages_have_k_transposed():
    tensors = {name_of(n): cpu_tensor(8, 4, 32, 16) for n in range(2)}
    placed = place(fake_vllm.config(4, 2), fake_vllm.cache_config(plain(2, 32), 8), tensors, 0)
    (group,) = placed.side.groups
    assert group.layout == kvloom.PageLayout.make("cpu", placed.groups[0].shape, 4, 32)
    assert extent(group.layout, 8) == tensors[name_of(0)].array.nbytes
    assert placed.table(placed.groups[0], [[0, 3, 5]], 70).pages == [-1, 3, 5]


def test_packed_pages_move_whole_and_meet_their_like_alone():
    made = {}
    for isa, block in (("amx", 32), ("amx", 64), ("vec", 32)):
        tensors = {name_of(0): cpu_tensor(8, 4, block, 16)}
        made[isa, block] = place(fake_vllm.config(4, 1, isa), fake_vllm.cache_config(plain(1, block), 8), tensors, 0)
    packed = made["amx", 32]
    assert (packed.whole, packed.up(33), packed.down(33), made["vec", 32].up(33)) == (32, 64, 32, 33)
    kvloom.compile(packed.side, packed.side)
    for other in (made["amx", 64], made["vec", 32]):
        with pytest.raises(kvloom.Error):
            kvloom.compile(packed.side, other.side)


def test_gpu_pages_are_strided_as_the_tensor_is():
    heads_first = Tensor(np.zeros((8, 4, 16, 16), np.float16), "cuda")
    tokens_first = Tensor(np.zeros((8, 16, 4, 16), np.float16).swapaxes(1, 2), "cuda")
    for tensor, order in ((heads_first, "packed-hnd"), (tokens_first, "packed-nhd")):
        placed = place(fake_vllm.config(4, 1), fake_vllm.cache_config(plain(1, 16), 8), {name_of(0): tensor}, 0)
        assert placed.side.groups[0].layout == kvloom.PageLayout.make(order, placed.groups[0].shape, 4, 16)


def test_old_layouts_with_k_and_v_apart():
    """0.24 on GPUs: [blocks, 2, tokens, heads, content], and [2, blocks, ...]."""
    both = [Tensor(np.zeros((8, 2, 16, 4, 8), np.float16), "cuda"), Tensor(np.zeros((2, 8, 16, 4, 8), np.float16), "cuda")]
    layouts = [place(fake_vllm.config(4, 1), fake_vllm.cache_config(plain(1, 16), 8), {name_of(0): t}, 0).side.groups[0].layout for t in both]
    assert [plane.offset for layout in layouts for plane in layout.plane_layouts] == [0, 16 * 4 * 16, 0, 8 * 16 * 4 * 16]
    assert [layout.page_stride for layout in layouts] == [2 * 16 * 4 * 16, 16 * 4 * 16]
    assert [extent(layout, 8) for layout in layouts] == [t.array.nbytes for t in both]


def test_blocks_of_several_pages():
    placed = place(fake_vllm.config(4, 1), fake_vllm.cache_config(plain(1, 64), 8), {name_of(0): cpu_tensor(16, 4, 32, 16)}, 0)
    assert placed.table(placed.groups[0], [[0, 3]], 100).pages == [-1, -1, 6, 7]
    assert placed.table(placed.groups[0], [[0, 3]], 70).pages == [-1, -1, 6]


def test_latent_rows_are_one_head_on_every_rank():
    tensor = Tensor(np.zeros((8, 1, 16, 576), np.float32))
    spec = [(MLAAttentionSpec(16, head_size=576), [name_of(0)])]
    placed = place(fake_vllm.config(8, 1, tp=2, rank=1), fake_vllm.cache_config(spec, 8), {name_of(0): tensor}, 1)
    (group,) = placed.side.groups
    assert (group.name.split("_of_")[0], group.heads, [plane.name for plane in group.planes], len(group.places)) == ("latent_l0", 1, ["latent"], 2)


def test_windows_have_groups_of_their_own():
    groups = [(FullAttentionSpec(32), [name_of(1)]), (SlidingWindowSpec(32, sliding_window=64), [name_of(0), name_of(2)])]
    tensors = {name_of(n): cpu_tensor(8, 4, 32, 16) for n in range(3)}
    placed = place(fake_vllm.config(4, 3), fake_vllm.cache_config(groups, 8), tensors, 0)
    found = [(group.name.split("_of_")[0], group.table, list(group.shape.layers)) for group in placed.groups]
    assert found == [("kv_l1", 0, [1]), ("kv_w63_l0", 1, [0, 2])]
    assert window_of(groups[1][0]) == kvloom.Window(kvloom.Window.Kind.sliding, 63)


@pytest.mark.parametrize(
    ("spec", "heads", "words"),
    [
        (MambaSpec(16), 4, "a cache of the kind MambaSpec"),
        (FullAttentionSpec(32, head_size=6), 4, "16 elements, where K has 6"),
        (FullAttentionSpec(32), 9, "9 over tp=1"),
    ],
)
def test_what_can_not_be_moved_is_refused(spec, heads, words):
    with pytest.raises(kvloom.Error, match=words):
        place(fake_vllm.config(heads, 1), fake_vllm.cache_config([(spec, [name_of(0)])], 8), {name_of(0): cpu_tensor(8, 4, 32, 16)}, 0)


def test_layers_of_one_number_have_ids_of_their_own():
    assert layer_ids(["model.layers.1.attn", "model.layers.0.attn"]) == {"model.layers.0.attn": 0, "model.layers.1.attn": 1}
    names = ["m.layers.0.attn", "m.layers.0.indexer", "draft.layers.0.attn"]
    assert layer_ids(names) == dict(zip(names, range(3), strict=True))
