"""The engine's steps in a trace: beside the sessions' events, on their clock, and no more of them than were asked for."""

from __future__ import annotations

import json
import time

import pytest
from vllm_stand_in import installed

import kvloom

with installed():
    from kvloom.vllm import steps as module
    from kvloom.vllm.metadata import Chunk, Offer, Step
    from kvloom.vllm.steps import Steps

pytestmark = pytest.mark.usefixtures("stand_in")

EMPTY = json.dumps({"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "a session"}}]})


def take(steps: Steps, *all_steps: Step) -> None:
    for step in all_steps:
        steps.begin(step)
        steps.end()


def spans(steps: Steps) -> list[dict]:
    return [event for event in json.loads(steps.beside(EMPTY))["traceEvents"] if event["ph"] == "X"]


def test_a_step_says_what_was_computed_in_it():
    steps, before = Steps("rank 0"), time.monotonic()
    first, last = Step([Offer("r", "key", 1)], [Chunk("r", 256, (), False)]), Step(chunks=[Chunk("r", 300, (), True)])
    take(steps, first, last, Step(held=["r"], idle=True), Step())
    chunked = spans(steps)
    assert [span.get("args", {}).get("chunks") for span in chunked] == [{"key#1": 256}, {"key#1": 300}, None]
    assert 1e6 * before <= chunked[0]["ts"] <= chunked[0]["ts"] + chunked[0]["dur"] <= chunked[1]["ts"] <= 1e6 * time.monotonic()
    assert "a session" in steps.beside(EMPTY) and "rank 0" in steps.beside(EMPTY)


def test_steps_are_bounded_and_the_rest_is_counted(monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    steps = Steps("rank 0")
    take(steps, *[Step()] * 5)
    assert len(spans(steps)) == 2
    assert json.loads(steps.beside(EMPTY))["otherData"]["dropped_events"] == 3


def test_what_is_no_trace_is_refused():
    with pytest.raises(kvloom.ParseError, match="part 0"):
        Steps("rank 0").beside("{}")
