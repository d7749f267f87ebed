"""What all tests in a real vLLM share: the sentence to read when something fails; and what the connector's tests compare with."""

import os
import sys

import pytest
from ask import prompts_of
from instance import Instance
from models import model
from settings import Settings

# vLLM's own loggers are loud, and what a failed test needs is in the server's log, which its error quotes.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture
def shown(capsys):
    """Print a measurement so that it is seen whether the test passes or not."""

    def show(*words):
        with capsys.disabled():
            print("\n   ", *words, file=sys.stdout, flush=True)

    return show


@pytest.fixture(scope="module")
def alone():
    """One vLLM without a connector: what it answers is right."""
    with Instance(Settings(model("llama"), cores=(1,)), "alone") as instance:
        yield instance.ready()


@pytest.fixture(scope="module")
def text() -> list[int]:
    """1,900 tokens, the same in each run; tests take from its beginning."""
    return prompts_of([1_900], seed=7)[0]
