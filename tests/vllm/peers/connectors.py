"""The connectors that are compared, each as a pair of servers and the way that its own proxy asks them.

    kvloom     both halves in the same moment (docs/proxy.md); shared memory
    nixl       prefill, and with what it answers, decode (vLLM's tests/v1/kv_connector/nixl_integration/toy_proxy_server.py); UCX over tcp
    mooncake   both halves in the same moment; decode is told where prefill's bootstrap server is (.../mooncake_integration/toy_proxy_server.py); tcp
    none       one server, no connector: what the others are measured against

All have the same model, chunks, pool and kv_load_failure_policy (recompute), and nap (../napping); prefill (and `none`) is bound to core 0, decode to core 1.
Everything else is as the connector has it by default. No proxy stands between: the client of the benchmark sends the halves itself, the same for all.
Owner: a Pair has its servers. Units: seconds.
"""

import dataclasses
import json
import os
import secrets
import urllib.request

from failures import Halves, Way
from harness import HOST, Server, free_ports
from meeting import kvloom_connector
from settings import HERE, Settings, connector, python_path

PEERS = os.environ.get("KVLOOM_VLLM_PEERS", "")  # the folder of scripts/install_peers.sh
POLICY = {"kv_load_failure_policy": "recompute"}
SILENCE = 3.0  # kvloom's default; the tests have a longer one
GIVEN = 2.0  # that kvloom's requests give a half that never comes, where that is the question
NAMES = ("none", "kvloom", "nixl", "mooncake")
RANDOM_BITS = 128


@dataclasses.dataclass
class Pair:
    """`prefill` alone answers where there is no `decode`. `way` is what scenarios of failures.py need of it."""

    name: str
    prefill: Server
    decode: Server | None = None
    way: Way | None = None

    @property
    def servers(self) -> list[Server]:
        return [self.prefill] if self.decode is None else [self.prefill, self.decode]

    def freeze(self) -> None:
        for server in self.servers:
            server.freeze()

    def thaw(self) -> None:
        for server in self.servers:
            server.thaw()

    def close(self) -> None:
        for server in self.servers:
            server.close()


def none(settings: Settings, patience: float) -> Pair:
    return Pair("none", Server(settings.but(cores=(0,)), "none"))


def kvloom(settings: Settings, patience: float) -> Pair:
    port = free_ports()
    prefill = Server(settings.but(cores=(0,), connector=kvloom_connector("kv_producer", control_port=port, silence=SILENCE)), "kvloom-prefill")
    decode = Server(settings.but(cores=(1,), connector=kvloom_connector("kv_consumer", silence=SILENCE)), "kvloom-decode")

    def halves(seconds: float) -> Halves:
        said = {"transfer": secrets.token_hex(RANDOM_BITS // 8), "seconds": seconds}
        to_decode = {"kvloom": {"role": "decode", "prefill": [f"tcp://{HOST}:{port}"], **said}}
        return Halves({"kvloom": {"role": "prefill", **said}}, lambda answer: to_decode)

    return Pair("kvloom", prefill, decode, Way("kvloom", prefill, decode, halves, given=GIVEN, patience=patience))


def nixl(settings: Settings, patience: float) -> Pair:
    """`given` is its lease of 30 s, which no request can change."""

    def server(role: str, what: str, core: int) -> Server:
        port = free_ports()
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_NET_DEVICES": "lo"}
        return Server(_with_peers(settings, environment).but(cores=(core,), connector=connector("NixlConnector", role=role) | POLICY), what)

    prefill, decode = server("kv_producer", "nixl-prefill", 0), server("kv_consumer", "nixl-decode", 1)
    to_prefill = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    to_prefill |= {"do_remote_decode": True, "do_remote_prefill": False}

    def halves(seconds: float) -> Halves:
        return Halves(to_prefill, lambda answer: answer or {})

    return Pair("nixl", prefill, decode, Way("nixl", prefill, decode, halves, given=30.0, decode_first=False, patience=patience))


def mooncake(settings: Settings, patience: float) -> Pair:
    """`given` is none: it waits 480 s (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT), longer than anybody here."""
    port = free_ports()
    # More than 1,024 pieces in flight to one peer are refused by default: the benchmark's eight long prompts would be.
    environment = {"VLLM_HOST_IP": HOST, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}
    settings = _with_peers(settings, environment, str(HERE / "peers" / "mooncake_on_cpu"))

    def server(role: str, what: str, core: int) -> Server:
        return Server(settings.but(cores=(core,), connector=connector("MooncakeConnector", role=role, mooncake_protocol="tcp") | POLICY), what)

    prefill, decode = server("kv_producer", "mooncake-prefill", 0), server("kv_consumer", "mooncake-decode", 1)
    bootstrap = f"http://{HOST}:{port}"

    def halves(seconds: float) -> Halves:
        transfer = {"transfer_id": f"xfer-{secrets.token_hex(RANDOM_BITS // 8)}"}
        to_decode = {"do_remote_decode": False, "do_remote_prefill": True, "remote_bootstrap_addr": bootstrap, "remote_engine_id": _engine(bootstrap)}
        return Halves({"do_remote_decode": True, "do_remote_prefill": False, **transfer}, lambda answer: to_decode | transfer)

    return Pair("mooncake", prefill, decode, Way("mooncake", prefill, decode, halves, given=0.0, patience=patience))


def _engine(bootstrap: str) -> str:
    """The id of prefill's engine, another after each start. @error its bootstrap server doesn't answer."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{bootstrap}/query", timeout=60) as answer:
        return json.load(answer)["0"]["engine_id"]


def _with_peers(settings: Settings, environment: dict[str, str], *folders: str) -> Settings:
    """The same with the peers' packages within reach. @pre KVLOOM_VLLM_PEERS names them."""
    if not PEERS:
        raise SystemExit("KVLOOM_VLLM_PEERS is not set: please run scripts/bench_vllm_peers.sh, or set it to the folder that scripts/install_peers.sh prints")
    path = os.pathsep.join([*python_path(settings.naps), PEERS, *folders])
    return settings.but(environment=(*settings.environment, ("PYTHONPATH", path), *environment.items()))


MAKERS = {"none": none, "kvloom": kvloom, "nixl": nixl, "mooncake": mooncake}
