"""gpu_smoke.py: a prefill and a decode vLLM on GPUs with KVLoomConnector: decode's tokens are those of one vLLM alone, its KV is prefill's.

Not a test of make test-vllm: that has no GPU. Run it where vLLM for CUDA and kvloom built with -DKVLOOM_CUDA=ON are installed:

    python tests/vllm/gpu_smoke.py [--kind llama] [--gpus 0,0]

The model is tiny and its weights are really random (models.py), so that a wrong page shows in the tokens. One GPU is enough.
Prints a line for each prompt and ends with `N prompts, M wrong tokens, K wrong layers`; exit status 1 if there was any.
"""

import argparse
import sys
import time

from ask import prompts_of
from instance import Instance
from meeting import Meeting
from models import model
from settings import Settings

LENGTHS = [1, 17, 127, 128, 129, 255, 256, 257, 700, 1_100, 1_900]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kind", default="llama")
    arguments.add_argument("--gpus", default="0,0", help="of prefill and of decode, as CUDA_VISIBLE_DEVICES has them")
    said = arguments.parse_args()
    prefill_gpu, decode_gpu = said.gpus.split(",")
    base = Settings(model(said.kind), dtype="bfloat16", gpu_memory=0.2)
    on = lambda gpu: (("CUDA_VISIBLE_DEVICES", gpu),)  # noqa: E731
    (text,) = prompts_of([max(LENGTHS)], seed=7)
    wrong_tokens = wrong_layers = 0
    with Instance(base.but(environment=on(decode_gpu)), "alone") as alone:
        alone.ready()
        expected = {length: alone.tokens([length % 256, *text][:length], 12) for length in LENGTHS}
    with Meeting(base.but(environment=on(prefill_gpu)), base.but(environment=on(decode_gpu))) as meeting:
        meeting.ready()
        for length in LENGTHS:
            prompt = [length % 256, *text][:length]
            begin = time.monotonic()
            tokens = meeting.ask(f"r{length}", prompt, 12)
            took = time.monotonic() - begin
            wrong = sum(a != b for a, b in zip(tokens, expected[length])) + abs(len(tokens) - 12)
            layers = 0
            if length > 1:
                sent, landed = meeting.prefill.sums(f"r{length}-p", length - 1), meeting.decode.sums(f"r{length}", length - 1)
                layers = sum(sent[at] != landed.get(at) for at in sent)
            print(f"{length} tokens: {wrong} of 12 answered tokens differ, {layers} layers differ, {took * 1e3:.0f} ms", flush=True)
            wrong_tokens += wrong
            wrong_layers += layers
        meeting.quiet()
    print(f"{len(LENGTHS)} prompts, {wrong_tokens} wrong tokens, {wrong_layers} wrong layers")
    return 1 if wrong_tokens or wrong_layers else 0


if __name__ == "__main__":
    sys.exit(main())
