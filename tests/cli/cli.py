"""cli.py: runs the built kvloom for the tests beside it, on small models of our own."""

import json
import os
import pathlib
import subprocess
import tempfile

KVLOOM = os.environ.get("KVLOOM_CLI", "build/kvloom")
SOURCE = pathlib.Path(os.environ.get("KVLOOM_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))

# Small enough that every byte can be looked at. Sizes of planes: gqa k and v 16 x 2 B; mla 24 + 8 elements; dsa as mla with 1 byte an
# element, and keys of 128 + scales of 4 B on the layers with an indexer; swa: layers 1 and 3 keep a window of 40 tokens;
# ssm: layers 0 and 2 keep a state per request, in four groups of 8 or 4 heads.
MODELS = {
    "gqa": {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "dtype": "bfloat16"},
    "gqa8": {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "dtype": "bfloat16"},
    "mla": {"num_hidden_layers": 5, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "dtype": "bfloat16", "num_nextn_predict_layers": 1},
    "dsa": {"num_hidden_layers": 5, "kv_lora_rank": 128, "qk_rope_head_dim": 8, "dtype": "bfloat16", "index_head_dim": 128,
            "index_n_heads": 2, "index_topk": 64, "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    "swa": {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "dtype": "bfloat16",
            "sliding_window": 40, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "ssm": {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "torch_dtype": "bfloat16", "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hybrid_override_pattern": "M*M*", "mamba_num_heads": 8,
            "mamba_head_dim": 4, "n_groups": 4, "ssm_state_size": 4, "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32"},
}


class Models:
    """The models as files, in a folder that goes away with `close`."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        for name, config in MODELS.items():
            self.write(name + ".json", json.dumps(config))

    def write(self, name, text):
        path = pathlib.Path(self.folder.name) / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def path(self, name):
        return str(pathlib.Path(self.folder.name) / name)

    def close(self):
        self.folder.cleanup()


def run(*words):
    """(exit code, stdout, stderr)"""
    done = subprocess.run([KVLOOM, *map(str, words)], capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout, done.stderr


def fine(*words):
    """stdout of a run that has to end well."""
    code, out, err = run(*words)
    assert code == 0, f"{' '.join(map(str, words))}: exit {code}: {err}"
    return out


def read_json(*words):
    return json.loads(fine(*words, "--json"))
