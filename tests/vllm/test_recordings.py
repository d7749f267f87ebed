"""The recordings are what this vLLM does: made again, they are the same, line by line."""

import subprocess
import sys

import pytest
from record import NAMES, RECORDINGS
from settings import HERE

AGAIN = ("one_prompt", "abort_running", "async_load_all")
"""Made again in each run; all of them: record.py all --into elsewhere, and diff."""


@pytest.mark.parametrize("name", AGAIN)
def test_a_recording_is_the_same_when_it_is_made_again(name, tmp_path):
    done = subprocess.run([sys.executable, "record.py", name, "--into", str(tmp_path)], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    again, kept = ((folder / f"{name}.jsonl").read_text().splitlines() for folder in (tmp_path, RECORDINGS))
    assert again == kept


def test_each_scenario_has_its_recording():
    assert sorted(path.stem for path in RECORDINGS.glob("*.jsonl")) == sorted(NAMES)
