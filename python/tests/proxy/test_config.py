"""What the proxy is told, and what it says when it is told nonsense."""

import ast
import json
from pathlib import Path

import pytest

import kvloom.vllm.proxy
from kvloom.vllm.proxy.config import ConfigError, Settings, make_instance, read_command_line

KEY = "x" * 40


@pytest.mark.parametrize(
    ("words", "control"),
    [
        ("http://10.0.0.7:8100", ("tcp://10.0.0.7:18100",)),
        ("http://10.0.0.7", ("tcp://10.0.0.7:10080",)),
        ("http://[::1]:8100/", ("tcp://[::1]:18100",)),
        ("http://p:8100,ranks=3", ("tcp://p:18100", "tcp://p:18101", "tcp://p:18102")),
        ("http://p:8100,control=tcp://q:5,ranks=2", ("tcp://q:5", "tcp://q:6")),
        ("http://p:8100,control=tcp://q:5,control=tcp://r:9", ("tcp://q:5", "tcp://r:9")),
        ("http://p:8100,control=ipc:///tmp/k", ("ipc:///tmp/k",)),
    ],
)
def test_control_addresses(words: str, control: tuple[str, ...]) -> None:
    settings = read_command_line(["--prefill", words, "--decode", "http://d:1"])
    assert settings.prefill[0].control == control


def test_keys_one_for_all_ranks_or_one_each() -> None:
    one = make_instance("prefill", {"url": "http://p:1", "ranks": 2, "key": KEY})
    each = make_instance("prefill", {"url": "http://p:1", "ranks": 2, "key": [KEY, "y" * 40]})
    assert (one.keys, each.keys) == ((KEY, KEY), (KEY, "y" * 40))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no decode server"),
        (["--decode", "d:1"], "is not a URL"),
        (["--decode", "http://d:99999"], "[Pp]ort"),
        (["--decode", "http://d:1,control=tcp://d:2"], "unknown word 'control'"),
        (["--decode", "http://d:1,weight"], "is not NAME=VALUE"),
        (["--decode", "http://d:1,weight=heavy"], "is not a number"),
        (["--decode", "http://d:1,weight=0"], "above 0"),
        (["--decode", "http://d:1", "--decode", "http://d:1/"], "twice"),
        (["--decode", "http://d:1", "--prefill", "http://p:60000"], "no control port 70000"),
        (["--decode", "http://d:1", "--prefill", "http://p:1,control=5555"], "is not tcp://HOST:PORT"),
        (["--decode", "http://d:1", "--prefill", "http://p:1,ranks=0"], "at least one rank"),
        (
            ["--decode", "http://d:1", "--prefill", "http://p:1,ranks=3,control=tcp://p:1,control=tcp://p:2"],
            "2 control addresses",
        ),
        (["--decode", "http://d:1", "--prefill", "http://p:1,key=short"], "40 characters"),
        (["--decode", "http://d:1", "--max-open", "0"], "max_open"),
        (["--decode", "http://d:1", "--stall-timeout", "-1"], "out of range"),
        (["--decode", "http://d:1", "--stall-timeout", "nan"], "out of range"),
        (["--decode", "http://d:1", "--config", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_nonsense_is_named(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_command_line(arguments)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "not a JSON object"),
        ({"decodes": []}, "unknown key 'decodes'"),
        ({"decode": "http://d:1"}, "is not a list"),
        ({"decode": [{"url": 1}]}, "is not a URL"),
        ({"decode": ["http://d:1"], "port": "80"}, "is not of type int"),
        ({"decode": ["http://d:1"], "order": "prefill-first"}, "is not one of concurrent, decode-first"),
        ({"decode": [{"url": "http://d:1", "weight": True}]}, "above 0"),
        ({"decode": ["http://d:1"], "prefill": [{"url": "http://p:1", "control": 5}]}, "string or a list"),
    ],
)
def test_nonsense_in_the_file_is_named(tmp_path: Path, document: object, words: str) -> None:
    path = tmp_path / "proxy.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=words):
        read_command_line(["--config", str(path)])


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "proxy.json"
    path.write_text(json.dumps({"decode": ["http://d:1"], "port": 1, "stall_timeout": 5, "order": "decode-first"}))
    settings = read_command_line(["--config", str(path), "--port", "2", "--prefill", "http://p:3,weight=2.5"])
    assert (settings.port, settings.stall_timeout, settings.order) == (2, 5.0, "decode-first")
    assert (settings.prefill[0].weight, settings.decode[0].url) == (2.5, "http://d:1")


def test_data_parallel_ranks_of_one_server_are_instances() -> None:
    words = [make_instance("decode", {"url": "http://d:1", "dp_rank": n}) for n in range(2)]
    assert [instance.name for instance in Settings(decode=tuple(words)).decode] == ["d:1#dp0", "d:1#dp1"]


def test_data_parallel_engines_listen_one_after_another() -> None:
    """As the connector does (worker_side.port_offset): from one control port, engine by engine, rank by rank."""
    engines = [make_instance("prefill", {"url": "http://p:8100", "ranks": 2, "dp_rank": n}) for n in range(2)]
    assert [engine.control for engine in engines] == [("tcp://p:18100", "tcp://p:18101"), ("tcp://p:18102", "tcp://p:18103")]
    said = make_instance("prefill", {"url": "http://p:8100", "ranks": 2, "dp_rank": 1, "control": "tcp://p:5000"})
    assert said.control == ("tcp://p:5000", "tcp://p:5001")  # its own rank 0


def test_the_proxy_imports_nothing_else_of_kvloom() -> None:
    for path in Path(kvloom.vllm.proxy.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            assert all(name.startswith("kvloom.vllm.proxy") for name in names if name.startswith("kvloom")), path
