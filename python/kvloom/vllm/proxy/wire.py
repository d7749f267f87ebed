"""What is sent to the two sides, and the transfer key that ties them. Values. The form is fixed in docs/proxy.md.

Law: the prefill body differs from the client's only in what concerns the output; every field that can shape the prompt
(messages, tools, tool_choice, response_format, templates, truncation, salt, adapters) is as the client wrote it, so both sides
see the same tokens. The decode body is the client's, byte for byte, with one member put in front.
"""

import json
import secrets
from typing import Any

from kvloom.vllm.proxy.asked import Asked
from kvloom.vllm.proxy.config import Instance

# Concern the output only. min_tokens above max_tokens and stream_options without stream are errors in vLLM; logprobs cost time;
# stop words and EOS would end prefill as "stopped" where its one token says nothing (see ignore_eos below).
DROPPED = (
    "best_of",
    "echo",
    "logprob_token_ids",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "min_tokens",
    "n",
    "prompt_logprobs",
    "return_prompt_text",
    "return_token_ids",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_interval",
    "stream_options",
    "top_logprobs",
)


def new_key() -> str:
    """128 bits that nobody can guess: who knows a key can be sent that request's cache."""
    return secrets.token_hex(16)


def prefill_parameters(key: str, seconds: float) -> dict[str, Any]:
    return {"kvloom": {"role": "prefill", "transfer": key, "seconds": seconds}}


def decode_parameters(key: str, seconds: float, prefill: Instance) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "decode", "transfer": key, "seconds": seconds, "prefill": list(prefill.control)}
    if prefill.keys:
        said["prefill_keys"] = list(prefill.keys)
    return {"kvloom": said}


def prefill_body(asked: Asked, parameters: dict[str, Any]) -> bytes:
    """Computes the prompt and one token, which nobody reads."""
    body = {name: value for name, value in asked.fields.items() if name not in DROPPED}
    body |= {"max_tokens": 1, "stream": False, "n": 1, "ignore_eos": True, "kv_transfer_params": parameters}
    if asked.route == "chat":
        body["max_completion_tokens"] = 1  # vLLM takes it before max_tokens
    return json.dumps(body).encode()


def decode_body(asked: Asked, parameters: dict[str, Any] | None) -> bytes:
    """@pre the client's body has no kv_transfer_params of its own (asked.read refuses those that are not null)."""
    if parameters is None:
        return asked.raw
    if "kv_transfer_params" in asked.fields:  # null: would come after ours and win
        return json.dumps(asked.fields | {"kv_transfer_params": parameters}).encode()
    head, rest = asked.raw.split(b"{", 1)
    comma = b"," if asked.fields else b""
    return head + b'{"kv_transfer_params":' + json.dumps(parameters).encode() + comma + rest
