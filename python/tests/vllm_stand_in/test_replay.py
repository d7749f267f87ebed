"""The stand-in proves itself: the recording connector, driven by a recording, writes that recording again; a wrong connector is found out."""

import importlib
import json
import pathlib
import sys

import pytest
from vllm_stand_in import RELEASES, Differs, Release, Replay, installed, read, recordings
from vllm_stand_in.recording import FOLDER, Recording

sys.path.insert(0, str(FOLDER.parent))


def record_connector():
    return importlib.import_module("record_connector").RecordConnector


def told_by_request(recording: Recording) -> bool:
    """Whether a load fails in it, told by request: releases before 0.30 know no such thing."""
    return any(call.name == "get_transfer_results" and call.gives[2] for call in recording.calls())


def written(file: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def expected(recording: Recording, release: str) -> list[dict]:
    """The recording's lines in the order and with the names of `release`."""
    lines = []
    for step in recording.steps:
        for call in Release(release).order(list(step)):
            line = {"side": call.side, "call": call.name, "with": call.given, "gives": call.gives}
            if call.name == "get_finished":
                line["gives"] = call.gives[:2]
            if call.name == "build_connector_meta" and not Release(release).loads_after_layers:
                line["with"] = {**call.given, "sync_loads": None}
            lines.append({name: value for name, value in line.items() if value is not None})
    return lines


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", recordings())
def test_the_recording_connector_writes_the_recording_again(name, release, tmp_path):
    recording = read(name)
    if told_by_request(recording) and not Release(release).has("get_transfer_results"):
        recording = read("async_load")  # the same load, and it succeeds
    with installed(release):
        Replay(record_connector(), recording, release, extra={"file": str(tmp_path / "again")}).run()
    assert written(tmp_path / "again") == expected(recording, release)


def test_there_are_recordings_of_every_way_that_a_request_goes():
    wanted = {"one_prompt", "chunked", "eight_at_once", "prefix_hit", "abort_waiting", "abort_running", "preemption", "async_load", "async_load_all"}
    wanted |= {"async_load_after_hit", "async_load_later", "sync_load", "abort_loading", "failed_load_recompute", "failed_blocks_recompute"}
    wanted |= {"failed_load_fail", "held", "window", "window_load"}
    assert wanted <= set(recordings())


def replay_of(change, name: str, tmp_path, **more):
    """A replay of the recording connector with some methods changed. `change` makes the subclass."""
    return Replay(change(record_connector()), read(name), extra={"file": str(tmp_path / "again")}, **more)


def test_a_load_that_takes_longer_than_recorded_is_waited_for(tmp_path):
    def slow(base):
        class Slow(base):
            asked = 0

            def get_transfer_results(self, finished):
                results = super().get_transfer_results(finished)
                self.late = getattr(self, "late", set()) | results.finished_recving
                self.asked += 1
                results.finished_recving = self.late if self.asked > 20 else set()
                self.late = self.late - results.finished_recving
                return results

        return Slow

    with installed():
        replay = replay_of(slow, "async_load", tmp_path)
        replay.run()
        assert replay.sides["worker"].asked > 20


def test_a_load_that_never_ends_is_found_out(tmp_path):
    def stuck(base):
        class Stuck(base):
            def get_transfer_results(self, finished):
                results = super().get_transfer_results(finished)
                results.finished_recving = set()
                return results

        return Stuck

    with installed(), pytest.raises(Differs, match="not reported: .*'recving': {'a'}"):
        replay_of(stuck, "async_load", tmp_path, patience=0.1).run()


def test_a_report_that_comes_twice_is_found_out(tmp_path):
    def twice(base):
        class Twice(base):
            def get_transfer_results(self, finished):
                results = super().get_transfer_results(finished)
                self.all = getattr(self, "all", set()) | results.finished_sending
                results.finished_sending = set(self.all)
                return results

        return Twice

    with installed(), pytest.raises(Differs, match="finished sending, and not open"):
        replay_of(twice, "abort_running", tmp_path).run()


def test_another_answer_than_the_recorded_one_is_found_out(tmp_path):
    def other(base):
        class Other(base):
            def get_num_new_matched_tokens(self, request, computed):
                return 16, True

        return Other

    with installed(), pytest.raises(Differs, match=r"gave \(16, True\), and in the recording \(0, False\)"):
        replay_of(other, "one_prompt", tmp_path).run()


def test_blocks_that_are_kept_unlike_the_recording_are_found_out(tmp_path):
    def keeps(base):
        class Keeps(base):
            def request_finished_all_groups(self, request, blocks):
                return True, None

        return Keeps

    with installed(), pytest.raises(Differs, match="kept: True, and in the recording: False"):
        replay_of(keeps, "one_prompt", tmp_path).run()


def test_the_stand_in_leaves_no_module_behind():
    before = sys.modules.get("vllm"), sys.modules.get("kvloom.vllm")
    with installed():
        import vllm  # noqa: F401

        import kvloom.vllm  # noqa: F401
    assert before == (sys.modules.get("vllm"), sys.modules.get("kvloom.vllm"))


def test_what_was_imported_within_a_release_is_there_again_and_in_no_other():
    def found(release: str):
        with installed(release):
            return importlib.import_module("kvloom.vllm.connector"), importlib.import_module("vllm")

    newest, oldest = found("0.32.0"), found("0.24.0")
    assert newest == found("0.32.0") and oldest == found("0.24.0")
    assert not set(newest) & set(oldest) and [vllm.__version__ for _, vllm in (newest, oldest)] == ["0.32.0", "0.24.0"]
    assert "get_transfer_results" in dir(newest[0].base.KVConnectorBase_V1) and "get_transfer_results" not in dir(oldest[0].base.KVConnectorBase_V1)
