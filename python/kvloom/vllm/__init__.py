"""vLLM and kvloom: `KVLoomConnector`, which vLLM loads by its module path, and `kvloom.vllm.proxy`, the server in front of both sides.

    --kv-transfer-config '{"kv_connector": "KVLoomConnector", "kv_connector_module_path": "kvloom.vllm", "kv_role": "kv_producer", ...}'

Importing this package imports neither vLLM nor torch: the connector is looked up when somebody asks for it. By example: docs/vllm.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.vllm.connector import KVLoomConnector

__all__ = ["KVLoomConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVLoomConnector":
        from kvloom.vllm.connector import KVLoomConnector

        return KVLoomConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
