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
with Engine(of(sys.argv[1])) as engine:
    prompt = prompts_of([400])[0]
    other = prompt[:300] + [(prompt[300] + 1) % 256] + prompt[301:]
    print(json.dumps([engine.tokens([prompt], 8), engine.tokens([other], 8), engine.tokens([prompt], 8)]))
"""


@pytest.mark.parametrize("kind", ["qwen3", "mla", "window", "smollm2"])
def test_a_model_answers_and_one_other_token_100_before_the_end_changes_the_answer(kind):
    done = subprocess.run([sys.executable, "-c", TRIED, kind], cwd=HERE, capture_output=True, text=True)
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
