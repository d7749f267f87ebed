"""What all tests in a real vLLM share: servers that are started once for a module, and the sentence to read when something fails."""

import os
import sys

import pytest

# vLLM's own loggers are loud, and what a failed test needs is in the server's log, which its error quotes.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture
def shown(capsys):
    """Print a measurement so that it is seen whether the test passes or not."""

    def show(*words):
        with capsys.disabled():
            print("\n   ", *words, file=sys.stdout, flush=True)

    return show
