"""Recordings of a real vLLM's calls to a connector: JSON lines, read into steps.  What stands in them: tests/vllm/record_connector.py."""

import dataclasses
import json
import pathlib
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "tests" / "vllm" / "recordings"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one side: what it was given, and what the recording connector answered."""

    side: str
    name: str
    given: Any = None
    gives: Any = None


@dataclasses.dataclass(frozen=True)
class Recording:
    """`steps[0]` is what comes before the first step: both sides are made and meet. Each other one ends with take_events, as vLLM's do."""

    vllm: str
    scenario: str
    means: str
    steps: tuple[tuple[Call, ...], ...]

    def calls(self) -> list[Call]:
        return [call for step in self.steps for call in step]


def recordings() -> list[str]:
    """The names of all."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def read(name: str) -> Recording:
    """@error there is none of that name: FileNotFoundError."""
    lines = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
    steps: list[list[Call]] = [[]]
    started = False
    for line in lines[1:]:
        call = Call(line["side"], line["call"], line.get("with"), line.get("gives"))
        if call.name == "on_new_request" and not started:  # the first sign of a request ends the beginning
            started = True
            steps.append([])
        steps[-1].append(call)
        if call.name == "take_events":
            steps.append([])
    return Recording(lines[0]["vllm"], lines[0]["scenario"], lines[0]["means"], tuple(tuple(step) for step in steps if step))
