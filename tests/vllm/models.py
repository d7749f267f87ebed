"""Models that the tests make themselves, as Hugging Face folders.  Deterministic: a kind and a seed are one folder, for ever.

A tiny model here has *really random* weights of a size that makes the next token depend on all tokens before it: with weights drawn as
for training (0.02) every prompt would end in the same token, right or wrong, and no test could tell. The vocabulary is the 256 bytes and
four marks, so any text is a prompt and one byte is one token.

| kind | what its KV cache is |
| --- | --- |
| llama | GQA: 8 query heads on 4 KV heads of 32 |
| llama1 | GQA: all query heads on one KV head |
| qwen3 | GQA with 4 KV heads, normalised q and k |
| mla | DeepSeek V2: one latent row of 512 + 64 a token, a dense layer and expert layers |
| window | Gemma 3: 6 layers, a sliding window of 256 in 4 of them: three cache groups of two layers, two of them with the window |
| smollm2 | SmolLM2-135M-Instruct with its real weights: 30 layers, 3 KV heads of 64 (smollm2.py) |

Folders live in KVLOOM_VLLM_MODELS, else ~/.cache/kvloom/models. Runs in the environment of scripts/install_vllm.sh.
    python tests/vllm/models.py KIND [SEED]     makes it and prints the folder
"""

import hashlib
import os
import pathlib
import shutil
import sys
import tempfile

MARKS = ("<pad>", "<s>", "</s>", "<unk>")
BYTES = 256
LAYERS = 4
KINDS = ("llama", "llama1", "qwen3", "mla", "window")
SPREAD = 0.1  # standard deviation of the weights
LOUD = 1.0  # of Gemma's norms of q and k, which add one: scores are 4 times what they are at 0


def models_folder() -> pathlib.Path:
    """Where models are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("KVLOOM_VLLM_MODELS") or pathlib.Path(cache, "kvloom", "models"))


def model(kind: str, seed: int = 0) -> pathlib.Path:
    """The folder of a model, made if it isn't there. @error unknown kind: ValueError."""
    if kind == "smollm2":
        from smollm2 import convert

        return _kept(f"smollm2-{_digest('smollm2.py')}", convert)
    if kind not in KINDS:
        raise ValueError(f"there is no model {kind!r}; there are {', '.join(KINDS)} and smollm2")
    return _kept(f"{kind}-{seed}-{_digest('models.py')}", lambda folder: _write_tiny(kind, seed, folder))


def _digest(source: str) -> str:
    return hashlib.sha256(pathlib.Path(__file__).with_name(source).read_bytes()).hexdigest()[:8]


def _kept(name: str, write) -> pathlib.Path:
    """`name` in the models' folder, written once, whole or not at all: made beside it and renamed, so two makers don't meet."""
    folder = models_folder() / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            write(scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _tokenizer():
    """One byte, one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + list(MARKS)
    raw = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    pad, begin, end, unknown = MARKS
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=pad, bos_token=begin, eos_token=end, unk_token=unknown)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return tokenizer


def _config(kind: str):
    import transformers

    shared = dict(
        vocab_size=BYTES + len(MARKS), hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=8,
        max_position_embeddings=4096, pad_token_id=BYTES, bos_token_id=BYTES + 1, eos_token_id=BYTES + 2, initializer_range=SPREAD,
    )  # fmt: skip
    if kind in ("llama", "llama1"):
        return transformers.LlamaConfig(num_key_value_heads=1 if kind == "llama1" else 4, head_dim=32, **shared)
    if kind == "qwen3":
        return transformers.Qwen3Config(num_key_value_heads=4, head_dim=32, **shared)
    if kind == "window":
        layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        # With an output of its own: a tied one finds the last token again in what its embedding has left.
        own = dict(num_hidden_layers=len(layers), layer_types=layers, sliding_window=256, query_pre_attn_scalar=32, tie_word_embeddings=False)
        return transformers.Gemma3TextConfig(num_key_value_heads=4, head_dim=32, **(shared | own))
    return transformers.DeepseekV2Config(
        num_key_value_heads=8, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=128, first_k_dense_replace=1,
        topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False, scoring_func="softmax", **shared,
    )  # fmt: skip


def _write_tiny(kind: str, seed: int, folder: pathlib.Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_config(_config(kind))
    # Not all kinds draw all their weights by initializer_range (experts), so they are drawn here: matrices alone. Norms stay as they are, but Gemma's
    # of q and k: at 0 scores spread by 1, attention is near the mean of all tokens, and one among hundreds is lost in it.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in sorted(network.named_parameters()):
            # Gemma scales embeddings by the root of its width: at full size they would win over all layers.
            small = kind == "window" and "embed_tokens" in name
            if weights.dim() > 1:
                weights.normal_(0.0, SPREAD / network.config.hidden_size**0.5 if small else SPREAD, generator=generator)
            elif kind == "window" and name.endswith(("q_norm.weight", "k_norm.weight")):
                weights.fill_(LOUD)
    network.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    print(model(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
