"""Which rank sends what to which, and why: a plan, its paths, its runs, its picture.

Prefill computes GLM-5.2 on 8 ranks that split the layers; decode keeps the pages on 4 ranks in turn and has the first 1,000 tokens already.
"""

# Prints: 32 pairs of ranks, 744.7 MB

from __future__ import annotations

import pathlib

import kvloom

CONFIG = pathlib.Path(__file__).parent.parent / "samples" / "glm-5.2.json"

shape = kvloom.read_model_config(CONFIG.read_text(), name="glm-5.2")
prefill, decode = kvloom.Side(shape, "cp=8:layers"), kvloom.Side(shape, "dcp=4")
plan = kvloom.compile(prefill, decode)
wanted = (1000, 16384)

paths = plan.paths()
total = sum(path.bytes(wanted) for path in paths)
print(f"{len({(path.source, path.target) for path in paths})} pairs of ranks, {total / 1e6:.1f} MB")
print(plan.explain(wanted, source=0, target=3))

# A path and the page tables of a request give the copies of each of its layers: int64 [runs, 6].
path = plan.path("latent", 0, 3)
assert path is not None


def table(side: kvloom.Side, rank: int, use: kvloom.PageTable.Use) -> kvloom.PageTable:
    """Page n of the request is page n of the pool."""
    columns = side.columns("latent", rank, wanted[1])
    return kvloom.PageTable(range(columns), columns, use)


runs = memoryview(
    kvloom.bind(path, table(prefill, 0, kvloom.PageTable.Use.source), table(decode, 3, kvloom.PageTable.Use.target), wanted)
)
for row in range(len(runs)):
    source, target, size, count, source_step, target_step = (runs[row, field] for field in range(6))
    print(f"{count} pieces of {size} B, every {source_step} B from {source} to every {target_step} B from {target}")

pathlib.Path("plan.html").write_text(plan.html(wanted))  # in a notebook, `plan` alone shows it
