"""What a client asks: the body read once into a value that says how large, how alike, and whether one transfer can serve it.

Law: two requests whose prompts share their first k blocks (and model, salt, tools, template) have equal first k digests; a
digest covers all text before it, so digest k differs when any of the first k blocks does.
Units: a token is 4 bytes of UTF-8, or one id where the prompt is ids. A block is 128 tokens.
Source of the rules: vLLM 0.32, entrypoints/openai/{completion,chat_completion}/protocol.py, renderers/params.py,
v1/engine/parallel_sampling.py.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal

from kvloom.vllm.proxy.errors import Refused

Route = Literal["completions", "chat"]

TOKEN_BYTES = 4
BLOCK_TOKENS = 128
MOST_BLOCKS = 256  # what is hashed of a prompt: 32,768 tokens; two prompts that are alike up to there are the same to the chooser
MEDIA_TOKENS = 576  # an image, a sound, a file: nobody knows before the model's processor has seen it
USUAL_OUTPUT = 256  # of a request that does not say
MOST_OUTPUT = 1024  # what a request says is a limit, not a promise


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One request of a client."""

    route: Route
    raw: bytes  # as it came
    fields: dict[str, Any]  # the same, parsed; nobody changes it
    stream: bool
    tokens: int  # of the prompt
    output: int  # expected
    head: bytes  # digest of the first block, whole or not
    blocks: tuple[bytes, ...]  # digests of the leading blocks, whole ones only
    unshared: str | None  # why one transfer can't serve it


def read_json(raw: bytes) -> dict[str, Any]:
    """A JSON object. @error Refused 400: not UTF-8, not JSON, not an object, nested beyond reason, or with words that only the
    proxy may say."""
    try:
        fields = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not JSON: {str(error) or type(error).__name__}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "The body is not a JSON object.")
    _only_ours(fields)
    return fields


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _only_ours(fields: dict[str, Any]) -> None:
    """A client that could say where KV comes from could make a server connect to any address, or read another request's cache."""
    extra = fields.get("vllm_xargs")
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if fields.get(name) is not None or (isinstance(extra, dict) and name in extra):
            raise Refused(400, f"{name} is set by the proxy; leave it out.", param=name)


def read(route: Route, raw: bytes) -> Asked:
    """@error Refused 400, see read_json. Values that vLLM would refuse are left to vLLM: its error is the better one."""
    fields = read_json(raw)
    seed = _seed(fields)
    prompt = fields.get("prompt") if route == "completions" else None
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]  # [x] is x
    ids = _ids(prompt)
    if ids is not None:
        tokens, pieces = len(ids), _id_blocks(ids)
    elif route == "completions":
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        tokens, pieces = _tokens(text), _text_blocks(iter((text,)))
    else:
        messages = fields.get("messages")
        tokens, pieces = _chat_tokens(messages), _text_blocks(_chat_text(messages))
    head, blocks = _chain(seed, pieces)
    unshared = _unshared(route, fields, prompt)
    return Asked(route, raw, fields, bool(fields.get("stream")), max(1, tokens), _output(fields), head, blocks, unshared)


def _unshared(route: Route, fields: dict[str, Any], prompt: object) -> str | None:
    """Why the request is not one prompt, computed once, whose cache is all that decode needs."""
    if route == "completions":
        if fields.get("prompt_embeds"):
            return "prompt_embeds"
        if not prompt or not isinstance(prompt, str | list):
            return "no prompt"
        if isinstance(prompt, list) and _ids(prompt) is None:
            return "several prompts"
        if fields.get("echo") and (fields.get("logprobs") is not None or fields.get("max_tokens") == 0):
            return "echo"  # with logprobs: those of the prompt; without output: nothing to decode
    else:
        if not isinstance(fields.get("messages"), list):
            return "no messages"
        if fields.get("echo"):
            return "echo"  # vLLM then computes the prompt's logprobs
    for name in ("n", "best_of"):
        if fields.get(name) not in (None, 1):
            return f"{name} is not 1"  # vLLM makes n requests of one, all with the same transfer key
    if fields.get("use_beam_search"):
        return "use_beam_search"
    if fields.get("prompt_logprobs") is not None:
        return "prompt_logprobs"  # they are a by-product of computing the prompt
    cut = fields.get("truncate_prompt_tokens")
    if isinstance(cut, int | float) and cut < 0:
        return "truncate_prompt_tokens"  # vLLM then cuts to a length that depends on max_tokens, which the sides don't share
    return None


def _output(fields: dict[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        most = fields.get(name)
        if type(most) is int and most > 0:
            return min(most, MOST_OUTPUT)
    return USUAL_OUTPUT


def _ids(prompt: object) -> list[int] | None:
    """The one list of token ids that the prompt is, if it is that."""
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return prompt
    return None


def _tokens(text: str) -> int:
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return -(-size // TOKEN_BYTES)


def _parts(content: object) -> Iterator[str | None]:
    """The texts of a message's content; None for an image and its like."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            yield text if isinstance(text, str) else None


def _chat_tokens(messages: object) -> int:
    rows = [row for row in messages if isinstance(row, dict)] if isinstance(messages, list) else []
    return sum(4 + sum(MEDIA_TOKENS if text is None else _tokens(text) for text in _parts(row.get("content"))) for row in rows)


def _chat_text(messages: object) -> Iterator[str]:
    for row in messages if isinstance(messages, list) else []:
        content = row.get("content") if isinstance(row, dict) else row
        if isinstance(row, dict):
            yield f"\x1e{row.get('role')}\x1f"
        if isinstance(content, str):
            yield content
        else:
            yield json.dumps(content)  # images by their address or bytes: the same image, the same text
        if isinstance(row, dict) and row.get("tool_calls"):
            yield json.dumps(row["tool_calls"])


Piece = tuple[bytes, bool]  # a block of the prompt; whether it is whole


def _text_blocks(texts: Iterator[str]) -> Iterator[Piece]:
    size = BLOCK_TOKENS * TOKEN_BYTES
    held = bytearray()
    for text in texts:
        for start in range(0, len(text), size):  # piece by piece: a prompt of megabytes is not encoded to hash its head
            held += text[start : start + size].encode("utf-8", "surrogatepass")
            while len(held) >= size:
                yield bytes(held[:size]), True
                del held[:size]
    yield bytes(held), False


def _id_blocks(ids: list[int]) -> Iterator[Piece]:
    for start in range(0, len(ids), BLOCK_TOKENS):
        yield ",".join(map(str, ids[start : start + BLOCK_TOKENS])).encode(), start + BLOCK_TOKENS <= len(ids)


def _seed(fields: dict[str, Any]) -> bytes:
    """What makes caches of equal prompts different."""
    names = ("model", "cache_salt", "tools", "chat_template", "chat_template_kwargs", "documents")
    return json.dumps([fields.get(name) for name in names], sort_keys=True).encode()


def _chain(seed: bytes, pieces: Iterator[Piece]) -> tuple[bytes, tuple[bytes, ...]]:
    """Digest of the first piece, and of each whole one."""
    before, digests, wholes = hashlib.blake2b(seed, digest_size=8).digest(), [], 0
    for piece, whole in itertools.islice(pieces, MOST_BLOCKS):
        before = hashlib.blake2b(before + piece, digest_size=8).digest()
        digests.append(before)
        wholes += whole
    return digests[0] if digests else before, tuple(digests[:wholes])
