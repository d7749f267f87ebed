"""One family of exceptions, which keeps code and scope, and says what to do."""

from __future__ import annotations

import pickle

import pytest
from conftest import LONG, key, shape

import kvloom
from kvloom import errors


def test_each_code_has_its_class():
    classes = {type(errors.make("x", code, kvloom.Scope.peer)) for code in kvloom.Code}
    assert len(classes) == len(list(kvloom.Code)) and all(issubclass(c, kvloom.Error) for c in classes)


@pytest.mark.parametrize(
    ("base", "ours"),
    [(ValueError, kvloom.InvalidArgument), (ValueError, kvloom.ParseError), (IndexError, kvloom.OutOfRange), (OverflowError, kvloom.Overflow),
     (TimeoutError, kvloom.DeadlineExceeded), (OSError, kvloom.IoError)],
)
def test_it_is_pythons_class_too(base, ours):
    assert issubclass(ours, base)
    error = ours("a sentence", kvloom.Code.io, kvloom.Scope.process)
    assert (str(error), error.args, error.message, error.code, error.scope) == (
        "a sentence", ("a sentence",), "a sentence", kvloom.Code.io, kvloom.Scope.process)


@pytest.mark.parametrize("code", list(kvloom.Code))
def test_one_that_is_raised_in_python_has_its_code(code):
    kind = type(errors.make("x", code, kvloom.Scope.peer))
    assert kind.code is code and kind("a sentence").code is code and kind("a sentence").scope is kvloom.Scope.operation


@pytest.mark.parametrize("code", list(kvloom.Code))
def test_it_crosses_processes(code):
    error = errors.make("a sentence", code, kvloom.Scope.transfer)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and (str(again), again.code, again.scope) == ("a sentence", code, kvloom.Scope.transfer)


def test_a_wrong_word_is_marked():
    with pytest.raises(kvloom.InvalidArgument) as raised:
        kvloom.Side(shape(), "tp=3,pp=9")
    lines = str(raised.value).splitlines()
    assert raised.value.scope is kvloom.Scope.operation
    assert lines[1].strip() == "tp=3,pp=9" and lines[2].strip().startswith("^")


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: kvloom.read_model_config("{"), kvloom.ParseError, "JSON"),
        (lambda: kvloom.CacheShape("m", 1, [kvloom.CacheGroup("kv", [0], 1, [])]), kvloom.InvalidArgument, "plane"),
        (lambda: kvloom.Plan.parse("kvloom plan 1\n"), kvloom.ParseError, "line"),
        (lambda: kvloom.Plan.decode(b"nothing"), kvloom.ParseError, ""),
        (lambda: kvloom.PageTable([0, 9], 8, kvloom.PageTable.Use.source), kvloom.OutOfRange, "9"),
        (lambda: kvloom.PageTable([1, 1], 8, kvloom.PageTable.Use.target), kvloom.InvalidArgument, "1"),
        (lambda: kvloom.Side(shape(), "tp=1").bytes_per_token(1), kvloom.OutOfRange, "no rank 1"),
        (lambda: kvloom.Side(shape(), "tp=1").columns("latent", 0, 1), kvloom.InvalidArgument, "it has kv"),
        (lambda: kvloom.compile(kvloom.Side(shape(3), "tp=1"), kvloom.Side(shape(4), "tp=1")), kvloom.Unsupported, "layer"),
        (lambda: kvloom.shm_transport(copy_threads=0), kvloom.InvalidArgument, ""),
        (lambda: kvloom.shm_transport().allocate(0), kvloom.InvalidArgument, "0 B"),
        (lambda: kvloom.shm_transport().register_pointer(2**64 - 4, 8), kvloom.OutOfRange, "beyond the last address"),
        (lambda: kvloom.shm_transport().record(0), kvloom.Unsupported, "CUDA"),
        (lambda: kvloom.merge_traces(["{"]), kvloom.ParseError, ""),
        (lambda: kvloom.describe(kvloom.Side(shape(), "tp=1"), kvloom.Side(shape(), "cp=2:zigzag")), kvloom.InvalidArgument, "--tokens"),
    ],
)
def test_bad_input_says_what_is_wrong(call, kind, words):
    with pytest.raises(kind) as raised:
        call()
    assert words in str(raised.value) and raised.value.message


def test_wrong_types_are_type_errors():
    with pytest.raises(TypeError):
        kvloom.Side("tp=1", shape())
    with pytest.raises(TypeError, match="sequence of int"):
        kvloom.PageTable("01", 8, kvloom.PageTable.Use.source)


@pytest.mark.parametrize("time", [-1.0, float("nan")])
def test_times_that_are_none_are_refused(pair, time):
    with pytest.raises(kvloom.InvalidArgument, match="seconds"):
        pair.prefill.session.offer(key(), time)
    with pytest.raises(kvloom.InvalidArgument, match="seconds"):
        pair.decode.session.wait(key(), time)


def test_a_session_refuses_what_it_can_not_take(pair):
    of = key()
    with pytest.raises(kvloom.InvalidArgument, match="not known"):
        pair.decode.session.wait(of, LONG)
    with pytest.raises(kvloom.InvalidArgument, match="it has kv"):
        pair.prefill.session.set_table(of, "latent", kvloom.CacheTable([0], 1))
    with pytest.raises(kvloom.InvalidArgument, match="geometry 99"):
        pair.decode.session.begin(of, 99, pair.sources, (0, 8), {}, LONG)
    with pytest.raises(kvloom.InvalidArgument):
        kvloom.SourceSession(pair.prefill.transport, kvloom.LocalCache(pair.prefill.side, 0, []))
    with pytest.raises(kvloom.InvalidArgument, match="wanted debug"):
        kvloom.TargetSession(kvloom.shm_transport("*"), log="loud")
    with pytest.raises(kvloom.InvalidArgument):
        kvloom.TargetSession(kvloom.shm_transport())  # nobody can connect to it
