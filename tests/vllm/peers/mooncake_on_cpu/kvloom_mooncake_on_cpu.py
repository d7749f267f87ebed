"""The one function that MooncakeConnector (vLLM 0.32.0) needs replaced to run on a CPU: it asks torch which accelerator is current, and there is none.

A plugin as vLLM offers them (entry point vllm.general_plugins), called in each process before connectors are made. It is seen only by servers whose
PYTHONPATH names this folder. Source: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py, MooncakeConnectorWorker.__init__.
"""


def stand_in() -> None:
    """Device 0 is current: what vLLM then sets as current on a CPU has no effect."""
    import torch

    torch.accelerator.current_device_index = lambda: 0
