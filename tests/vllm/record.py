"""record.py SCENARIO... | all [--into FOLDER]: runs scenarios in a real vLLM with the recording connector, and writes recordings/SCENARIO.jsonl.

Each scenario is a function of an engine that is stepped by hand, so a recording is the same each time it is made (test_recordings.py asks that).
The first line of a recording says of which vLLM and which scenario it is. Each runs in a process of its own.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from ask import prompts_of
from settings import HERE, Settings, connector, of

RECORDINGS = HERE / "recordings"
SEED = 7


def prompt(length: int, seed: int = SEED) -> list[int]:
    return prompts_of([length], seed)[0]


def one_prompt(engine) -> None:
    """100 tokens, one step; 4 tokens out."""
    engine.add("a", prompt(100), 4)
    engine.drain()


def chunked(engine) -> None:
    """1,500 tokens in six chunks of 256 at most."""
    engine.add("a", prompt(1500), 3)
    engine.drain()


def eight_at_once(engine) -> None:
    """Eight prompts of 20 to 300 tokens, added together: chunks are shared, and new ones run beside old ones."""
    for number in range(8):
        engine.add(f"r{number}", prompt(20 + 40 * number, number), 4)
    engine.drain()


def prefix_hit(engine) -> None:
    """600 tokens; then the same 512 and others: four blocks are found in the local cache."""
    engine.add("a", prompt(600), 2)
    engine.drain()
    engine.add("b", prompt(600)[:512] + prompt(88, 1), 2)
    engine.drain()


def abort_waiting(engine) -> None:
    """One runs at a time; the second leaves before it was scheduled."""
    engine.add("a", prompt(300), 4)
    engine.add("b", prompt(300, 1), 4)
    engine.step()
    engine.abort("b")
    engine.drain()
    engine.add("c", prompt(20, 2), 2)  # whose step says what ended
    engine.drain()


def abort_running(engine) -> None:
    """One leaves between two chunks of its prompt, another while it generates. Their blocks are kept for two steps."""
    engine.add("a", prompt(1000), 4, {"record": {"hold": 2}})
    engine.step()
    engine.step()
    engine.abort("a")
    engine.add("b", prompt(100, 1), 50, {"record": {"hold": 2}})
    for _ in range(4):
        engine.step()
    engine.abort("b")
    engine.drain()


def preemption(engine) -> None:
    """Two requests outgrow a pool of 11 blocks of 32: one is preempted, and resumes behind its blocks that are still cached."""
    engine.add("a", prompt(150), 14)
    engine.add("b", prompt(150, 1), 14)
    engine.drain()


def async_load(engine) -> None:
    """599 of 600 tokens come from elsewhere, in three steps; the last one is computed here."""
    engine.add("a", prompt(600), 3, {"record": {"match": "but the last", "async": True, "steps": 3}})
    engine.drain()


def async_load_all(engine) -> None:
    """All 600 tokens come from elsewhere; the last one is computed again, since its output is needed. Another request runs meanwhile."""
    engine.add("a", prompt(100, 1), 8)
    engine.step()
    engine.add("b", prompt(600), 3, {"record": {"match": "all", "async": True, "steps": 3}})
    engine.drain()


def async_load_after_hit(engine) -> None:
    """256 tokens are in the local cache, all others but the last come from elsewhere."""
    engine.add("a", prompt(256) + prompt(10, 1), 2)
    engine.drain()
    engine.add("b", prompt(600), 3, {"record": {"match": "but the last", "async": True, "steps": 2}})
    engine.drain()


def async_load_later(engine) -> None:
    """Asked three times how much there is, it says twice "later"."""
    engine.add("a", prompt(300), 2, {"record": {"match": "all", "async": True, "later": 2}})
    engine.drain()


def sync_load(engine) -> None:
    """599 of 600 tokens are loaded within the step that computes the last one."""
    engine.add("a", prompt(600), 3, {"record": {"match": "but the last", "async": False}})
    engine.drain()


def abort_loading(engine) -> None:
    """The client leaves while the load goes on: blocks are kept until it ends."""
    engine.add("a", prompt(600), 3, {"record": {"match": "but the last", "async": True, "steps": 4}})
    engine.step()
    engine.step()
    engine.abort("a")
    engine.drain()


def failed_load_recompute(engine) -> None:
    """A load fails, told by request; the policy is to compute it here."""
    engine.add("a", prompt(600), 3, {"record": {"match": "but the last", "async": True, "steps": 2, "fail": "request"}})
    engine.drain()


def failed_blocks_recompute(engine) -> None:
    """The same, told by block: the four before it hold."""
    engine.add("a", prompt(600), 3, {"record": {"match": "all", "async": True, "steps": 2, "fail": "blocks"}})
    engine.drain()


def failed_load_fail(engine) -> None:
    """A load fails, and the policy is that its request does."""
    engine.add("a", prompt(600), 3, {"record": {"match": "but the last", "async": True, "steps": 2, "fail": "request"}})
    engine.drain()


def held(engine) -> None:
    """As on a prefill server: one token, and blocks that are kept for three steps after the end. Two overlap."""
    engine.add("a", prompt(300), 1, {"record": {"hold": 3}})
    engine.add("b", prompt(400, 1), 1, {"record": {"hold": 3}})
    engine.drain()


def window(engine) -> None:
    """A hybrid model, 700 tokens: three cache groups, and blocks that the window has left behind become the null block."""
    engine.add("a", prompt(700), 3, {"record": {"hold": 1}})
    engine.drain()


def window_load(engine) -> None:
    """The hybrid model on the other side: 699 of 700 tokens come from elsewhere."""
    engine.add("a", prompt(700), 3, {"record": {"match": "but the last", "async": True, "steps": 2}})
    engine.drain()


SCENARIOS = {
    one_prompt: {}, chunked: {}, eight_at_once: {}, prefix_hit: {}, abort_waiting: {"at_once": 1}, abort_running: {},
    preemption: {"block": 32, "blocks": 12, "max_length": 320}, async_load: {}, async_load_all: {}, async_load_after_hit: {}, async_load_later: {}, sync_load: {},
    abort_loading: {}, failed_load_recompute: {"policy": "recompute"}, failed_blocks_recompute: {"policy": "recompute"},
    failed_load_fail: {"policy": "fail"}, held: {"role": "kv_producer"}, window: {"model": "window", "role": "kv_producer"},
    window_load: {"model": "window"},
}  # fmt: skip
NAMES = {scenario.__name__: scenario for scenario in SCENARIOS}


def settings_of(name: str, file: pathlib.Path) -> Settings:
    """What a scenario's engine is set up with, recording into `file`."""
    changes = dict(SCENARIOS[NAMES[name]])
    config = connector("RecordConnector", "record_connector", changes.pop("role", "kv_both"), file=str(file))
    if policy := changes.pop("policy", None):
        config["kv_load_failure_policy"] = policy
    return of(changes.pop("model", "llama"), connector=config, **changes)


def record(name: str, file: pathlib.Path) -> None:
    """Run one scenario in this process."""
    from in_process import Engine

    file.unlink(missing_ok=True)
    with Engine(settings_of(name, file)) as engine:
        NAMES[name](engine)
        pool = engine.pool()
    if not pool.quiet:
        raise RuntimeError(f"{name} left something behind: {pool}")
    import vllm

    about = {"vllm": vllm.__version__.partition("+")[0], "scenario": name, "means": NAMES[name].__doc__.strip()}
    file.write_text(json.dumps(about) + "\n" + file.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", nargs="+", choices=[*NAMES, "all"])
    parser.add_argument("--into", type=pathlib.Path, default=RECORDINGS)
    asked = parser.parse_args()
    names = list(NAMES) if "all" in asked.scenario else asked.scenario
    asked.into.mkdir(parents=True, exist_ok=True)
    if len(names) == 1:
        record(names[0], asked.into / f"{names[0]}.jsonl")
        return 0
    failed = [name for name in names if subprocess.run([sys.executable, __file__, name, "--into", str(asked.into)]).returncode]
    print(f"recorded {len(names) - len(failed)} of {len(names)}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
