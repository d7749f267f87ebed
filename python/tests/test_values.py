"""describe, plan and bind: the same values as C++, as text, bytes, dicts and pictures; the command line prints the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT, command_line, shape

import kvloom

JOBS = [
    ("glm-5.2", "cp=8:layers", "dcp=4", (1000, 4096)),
    ("llama-3.1-70b", "tp=8", "tp=2,page=16", (0, 1024)),
    ("qwen3.5-122b-a10b", "tp=2", "tp=4", (64, 640)),
    ("gpt-oss-120b", "cp=4:zigzag", "tp=2", (0, 2048)),
]


def sides(model: str, prefill: str, decode: str) -> tuple[kvloom.Side, kvloom.Side]:
    of = kvloom.read_model_config((ROOT / f"samples/{model}.json").read_text(), name=model)
    return kvloom.Side(of, prefill), kvloom.Side(of, decode)


def words(model: str, prefill: str, decode: str, tokens: tuple[int, int]) -> list[str]:
    return ["--model", f"samples/{model}.json", "--prefill", prefill, "--decode", decode, "--prefix", str(tokens[0]), "--tokens", str(tokens[1])]


@pytest.mark.parametrize(("model", "prefill", "decode", "tokens"), JOBS)
def test_a_plan_is_what_the_command_line_prints(model, prefill, decode, tokens):
    plan = kvloom.compile(*sides(model, prefill, decode), total=tokens[1])
    printed = json.loads(command_line("plan", *words(model, prefill, decode, tokens), "--json").stdout)
    del printed["compile_ns"]
    assert plan.to_dict(tokens) == printed
    assert plan.digest == printed["digest"]
    assert str(plan) == command_line("plan", *words(model, prefill, decode, tokens), "--text").stdout


@pytest.mark.parametrize(("model", "prefill", "decode", "tokens"), JOBS)
def test_describe_is_what_the_command_line_prints(model, prefill, decode, tokens):
    printed = command_line("describe", *words(model, prefill, decode, tokens), "--memory", "80GiB", "--json")
    assert kvloom.describe(*sides(model, prefill, decode), tokens, 80 << 30) == json.loads(printed.stdout)


def test_runs_are_what_the_command_line_prints():
    model, prefill, decode, tokens = JOBS[1]
    plan = kvloom.compile(*sides(model, prefill, decode))
    path = plan.path("kv", 3, 0)
    assert path is not None
    tables = [
        kvloom.PageTable(range(side.columns("kv", 0, tokens[1])), side.columns("kv", 0, tokens[1]), use)
        for side, use in ((plan.source, kvloom.PageTable.Use.source), (plan.target, kvloom.PageTable.Use.target))
    ]
    runs = np.asarray(kvloom.bind(path, *tables, tokens))
    lines = command_line("plan", *words(model, prefill, decode, tokens), "--runs").stdout.splitlines()[1:]
    printed = [line.split("\t") for line in lines if line.startswith(f"3\t0\tkv\t{path.layers[0]}\t")]
    assert runs.dtype == np.int64
    assert runs.tolist() == [[int(n) for n in line[4:]] for line in printed]
    assert int((runs[:, 2] * runs[:, 3]).sum()) * len(path.layers) == path.bytes(tokens)


def test_chunks_together_move_what_the_whole_moves():
    plan = kvloom.compile(kvloom.Side(shape(), "tp=1,page=16"), kvloom.Side(shape(), "tp=1,page=8"))
    [path] = plan.paths()
    source = kvloom.PageTable(np.array([5, 2, 7], np.int64), 8, kvloom.PageTable.Use.source)
    target = kvloom.PageTable([1, 9, 3, 4, 6, 0], 10, kvloom.PageTable.Use.target)

    def moved(chunk=None) -> set[tuple[int, int]]:
        rows = np.asarray(kvloom.bind(path, source, target, (5, 48), chunk)).tolist()
        return {(s + i * ss + b, t + i * ts + b) for s, t, n, count, ss, ts in rows for i in range(count) for b in range(n)}

    whole, first, second = moved(), moved((5, 20)), moved((20, 48))
    assert first | second == whole
    assert not first & second


def test_text_and_bytes_read_back():
    plan = kvloom.compile(*sides(*JOBS[0][:3]))
    for again in (kvloom.Plan.parse(str(plan)), kvloom.Plan.decode(plan.encode())):
        assert str(again) == str(plan)
        assert again.digest == plan.digest
    side = plan.source
    assert kvloom.Side.parse(str(side)) == side == kvloom.Side.decode(side.encode())
    assert hash(kvloom.Side.parse(str(side))) == hash(side)
    assert kvloom.Sharding(str(side.sharding)) == side.sharding
    assert side != plan.target and side != 3


def test_a_path_outlives_its_plan():
    paths = kvloom.compile(*sides(*JOBS[0][:3])).paths()
    assert len(paths) > 32
    assert paths[0].group in ("latent", "index_k")
    assert str(paths[-1].tokens[0]).endswith("inf")


def test_a_notebook_shows_the_picture_in_a_frame():
    plan = kvloom.compile(*sides(*JOBS[0][:3]))
    shown, page = plan._repr_html_(), plan.html((1000, 4096))
    assert shown.startswith("<iframe") and shown.count("<") == 2  # the page inside is escaped
    assert page.startswith("<!") and "http" not in page.replace("http://www.w3.org", "")


def test_explain_gives_reasons():
    plan = kvloom.compile(*sides(*JOBS[1][:3]))
    assert plan.explain((0, 1024), source=3, target=0).startswith("prefill 3 to decode 0, tokens [0, 1024)")
    assert plan.explain((0, 1024)) + "\n" == command_line("plan", *words(*JOBS[1]), "--explain").stdout


def test_an_engines_strides_make_a_layout():
    side = kvloom.Side(shape(), "tp=1,page=16")
    group = side.shape.groups[0]
    tensor = np.zeros((8, 4, 16, 64), np.uint8)  # [blocks, heads, tokens, k|v]
    layout = kvloom.PageLayout.strided(group, 4, 16, *tensor.strides)
    assert layout == kvloom.PageLayout.make("packed-hnd", group, 4, 16)
    changed = side.with_layout("kv", layout)
    assert changed.groups[0].layout == layout != side.groups[0].layout
    assert [(p.name, p.offset, p.token_stride) for p in layout.plane_layouts] == [("k", 0, 64), ("v", 32, 64)]


def test_sides_answer_questions():
    side = kvloom.Side(shape(layers=6), "tp=2,dcp=2,pp=3,page=16")
    assert side.ranks == 6 and side.sharding.pp == 3
    assert side.held(4) == [("kv", 4), ("kv", 5)]
    assert side.columns("kv", 0, 64) == 2  # of 4 pages
    assert side.groups[0].token_rule is kvloom.TokenRule.cyclic and side.groups[0].stripe == 16
    assert [place.tokens for place in side.groups[0].places] == [0, 1] * 3
    plan = kvloom.compile(side, kvloom.Side(shape(layers=6), "tp=1"))
    assert kvloom.granted_sources(plan, 0) == [0, 1, 2, 3, 4, 5] and kvloom.granting_targets(plan, 3) == [0]


def test_sets_are_sets():
    every = kvloom.StridedSet("4+2/8*inf")
    assert (5 in every, 6 in every, every.count_below(20), every.end) == (True, False, 4, None)
    assert kvloom.StridedSet(str(every)) == every


def test_equal_values_are_one_key():
    def values() -> list[object]:
        side = kvloom.Side(shape(), "tp=2,page=16")
        layout = side.groups[0].layout
        group = side.shape.groups[0]
        window = kvloom.Window(kvloom.Window.Kind.sliding, 128)
        key = kvloom.TransferKey("a", 2)
        return [side, side.shape, group, group.planes[0], layout, layout.plane_layouts[0], window, side.sharding, kvloom.StridedSet("0+4"), key]

    first, second = values(), values()
    assert all(a is not b and a == b and hash(a) == hash(b) and len({a, b}) == 1 for a, b in zip(first, second, strict=True))


def test_a_sum_wants_an_end():
    side = kvloom.Side(shape(), "tp=1")
    [path] = kvloom.compile(side, side).paths()
    plan = kvloom.compile(side, side)
    calls = (path.bytes, plan.html, plan.to_dict, lambda words: kvloom.checksum(side, "kv", 0, 0, np.zeros(4096, np.uint8), [0], words))
    for call in calls:
        with pytest.raises(kvloom.InvalidArgument, match="how many tokens"):
            call((5, None))
    with pytest.raises(kvloom.InvalidArgument, match="how many tokens"):
        path.bytes(None)


@pytest.mark.parametrize("end", [-1, 2**48 + 1, 2**63 - 1])
def test_lengths_that_no_request_has_are_refused(end):
    side = kvloom.Side(shape(), "tp=1")
    plan = kvloom.compile(side, side)
    for call in (plan.paths()[0].bytes, plan.explain, plan.html, plan.to_dict):
        with pytest.raises(kvloom.InvalidArgument, match="wanted"):
            call((0, end))
    with pytest.raises(kvloom.InvalidArgument, match="wanted"):
        side.columns("kv", 0, end)
    with pytest.raises(kvloom.InvalidArgument, match="of a request of 7"):
        side.columns("kv", 0, 8, 7)
