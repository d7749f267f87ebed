"""vLLM 0.24 to 0.33: where they differ in what a connector sees, and how each difference is met.

| differs                                    | met by                                                                        |
|--------------------------------------------|-------------------------------------------------------------------------------|
| start_load_kv before or after the layers   | what a step brings begins when its metadata is bound, before the layers in all |
| get_finished or get_transfer_results       | both; failed loads by block with the one, by request with the other           |
| failed loads by block alone                | decode of models with several cache groups is refused: vLLM's engine would end |
| handle_preemptions of ids or of metadata   | preempted requests are in the step's metadata, too, which is bound            |
| on_new_request is not called               | a request is known from get_num_new_matched_tokens at the latest              |
| names of layouts                           | `head_major`                                                                  |
| shapes of caches                           | layouts.py reads the tensors                                                  |
| get_mem_pool_context is not there          | a prefill server on CPUs is refused (worker_side.py)                          |
"""

from __future__ import annotations

import re

import vllm

from kvloom.vllm.params import refuse

OLDEST, NEWEST = (0, 24), (0, 33)
LAYOUT_NAMES_SINCE = (0, 29)  # LBHNC and its like; before: HND, NHD


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
