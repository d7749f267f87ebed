"""KVLoomConnector called as a real vLLM was seen to call (vllm_stand_in): attached and unused in every recording; and where blocks are kept, as a prefill
server whose transfers nobody asks for, so that they end by their time.
"""

from __future__ import annotations

import socket
import sys

import pytest
from vllm_stand_in import RELEASES, Release, Replay, installed, read, recordings

import kvloom

PREFILLS = [name for name in recordings() if not any(call.name == "get_num_new_matched_tokens" and call.gives[0] for call in read(name).calls())]
KEEPS = {name: kept for name in PREFILLS if (kept := {
    call.given["request"]["id"] for call in read(name).calls() if call.name.startswith("request_finished") and call.gives[0]
})}  # fmt: skip


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def forget_fakes():
    """Modules of the connector that were imported with another stand-in."""
    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith(("kvloom.vllm", "vllm", "torch")) and not name.startswith("vllm_stand_in")]:
            del sys.modules[name]

    kept = {name: module for name, module in sys.modules.items() if name.startswith(("kvloom.vllm", "vllm", "torch"))}
    forget()
    yield
    forget()
    sys.modules.update(kept)


def replay(name: str, release: str, port: int, params: dict) -> Replay:
    from kvloom.vllm import KVLoomConnector

    done = Replay(KVLoomConnector, read(name), release, params=params, extra={"control_port": port})
    try:
        done.run()
    finally:
        for side in done.sides.values():
            side.shutdown()
    return done


@pytest.mark.parametrize("name", [name for name in PREFILLS if name not in KEEPS])
def test_attached_and_unused(name, port):
    with installed("0.32.0"):
        replay(name, "0.32.0", port, {})


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", list(KEEPS))
def test_blocks_are_kept_until_a_transfers_time_is_up(name, release, port):
    params = {request: {"kvloom": {"role": "prefill", "transfer": f"{name}-{request}", "seconds": 0.3}} for request in KEEPS[name]}
    with installed(release):
        if Release(release).has("get_mem_pool_context"):
            replay(name, release, port, params)
        else:  # CPUs: nobody else could read the cache
            with pytest.raises(kvloom.InvalidArgument, match="does not let a connector say in what memory"):
                replay(name, release, port, params)
