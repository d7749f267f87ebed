"""Models: each runs in vLLM, is the same each time it is made, and what it says depends on what was said before."""

import hashlib
import json
import subprocess
import sys

import pytest
from models import model
from settings import HERE

TRIED = """
import json, sys
from ask import prompts_of
from in_process import Engine
from settings import of
with Engine(of(sys.argv[1], prefix_caching=False)) as engine:  # with a hit the chunks are others, and the last bits of bfloat16
    prompt = prompts_of([400])[0]
    at = 400 - int(sys.argv[2])
    other = prompt[:at] + [(prompt[at] + 1) % 256] + prompt[at + 1 :]
    print(json.dumps([engine.tokens([prompt], 8), engine.tokens([other], 8), engine.tokens([prompt], 8)]))
"""


# How far from its end a prompt's token still changes the answer: of windows the last one alone does, so what tests of them compare is bytes.
@pytest.mark.parametrize(("kind", "before_the_end"), [("qwen3", 100), ("mla", 100), ("window", 1), ("smollm2", 5)])
def test_a_model_answers_and_one_other_token_changes_the_answer(kind, before_the_end):
    done = subprocess.run([sys.executable, "-c", TRIED, kind, str(before_the_end)], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    first, other, again = json.loads(done.stdout.splitlines()[-1])
    assert first == again
    assert first != other


def test_a_model_is_made_the_same_each_time(tmp_path, monkeypatch):
    kept = model("llama", 5)
    monkeypatch.setenv("KVLOOM_VLLM_MODELS", str(tmp_path))
    made = model("llama", 5)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        digests = {hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (kept, made)}
        assert len(digests) == 1, name
