"""A prefill and a decode instance for tests: how they are told of each other, and one request to both.  As the proxy does it (docs/proxy.md)."""

import pathlib
import secrets

from harness import free_ports
from instance import Instance
from settings import Settings, connector

SILENCE = 8.0  # seconds; the tests' machine may give an engine nothing for a while, and nobody is frozen then
SECONDS = 60.0  # of a transfer, where its end is not the point


def kvloom_connector(role: str, policy: str = "recompute", **extra) -> dict:
    patient = {"silence": SILENCE, **extra}
    return connector("KVLoomConnector", "kvloom.vllm", role, **patient) | {"kv_load_failure_policy": policy}


class Meeting:
    """One prefill instance, one decode instance; each of its own settings. `trace`: a folder, into which both write what happened as they end."""

    def __init__(self, prefill: Settings, decode: Settings, policy: str = "recompute", trace: pathlib.Path | None = None, **extra):
        self.port = free_ports(prefill.ranks)
        both = {"trace": str(trace)} if trace else {}
        extra = both | extra
        prefill_connector = kvloom_connector("kv_producer", control_port=self.port, **both)
        self._prefill_settings = prefill.but(connector=prefill_connector, cores=prefill.cores or (0,) * prefill.ranks)
        decode_settings = decode.but(connector=kvloom_connector("kv_consumer", policy, **extra), cores=decode.cores or (1,) * decode.ranks)
        self.prefill = Instance(self._prefill_settings, "prefill")
        self.decode = Instance(decode_settings, "decode")

    def ready(self) -> "Meeting":
        self.prefill.ready()
        self.decode.ready()
        return self

    def restart_prefill(self) -> None:
        self.prefill.close()
        self.prefill = Instance(self._prefill_settings, "prefill").ready()

    @property
    def addresses(self) -> list[str]:
        return [f"tcp://127.0.0.1:{self.port + rank}" for rank in range(self._prefill_settings.ranks)]

    def parameters(self, seconds: float = SECONDS) -> tuple[dict, dict]:
        """(to prefill, to decode) of one attempt."""
        said = {"transfer": secrets.token_hex(16), "seconds": seconds}
        return {"kvloom": {"role": "prefill", **said}}, {"kvloom": {"role": "decode", "prefill": self.addresses, **said}}

    def ask(self, name: str, prompt: list[int], max_tokens: int = 12, decode_first: bool = True) -> tuple[int, ...]:
        """One request to both; decode's answer."""
        to_prefill, to_decode = self.parameters()
        both = [lambda: self.decode.add(name, prompt, max_tokens, to_decode), lambda: self.prefill.add(f"{name}-p", prompt, 1, to_prefill)]
        for side in both if decode_first else reversed(both):
            side()
        self.prefill.ended(f"{name}-p")
        return self.decode.ended(name).tokens

    def quiet(self, deadline: float = 5.0) -> None:
        self.prefill.quiet(deadline)
        self.decode.quiet(deadline)

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, *_) -> None:
        self.decode.close()
        self.prefill.close()
