"""Sliding windows in the scheduler's half, without vLLM: which blocks prefill holds, and which decode must not leave in vLLM's prefix cache."""

from __future__ import annotations

import pytest
from vllm_stand_in import installed
from vllm_stand_in.engine import Pool, Request, output

with installed():
    from kvloom.vllm.scheduler_side import SchedulerSide

pytestmark = pytest.mark.usefixtures("stand_in")

TO_PREFILL = {"kvloom": {"role": "prefill", "transfer": "key", "seconds": 30}}
TO_DECODE = {"kvloom": {"role": "decode", "transfer": "key", "seconds": 30, "prefill": ["tcp://127.0.0.1:1"]}}


def test_a_windows_last_blocks_are_held():
    """Window of 32 in blocks of 16, prompt 96: decode wants tokens from 64 on, vLLM frees block 4 (64 to 79) as soon as token 95 is there."""
    side = SchedulerSide(prefills=True, decodes=False, groups=2, windows={1: (32, 16)})
    pool = Pool(20)
    side.bind_pool(pool)
    side.know(request := Request("a", 96, TO_PREFILL))
    side.build(output(new={"a": (([1, 2, 3, 4, 5, 6], [0, 0, 7, 8, 9, 11]), 0, 96)}))
    assert pool.held == [9, 11]
    side.finished(request)
    side.sent({"a"})
    assert pool.held == []


TABLES = ([1, 2, 3, 4, 5], [0, 0, 6, 7, 8])  # of 75 tokens in blocks of 16: full, and a window of 32, of which tokens from 43 on are loaded


def loading(sync: bool = False, local: int = 0) -> tuple[SchedulerSide, Pool, Request]:
    """A request of 75 tokens whose load has begun."""
    side, pool, request = SchedulerSide(False, True, 2, {1: (32, 16)}, sync), Pool(20), Request("a", 75, TO_DECODE)
    side.bind_pool(pool)
    side.matched(request, local)
    if sync:  # vLLM caches what it allocates at once
        pool.cache(1, 2, 3, 4, 6, 7)
    side.allocated(request, TABLES, 74 - local)
    side.build(output())
    return side, pool, request


def test_a_block_that_a_window_loaded_in_part_is_withdrawn_as_its_request_goes_on():
    side, pool, request = loading()
    side.landed({"a"})
    pool.cache(1, 2, 3, 4, 6, 7)
    side.allocated(request, TABLES, 0)
    assert pool.cached() == [1, 2, 3, 4, 7]
    pool.cache(6)  # another's, later
    side.allocated(request, TABLES, 0)
    assert side.matched(Request("b", 75), 64) == (0, False) and 6 in pool.cached()


def test_a_block_loaded_layer_by_layer_is_withdrawn_at_once():
    _, pool, _ = loading(sync=True)
    assert pool.cached() == [1, 2, 3, 4, 7]


def test_who_found_a_block_that_is_withdrawn_looks_again():
    """vLLM caches it, and the request does not go on in the same step."""
    side, pool, _ = loading()
    side.landed({"a"})
    pool.cache(1, 2, 3, 4, 6, 7)
    other = Request("b", 75, TO_DECODE)
    assert side.matched(other, 64) == (None, False) and pool.cached() == [1, 2, 3, 4, 7]
    assert side.matched(other, 0) == (74, True)


def test_a_window_that_is_loaded_in_whole_blocks_stays():
    side, pool, request = loading(local=48)
    side.landed({"a"})
    pool.cache(1, 2, 3, 4, 6, 7)
    side.allocated(request, TABLES, 0)
    assert pool.cached() == [1, 2, 3, 4, 6, 7]


def test_who_computes_after_a_failed_load_withdraws_nothing():
    """Its blocks were freed, and may be another's by now."""
    side, pool, request = loading()
    side.landed({"a"})
    pool.cache(6)
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, ([9], [10]), 0)
    assert pool.cached() == [6]
