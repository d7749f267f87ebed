"""The witness's comparison itself: it has to see what is wrong. Without vLLM; what it writes there is test_serving.py's and test_serving_kinds.py's."""

import json
import pathlib

from witness import MASK, Seen, compare


def write(folder: pathlib.Path, side: str, rank: int, begin: int, end: int, sums: dict[str, int], key: str = "k") -> None:
    (folder / f"{key}.{side}.{rank}.json").write_text(json.dumps({"begin": begin, "end": end, "sums": sums}))


def test_sums_are_added_over_the_ranks_of_a_side(tmp_path):
    write(tmp_path, "prefill", 0, 0, 100, {"kv 0 0 64": MASK, "kv 0 64 100": 5})
    write(tmp_path, "prefill", 1, 0, 100, {"kv 0 0 64": 3, "kv 0 64 100": 1})
    write(tmp_path, "decode", 0, 0, 100, {"kv 0 0 64": 2, "kv 0 64 100": 6})
    assert compare(tmp_path) == [Seen("k", 0, 100, 2, ())]


def test_what_decode_had_itself_is_not_compared(tmp_path):
    write(tmp_path, "prefill", 0, 0, 100, {"kv 0 0 64": 1, "kv 0 64 100": 2})
    write(tmp_path, "decode", 0, 64, 100, {"kv 0 64 100": 2})
    assert compare(tmp_path) == [Seen("k", 64, 100, 1, ())]


def test_other_bytes_missing_words_and_ranks_that_disagree_are_seen(tmp_path):
    write(tmp_path, "prefill", 0, 0, 64, {"kv 0 0 64": 1}, "bytes")
    write(tmp_path, "decode", 0, 0, 64, {"kv 0 0 64": 2}, "bytes")
    write(tmp_path, "decode", 0, 0, 64, {"kv 0 0 64": 2}, "missing")
    write(tmp_path, "prefill", 0, 0, 64, {"kv 0 0 64": 3}, "ranks")
    write(tmp_path, "decode", 0, 0, 64, {"kv 0 0 64": 2}, "ranks")
    write(tmp_path, "decode", 1, 1, 64, {"kv 0 0 64": 1}, "ranks")
    assert [one.key for one in compare(tmp_path) if one.wrong] == ["bytes", "missing", "ranks"]


def test_a_load_that_failed_on_one_rank_is_told_as_that(tmp_path):
    write(tmp_path, "prefill", 0, 0, 64, {"kv 0 0 64": 1})
    write(tmp_path, "decode", 0, 0, 64, {"kv 0 0 64": 1})
    write(tmp_path, "failed", 1, 0, 64, {})
    assert compare(tmp_path) == [Seen("k", 0, 64, 1, ("the load of rank 1 failed",))]
