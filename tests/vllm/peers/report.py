"""The benchmark's tables, in text and JSON: each figure with its unit, its goal if it has one, whether that holds, and its shape."""

import dataclasses
import json
import os
import pathlib
import platform
import statistics
from importlib.metadata import PackageNotFoundError, distributions, version

import failures

from . import ends, idle, ttft
from .connectors import PEERS

BELOW = 1.0  # % of a core beyond the server without a connector: kvloom's goal


@dataclasses.dataclass(frozen=True)
class Figure:
    what: str
    value: float
    unit: str
    goal: str = ""
    holds: bool | None = None
    shape: str = ""


def idle_figures(found: list[idle.Idle]) -> list[Figure]:
    without = next((one.percent for one in found if one.connector == "none"), 0.0)
    figures = []
    for one in found:
        if one.connector == "none":
            figures.append(Figure("idle, no connector", one.percent, "% of a core"))
            continue
        more, ours = one.percent - without, one.connector == "kvloom"
        goal, holds = (f"< {BELOW:g}", more < BELOW) if ours else ("", None)
        figures.append(Figure(f"idle, {one.connector}, {one.role}", more, "% of a core, beyond none", goal, holds, f"{one.percent:.2f} in all"))
    return figures


def ttft_figures(samples: list[ttft.Sample]) -> list[Figure]:
    """A connector's TTFT minus the single server's, medians over the rounds; kvloom's goal is to be the lowest."""
    figures = []
    for at_once in ttft.AT_ONCE:
        for length in ttft.LENGTHS:
            names = list(dict.fromkeys(s.connector for s in samples if s.connector != "none"))
            more = {name: statistics.median(ttft.beyond(samples, name, length, at_once)) * 1e3 for name in names}
            mine = [s for s in samples if (s.length, s.at_once) == (length, at_once)]
            alone = statistics.median(s.median for s in mine if s.connector == "none") * 1e3
            figures.append(Figure(f"TTFT {length} tokens, {at_once} at once, none", alone, "ms"))
            for name in names:
                ours = name == "kvloom"
                others = [value for other, value in more.items() if other != name]
                holds = more[name] <= min(others) if ours and others else None
                figures.append(Figure(f"TTFT {length} tokens, {at_once} at once, {name}", more[name], "ms beyond none", "lowest" if ours else "", holds,
                                      _shape(mine, name, alone, more)))  # fmt: skip
    return figures


def _shape(mine: list[ttft.Sample], name: str, alone: float, more: dict[str, float]) -> str:
    """Ratios, the spread over the rounds, and what was not as it should be."""
    each = [s for s in mine if s.connector == name]
    rounds = sorted(seconds * 1e3 for seconds in ttft.beyond(mine, name, each[0].length, each[0].at_once))
    words = [f"{(alone + more[name]) / alone:.2f} x none", f"rounds {rounds[0]:.1f} to {rounds[-1]:.1f}"]
    recomputed, wrong = sum(s.recomputed for s in each), sum(s.wrong for s in each)
    words += [f"{recomputed} prompt tokens computed by decode"] if recomputed else []
    words += [f"{wrong} answers of {sum(len(s.seconds) for s in each)} differ from none's"] if wrong else []
    return ", ".join(words)


def text(figures: list[Figure]) -> str:
    """A table as `kvloom bench` prints it."""
    cells = [("what", "value", "unit", "goal", "", "shape")]
    for one in figures:
        cells.append((one.what, f"{one.value:.2f}", one.unit, one.goal, {True: "holds", False: "MISSED", None: ""}[one.holds], one.shape))
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]:<{widths[4]}}  {row[5]}" for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def ends_text(rows: list[failures.Row]) -> str:
    verdicts = [f"goal of kvloom, {row.scenario}: <= {ends.limit(row):g} s, {'holds' if ends.holds(row) else 'MISSED'}" for row in rows if row.way == "kvloom"]
    return "\n".join([failures.table(rows), *([""] + verdicts if verdicts else [])])


def place() -> dict[str, str]:
    """What it ran on, and which versions."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = int(pathlib.Path("/proc/meminfo").read_text().split()[1]) / 2**20
    versions = {"vllm": version("vllm"), "torch": version("torch"), "kvloom": _version("kvloom")}
    versions |= {found.name: found.version for found in distributions(path=[PEERS])} if PEERS else {}
    return {"hardware": f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB", "python": platform.python_version(), **versions}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        found = list(distributions(name=package, path=[os.environ.get("KVLOOM_PACKAGES", "")]))
        return found[0].version if found else "of this checkout"


def as_json(where: dict, settings: dict, figures: list[Figure], samples: list[ttft.Sample], rows: list[failures.Row]) -> str:
    said = {"place": where, "settings": settings, "figures": [dataclasses.asdict(one) for one in figures]}
    said["ttft_samples"] = [dataclasses.asdict(one) for one in samples]
    said["ends"] = [dataclasses.asdict(row) | ({"limit": ends.limit(row), "holds": ends.holds(row)} if row.way == "kvloom" else {}) for row in rows]
    return json.dumps(said, indent=1)
