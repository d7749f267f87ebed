"""What a connector is told: by whoever starts the server (`Settings`), and by each request (`Transfer`).  Values, checked when they are made.

A setting that is wrong stops the server before it serves; a request's parameters that are wrong fail that request's transfer alone.
Durations in seconds. Source of the request's parameters: docs/proxy.md, "The wire between proxy and connector".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from kvloom.errors import InvalidArgument

PREFILL, DECODE = "prefill", "decode"
MOST_SECONDS = 86_400.0  # of one transfer; longer is a mistake of units
LAST_PORT = 65_535
MOST_RANKS = 1_024  # prefill ranks of one request: each costs a connection
TRANSPORTS = ("auto", "shm", "cuda")
LOG_LEVELS = ("", "debug", "info", "warning", "error")


def refuse(sentence: str) -> NoReturn:
    raise InvalidArgument(sentence)


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        refuse(f"{name}={value!r}: wanted a number from {least:g} to {most:g}")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        refuse(f"{name}={value!r}: wanted a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can say half a surrogate pair
        refuse(f"{name}={value!r}: wanted a text that is UTF-8")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(f"{name}={value!r}: wanted true or false")
    return value


def _choice(name: str, value: Any, of: tuple[str, ...]) -> str:
    if value not in of:
        refuse(f"{name}={value!r}: wanted one of {', '.join(repr(word) for word in of)}")
    return str(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        refuse(f"{name}={value!r}: wanted a list of texts")
    return tuple(_text(name, item) for item in value)


@dataclasses.dataclass(frozen=True)
class Settings:
    """`kv_connector_extra_config`. Each field is a member of it."""

    control_host: str = "127.0.0.1"
    """Where a prefill rank listens for decode ranks."""
    control_port: int = 0
    """Of rank 0; rank r of the engine listens on control_port + r. Must be given where the role prefills."""
    control_open_to_all: bool = False
    """Listen beyond this machine without keys."""
    control_keys: tuple[str, ...] = ()
    """CURVE keys of this server, (public, secret): kvloom.make_curve_keys()."""
    control_clients: tuple[str, ...] = ()
    """Public keys of decode servers that may connect."""
    transport: str = "auto"
    """shm, cuda, or auto: by where the KV cache lies."""
    copy_threads: int = 1
    """Threads of a decode rank that copy what arrives (shm)."""
    per_layer_start: bool = False
    """Decode begins with its first layer while later ones arrive; each layer is waited for."""
    heartbeat: float = 0.25
    silence: float = 3.0
    """As kvloom's sessions; but engines share their cores with the session's thread, so a peer may be silent for longer."""
    grace: float = 1.0
    log: str = ""
    """Level of the sessions' own lines on stderr; empty: none."""
    trace: str = ""
    """A folder: each rank writes a Chrome trace of its transfers there when it ends."""

    @classmethod
    def parse(cls, extra: dict[str, Any] | None, prefills: bool) -> Settings:
        """@error InvalidArgument: which member is wrong, and what is wanted."""
        given = dict(extra or {})
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(given) - known):
            refuse(f"kv_connector_extra_config: {', '.join(unknown)} is not known; there are {', '.join(sorted(known))}")
        checks: dict[str, Callable[[str, Any], Any]] = {
            "control_host": _text, "control_open_to_all": _flag, "per_layer_start": _flag, "control_keys": _texts, "control_clients": _texts,
            "control_port": lambda name, value: int(_number(name, value, 1, LAST_PORT)),
            "copy_threads": lambda name, value: int(_number(name, value, 1, 64)),
            "heartbeat": lambda name, value: _number(name, value, 0.01, 60), "silence": lambda name, value: _number(name, value, 0.05, 600),
            "grace": lambda name, value: _number(name, value, 0.05, 600),
            "transport": lambda name, value: _choice(name, value, TRANSPORTS), "log": lambda name, value: _choice(name, value, LOG_LEVELS),
            "trace": _text,
        }  # fmt: skip
        checked: dict[str, Any] = {name: checks[name](f"kv_connector_extra_config.{name}", value) for name, value in given.items()}
        settings = cls(**checked)
        settings._check_together(prefills)
        return settings

    def _check_together(self, prefills: bool) -> None:
        if prefills and not self.control_port:
            refuse(
                "kv_connector_extra_config.control_port is missing: a prefill server listens there for decode ranks. The proxy looks for it at "
                "the server's HTTP port + 10000, unless told otherwise"
            )
        if self.control_keys and len(self.control_keys) != 2:
            refuse(f"kv_connector_extra_config.control_keys has {len(self.control_keys)} members: wanted [public, secret]")

    @property
    def keys(self) -> tuple[str, str] | None:
        return (self.control_keys[0], self.control_keys[1]) if self.control_keys else None

    def address(self, rank: int) -> str:
        """Where `rank` listens. @error InvalidArgument: past the last port."""
        if self.control_port + rank > LAST_PORT:
            refuse(f"kv_connector_extra_config.control_port={self.control_port}: rank {rank} would listen past port {LAST_PORT}")
        host = f"[{self.control_host}]" if ":" in self.control_host else self.control_host
        return f"tcp://{host}:{self.control_port + rank}"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The member `kvloom` of a request's kv_transfer_params."""

    role: str
    """prefill or decode."""
    key: str
    """Of this attempt; the same on both sides."""
    seconds: float
    """Time that it is given, from the request's arrival."""
    prefill: tuple[str, ...] = ()
    """decode: control addresses of the prefill ranks, in their order."""
    prefill_keys: tuple[str, ...] = ()
    """decode: their public keys; none: no keys."""

    @classmethod
    def parse(cls, params: Any) -> Transfer | None:
        """None: the request has no transfer. `params`: whatever the client said, which may be no object where it came by vllm_xargs.
        @error InvalidArgument."""
        if params is not None and not isinstance(params, dict):
            refuse(f"kv_transfer_params={params!r}: wanted an object")
        said = (params or {}).get("kvloom")
        if said is None:
            return None
        if not isinstance(said, dict):
            refuse(f"kv_transfer_params.kvloom={said!r}: wanted an object")
        if missing := [name for name in ("role", "transfer", "seconds") if name not in said]:
            refuse(f"kv_transfer_params.kvloom lacks {', '.join(missing)}")
        where = "kv_transfer_params.kvloom."
        role = _choice(where + "role", said["role"], (PREFILL, DECODE))
        key = _text(where + "transfer", said["transfer"])
        seconds = _number(where + "seconds", said["seconds"], 0, MOST_SECONDS)
        if role == PREFILL:
            return cls(role, key, seconds)
        addresses = _texts(where + "prefill", said.get("prefill"))
        if not addresses:
            refuse(f"{where}prefill is empty: wanted the control address of each prefill rank")
        if len(addresses) > MOST_RANKS:
            refuse(f"{where}prefill has {len(addresses)} addresses: wanted one for each prefill rank, at the most {MOST_RANKS}")
        keys = _texts(where + "prefill_keys", said.get("prefill_keys") or ())
        if keys and len(keys) != len(addresses):
            refuse(f"{where}prefill_keys has {len(keys)} keys for {len(addresses)} addresses")
        return cls(role, key, seconds, addresses, keys)

    @property
    def sources(self) -> list[str | tuple[str, str]]:
        """As TargetSession.begin takes them."""
        return list(zip(self.prefill, self.prefill_keys, strict=True)) if self.prefill_keys else list(self.prefill)
