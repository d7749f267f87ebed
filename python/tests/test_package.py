"""The package: every name has words and types, the command line runs, the examples run."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT, command_line

import kvloom

PACKAGE = pathlib.Path(kvloom.__file__).parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def public_names() -> list[tuple[str, object]]:
    """Names of the package, and of its classes what is theirs."""
    found = []
    for name in kvloom.__all__:
        value = getattr(kvloom, name)
        found.append((name, value))
        if inspect.isclass(value):
            found += [(f"{name}.{member}", of) for member, of in vars(value).items() if not member.startswith("_")]
    return found


def test_the_list_of_names_is_whole():
    assert sorted(kvloom.__all__) == sorted(set(kvloom.__all__))
    theirs = {name for name in vars(kvloom._kvloom) if not name.startswith("_")} - {"main", "version"}
    assert theirs <= set(kvloom.__all__)
    assert kvloom.__version__ in (ROOT / "CMakeLists.txt").read_text()


@pytest.mark.parametrize(("name", "value"), [pair for pair in public_names() if pair[0] != "__version__"], ids=lambda value: value if isinstance(value, str) else "")
def test_each_name_has_words(name, value):
    if name.rpartition(".")[0] in ("Code", "Scope") or isinstance(value, (str, int)):
        return  # a member of an enumeration: its words are in the class
    words = inspect.getdoc(value)
    assert words and words.strip(), name


def test_what_waits_says_its_unit_and_what_raises_says_what():
    for name in ("SourceSession.wait", "TargetSession.wait", "TargetSession.wait_layer", "SourceSession.wait_released", "SourceSession.offer"):
        owner, _, member = name.partition(".")
        words = inspect.getdoc(getattr(getattr(kvloom, owner), member))
        assert "Raises" in words and re.search(r"second|Waits until", words), name


def test_the_stub_knows_every_name():
    stub = (PACKAGE / "_kvloom.pyi").read_text()
    for name in kvloom.__all__:
        value = getattr(kvloom, name)
        if getattr(value, "__module__", "") == "kvloom._kvloom":
            assert re.search(rf"^(class|def) {name}\b", stub, re.MULTILINE), name
    assert "std::" not in stub and "nanobind" not in stub
    assert (PACKAGE / "py.typed").exists()


def test_the_examples_are_typed_strictly(tmp_path):
    # A package that is not installed, but tried in its build folder, is found by its path.
    search = {} if "site-packages" in PACKAGE.parts else {"MYPYPATH": str(PACKAGE.parent)}
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--python-version", "3.11"]  # the proxy's; and what need not be installed
    for what in (["-p", "kvloom"], [str(path) for path in EXAMPLES]):
        done = subprocess.run([sys.executable, "-m", "mypy", "--strict", *config, "--cache-dir", str(tmp_path), *what], capture_output=True, text=True,
                              cwd=tmp_path, env={**os.environ, **search}, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example, tmp_path):
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    promised = re.search(r"^# Prints: (.*)$", example.read_text(), re.MULTILINE)
    assert promised and promised[1] in done.stdout


def test_the_command_line_is_the_executables():
    assert command_line("--version").stdout == f"kvloom {kvloom.__version__}\n"
    assert "Exit codes" in command_line("--help").stdout
    wrong = command_line("plann")
    assert (wrong.returncode, wrong.stdout) == (2, "") and "did you mean plan?" in wrong.stderr
    assert command_line("plan", "--model", "nothing.json", "--prefill", "tp=1", "--decode", "tp=1").returncode == 2


def test_the_command_line_moves_a_cache_between_processes():
    done = command_line("run", "--model", "samples/qwen3-0.6b.json", "--prefill", "tp=2", "--decode", "tp=1", "--tokens", "512")
    assert done.returncode == 0, done.stderr
    assert "checked" in done.stdout or "every byte" in done.stdout or "0 wrong" in done.stdout, done.stdout


def test_a_closed_pipe_ends_the_command_line():
    process = subprocess.Popen([sys.executable, "-m", "kvloom", "plan", "--model", "samples/glm-5.2.json", "--prefill", "tp=8", "--decode", "dcp=4",
                                "--tokens", "65536", "--runs", "--tables", "random:7"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) != 0 and b"Traceback" not in process.stderr.read()
    process.stderr.close()


def test_it_imports_without_numpy_and_torch():
    code = "import sys; import kvloom; assert 'numpy' not in sys.modules and 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert importlib.util.find_spec("kvloom.errors") is not None
