"""What the proxy is told: instances and settings, from the command line and a JSON file. Values, valid from birth.

Law: an option of the command line is a key of the file with '_' for '-', and wins over it.
Units: seconds, bytes, tokens (the proxy has no tokenizer: a token is 4 bytes of text, or one id of a prompt of ids).
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

Role = Literal["prefill", "decode"]

CONTROL_PORT_STEP = 10_000  # the control port of rank 0, when none is said: the HTTP port plus this


class ConfigError(ValueError):
    """What is wrong, and what to write in its place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM server (or one data-parallel rank of it)."""

    role: Role
    url: str
    weight: float = 1.0
    control: tuple[str, ...] = ()  # prefill: the control socket of each rank, in the order of ranks
    keys: tuple[str, ...] = ()  # prefill: the CURVE public key of each rank, or nothing
    dp_rank: int | None = None

    @property
    def name(self) -> str:
        """Short and unique: what metrics and logs say."""
        place = self.url.split("://", 1)[1]
        return place if self.dp_rank is None else f"{place}#dp{self.dp_rank}"


def _words(role: Role, text: str) -> dict[str, Any]:
    url, *rest = text.split(",")
    words: dict[str, Any] = {"url": url}
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--{role} {text}: '{word}' is not NAME=VALUE; write URL,weight=2,control=tcp://HOST:PORT")
        if name in ("control", "key"):
            words.setdefault(name, []).append(value)
        elif name in ("weight", "ranks", "dp_rank"):
            try:
                words[name] = float(value) if name == "weight" else int(value)
            except ValueError:
                raise ConfigError(f"--{role} {text}: {name}={value} is not a number") from None
        else:
            words[name] = value  # refused by name in make_instance
    return words


def _control(role: Role, url: str, given: list[str], ranks: int, dp_rank: int) -> tuple[str, ...]:
    """Given, or counted: from rank 0's address, else from the server's port, on which its data-parallel engines follow one another."""
    for address in given:
        if not re.fullmatch(r"(tcp://[^/\s]+:\d{1,5})|(ipc://\S+)", address):
            raise ConfigError(f"{role} {url}: control={address} is not tcp://HOST:PORT or ipc://PATH")
    if ranks < 1:
        raise ConfigError(f"{role} {url}: ranks={ranks}; a server has at least one rank")
    if len(given) > 1 or (given and ranks == 1):
        if ranks not in (1, len(given)):
            raise ConfigError(
                f"{role} {url}: ranks={ranks}, but {len(given)} control addresses; give one address, or one for each rank"
            )
        return tuple(given)
    parts = urlsplit(url)
    host, port = parts.hostname or "", (parts.port or {"http": 80, "https": 443}[parts.scheme]) + CONTROL_PORT_STEP + dp_rank * ranks
    if ":" in host:
        host = f"[{host}]"
    if given:
        if not given[0].startswith("tcp://"):
            raise ConfigError(f"{role} {url}: ranks={ranks} needs a tcp:// address to count from, or one control= for each rank")
        host, _, text = given[0].removeprefix("tcp://").rpartition(":")
        port = int(text)
    if port + ranks - 1 > 65_535:
        raise ConfigError(f"{role} {url}: no control port {port + ranks - 1}; say control=tcp://HOST:PORT")
    return tuple(f"tcp://{host}:{port + rank}" for rank in range(ranks))


def make_instance(role: Role, words: dict[str, Any]) -> Instance:
    """From {"url", "weight", "control", "key", "ranks", "dp_rank"}. @error ConfigError that names the word."""
    url = words.get("url")
    parts = urlsplit(url) if isinstance(url, str) else None
    if (
        not isinstance(url, str)
        or not parts
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or parts.fragment
    ):
        raise ConfigError(f"{role}: {url!r} is not a URL such as http://10.0.0.7:8100")
    try:
        parts.port  # noqa: B018  (urlsplit checks a port only when it is read)
    except ValueError as error:
        raise ConfigError(f"{role} {url}: {error}") from None
    known = {"url", "weight", "dp_rank"} | ({"control", "key", "ranks"} if role == "prefill" else set())
    for word in words.keys() - known:
        raise ConfigError(f"{role} {url}: unknown word '{word}'; known: {', '.join(sorted(known))}")
    weight, ranks, dp_rank = words.get("weight", 1.0), words.get("ranks", 1), words.get("dp_rank")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e6:
        raise ConfigError(f"{role} {url}: weight={weight!r} is not a number above 0")
    if type(ranks) is not int or (dp_rank is not None and (type(dp_rank) is not int or dp_rank < 0)):
        raise ConfigError(f"{role} {url}: ranks={ranks!r}, dp_rank={dp_rank!r}: whole numbers, please")
    lists = {name: [words[name]] if isinstance(words.get(name), str) else words.get(name, []) for name in ("control", "key")}
    for name, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{role} {url}: {name} is not a string or a list of strings")
    control = _control(role, url, lists["control"], ranks, dp_rank or 0) if role == "prefill" else ()
    keys = tuple(lists["key"]) * (len(control) if len(lists["key"]) == 1 else 1)
    if keys and len(keys) != len(control):
        raise ConfigError(f"{role} {url}: {len(keys)} keys for {len(control)} ranks; give one for all, or one for each")
    if any(len(key) != 40 for key in keys):
        raise ConfigError(f"{role} {url}: a CURVE public key is 40 characters (Z85)")
    return Instance(role, url.rstrip("/"), float(weight), control, keys, dp_rank)


def _option(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"text": text, "choices": choices})


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Everything the proxy is told. @error ConfigError at birth, with the value that is out of range."""

    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on; 0: any")
    order: str = _option(
        "concurrent", "send both at once, or prefill only when decode's request is written", ("concurrent", "decode-first")
    )
    alone_below: int = _option(32, "prompts of fewer tokens (estimated) are computed by decode alone; 0: none")
    without_prefill: str = _option(
        "decode", "no prefill server is left: decode computes the prompt, or the request fails", ("decode", "fail")
    )
    unshared: str = _option(
        "decode", "what one transfer can't serve (n > 1, several prompts, ...): decode computes it, or 400", ("decode", "refuse")
    )
    prefill_attempts: int = _option(3, "times that prefill is tried, before the first token")
    decode_attempts: int = _option(
        2, "times that decode may fail before the first token; few, so that a poisonous request can't kill all"
    )
    affinity: float = _option(
        1.0, "how much a cached token counts against a queued one, when an instance is chosen; 0: load only"
    )
    imbalance: int = _option(65_536, "tokens of work by which an instance may exceed the least loaded one for its cache's sake")
    remembered_blocks: int = _option(65_536, "prefix blocks remembered per instance")
    connect_timeout: float = _option(5.0, "seconds to connect to a server")
    prefill_timeout: float = _option(300.0, "seconds until prefill has answered; also the time that a transfer is given")
    first_token_timeout: float = _option(600.0, "seconds until the first token of a stream")
    stall_timeout: float = _option(120.0, "seconds between two pieces of an answer that has begun")
    request_timeout: float = _option(3600.0, "seconds for a request in all")
    body_timeout: float = _option(60.0, "seconds to receive a request's body")
    prefill_linger: float = _option(1.0, "seconds that prefill may go on after decode has answered in full")
    keepalive: float = _option(2.0, "seconds an idle connection to a server is kept; less than the server's own (vLLM: 5)")
    max_body: int = _option(64 * 2**20, "bytes of a request's body")
    max_held: int = _option(2**30, "bytes of the bodies of all open requests; more get 503")
    max_open: int = _option(4096, "requests open at a time; more get 503")
    health_interval: float = _option(2.0, "seconds between two looks at a server")
    health_timeout: float = _option(2.0, "seconds that /health may take")
    health_fall: int = _option(2, "failures in a row that take a server out")
    health_rise: int = _option(2, "successes in a row that bring it back")
    drain_timeout: float = _option(60.0, "seconds that open requests have after SIGTERM")
    log_level: str = _option("info", "what is logged", ("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("no decode server; say --decode http://HOST:PORT")
        names = [instance.role + instance.name for instance in (*self.prefill, *self.decode)]
        if len(set(names)) != len(names):
            raise ConfigError("an instance is there twice in one role; tell data-parallel ranks apart by dp_rank=")
        for field in options():
            value = getattr(self, field.name)
            allowed = field.metadata["choices"]
            if allowed and value not in allowed:
                raise ConfigError(f"{field.name}: {value!r} is not one of {', '.join(allowed)}")
            if isinstance(value, int | float) and not 0 <= value < 1e12:
                raise ConfigError(f"{field.name}: {value} is out of range")
            if (
                field.name.endswith(("timeout", "interval", "attempts", "fall", "rise")) or field.name.startswith("max")
            ) and not value:
                raise ConfigError(f"{field.name}: has to be above 0")


def options() -> list[dataclasses.Field[Any]]:
    """The settings that are one word each: all but the instances."""
    return [field for field in dataclasses.fields(Settings) if "text" in field.metadata]


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m kvloom.vllm.proxy", description="One OpenAI endpoint for prefill and decode servers of vLLM."
    )
    parser.add_argument(
        "--config", type=Path, help="JSON file; keys as the options, with _ for -; prefill and decode are lists of objects"
    )
    spec = "URL[,control=tcp://HOST:PORT][,ranks=N][,key=Z85][,weight=W][,dp_rank=R]"
    parser.add_argument(
        "--prefill", action="append", metavar=spec, help="a prefill server; control: by default its host, HTTP port + 10000"
    )
    parser.add_argument("--decode", action="append", metavar="URL[,weight=W][,dp_rank=R]", help="a decode server")
    for field in options():
        kind = type(field.default)
        text = f"{field.metadata['text']} ({field.default})"
        parser.add_argument(
            "--" + field.name.replace("_", "-"), type=kind, default=None, help=text, choices=field.metadata["choices"] or None
        )
    return parser


def _from_file(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{path}: is not a JSON object")
    kinds = {field.name: type(field.default) for field in options()}
    for name, value in said.items():
        if name in ("prefill", "decode"):
            if not isinstance(value, list):
                raise ConfigError(f"{path}: {name} is not a list")
            role: Role = "prefill" if name == "prefill" else "decode"
            said[name] = tuple(make_instance(role, item if isinstance(item, dict) else {"url": item}) for item in value)
            continue
        kind = kinds.get(name)
        if kind is None:
            raise ConfigError(f"{path}: unknown key '{name}'")
        if kind is float and type(value) is int:
            said[name] = float(value)
        elif type(value) is not kind:
            raise ConfigError(f"{path}: {name}: {value!r} is not of type {kind.__name__}")
    return said


def read_command_line(words: Sequence[str]) -> Settings:
    """The command line over the file that it names. @error ConfigError; argparse ends the program for unknown options."""
    given = vars(_arguments().parse_args(words))
    path = given.pop("config")
    said = _from_file(path) if path else {}
    for name, value in given.items():
        if value is None:
            continue
        if name in ("prefill", "decode"):
            role: Role = "prefill" if name == "prefill" else "decode"
            value = tuple(make_instance(role, _words(role, text)) for text in value)
        said[name] = value
    return Settings(**said)
