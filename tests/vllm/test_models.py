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
    length, *before_the_end = map(int, sys.argv[2:])
    prompt = prompts_of([length])[0]
    others = [[*prompt[:at], (prompt[at] + 1) % 256, *prompt[at + 1 :]] for at in (length - before for before in before_the_end)]
    print(json.dumps([engine.tokens([each], 8)[0] for each in (prompt, *others, prompt)]))
"""


# A prompt's length, and how far from its end one other token still changes the answer. Windows of 256 in four layers reach at most 4 * 255 = 1,020 tokens
# back, each from where the one above it reached: of a token before that only full attention knows.
@pytest.mark.parametrize(
    ("kind", "length", "before_the_end"),
    [("qwen3", 400, [100]), ("mla", 400, [100]), ("window", 1_200, [100, 400, 1_100]), ("smollm2", 400, [5])],
)
def test_a_model_answers_and_one_other_token_changes_the_answer(kind, length, before_the_end):
    done = subprocess.run([sys.executable, "-c", TRIED, kind, *map(str, [length, *before_the_end])], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    first, *others, again = json.loads(done.stdout.splitlines()[-1])
    assert first == again
    for before, other in zip(before_the_end, others, strict=True):
        assert first != other, before


def test_a_model_is_made_the_same_each_time(tmp_path, monkeypatch):
    kept = model("llama", 5)
    monkeypatch.setenv("KVLOOM_VLLM_MODELS", str(tmp_path))
    made = model("llama", 5)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        digests = {hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (kept, made)}
        assert len(digests) == 1, name
