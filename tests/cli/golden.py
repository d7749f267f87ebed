"""golden.py: outputs that a person has read, in golden/. `KVLOOM_CLI=build/kvloom tests/cli/golden.py` writes them anew: read the diff."""

import json
import pathlib

import cli

FOLDER = pathlib.Path(__file__).parent / "golden"

# name: verb, model, and its words
CASES = {
    "describe_dsa": ("describe", "dsa", "--prefill cp=2:layers --decode dcp=4,page=16 --kv-cache-dtype fp8-dsa --memory 1MiB"),
    "describe_gqa_cpu": ("describe", "gqa8", "--prefill tp=2,layout=cpu,page=16 --decode tp=4,page=16"),
    "describe_value_and_window": ("describe", "swa", "--prefill cp=2:zigzag --decode dcp=2:value,kv_swa:none --tokens 100"),
    "plan_dsa": ("plan", "dsa", "--prefill cp=2:layers --decode dcp=2 --tokens 200 --prefix 70 --kv-cache-dtype fp8-dsa"),
    "plan_any_length": ("plan", "mla", "--prefill tp=2 --decode dcp=2:stripe=1"),
}


def told(models, name):
    verb, model, words = CASES[name]
    out = cli.read_json(verb, "--model", models.path(model + ".json"), *words.split())
    out.pop("compile_ns", None)  # differs from run to run
    return json.dumps(out, indent=2) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    made = cli.Models()
    for case in CASES:
        (FOLDER / f"{case}.json").write_text(told(made, case), encoding="utf-8")
    made.close()
