"""vLLM 0.24 to 0.33: where they differ in what a connector sees, and how each difference is told.

By what vLLM's classes have, where that can be seen; by its version where only its order of calls differs. The connector plans when a step's
metadata is bound, so it is the same to it whether start_load_kv comes before the layers (0.24) or after them (0.32).
"""

from __future__ import annotations

import re

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvloom.vllm.params import refuse

OLDEST, NEWEST = (0, 24), (0, 33)
LAYOUT_NAMES_SINCE = (0, 29)  # LBHNC and its like; before: HND, NHD

HAS_RESULTS = hasattr(base, "KVConnectorTransferResults")
"""Failed loads are reported by request (get_transfer_results); else by block (get_block_ids_with_load_errors)."""
CAN_ALLOCATE = hasattr(base.KVConnectorBase_V1, "get_mem_pool_context")
"""A connector may say in what memory the KV cache is allocated."""


def parse(text: str) -> tuple[int, int] | None:
    """(major, minor); None: built from a checkout, whose number says nothing."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found and not text.startswith("0.0") else None


def check(text: str | None = None) -> tuple[int, int]:
    """@error InvalidArgument: older than the oldest. A newer one than the newest is taken for that, and said."""
    version = parse(text if text is not None else vllm.__version__) or NEWEST
    if version < OLDEST:
        refuse(f"vLLM {text or vllm.__version__}: kvloom works with {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}")
    return version


def head_major(version: tuple[int, int]) -> str:
    """The layout in which a head's tokens lie together, by the name that this version has for it."""
    return "LBHNC" if version >= LAYOUT_NAMES_SINCE else "HND"
