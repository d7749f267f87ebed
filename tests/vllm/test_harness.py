"""The harness itself: a server and an engine in the process agree, and nothing is left of a server that was stopped, killed or abandoned."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from ask import complete, prompts_of, stream, together
from harness import Server, ServerError, until
from settings import HERE, of

LENGTHS = [1, 20, 127, 128, 129, 300, 700, 1500]


@pytest.fixture(scope="module")
def server():
    with Server(of("llama")) as one:
        yield one


def in_a_process(code: str) -> str:
    """What a Python of its own prints last. @error it fails: AssertionError with its words."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def gone(process: int) -> bool:
    """Whether it has ended: there is none, or only what is left for its parent to collect."""
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_server_and_an_engine_in_the_process_generate_the_same_tokens(server):
    prompts = prompts_of(LENGTHS)
    served = [list(answer.tokens) for answer in together(server.url, prompts, 16)]
    alone = in_a_process(f"""
        import json
        from ask import prompts_of
        from in_process import Engine
        from settings import of
        with Engine(of("llama")) as engine:
            print(json.dumps([engine.tokens([prompt], 16)[0] for prompt in prompts_of({LENGTHS})]))
    """)
    assert json.loads(alone) == served


def test_blocks_are_counted_while_a_request_runs_and_after_its_client_has_left(server):
    with stream(server.url, prompts_of([600])[0], 1200) as reading:
        reading.next()
        held = server.pool()
        assert held.blocks - held.free >= 5
        assert held.requests == {"RUNNING": 1}
    assert server.wait_quiet(10).quiet


def test_an_emptied_prefix_cache_has_no_block(server):
    complete(server.url, prompts_of([300])[0], 2)
    assert server.pool().cached > 0
    server.forget_prefixes()
    assert server.pool().cached == 0


def test_nothing_is_left_of_a_server_that_is_killed_and_it_starts_again(server):
    prompt = prompts_of([200])[0]
    before = complete(server.url, prompt).tokens
    old = list(server.processes())
    assert len(old) >= 3, "the API server, the engine and a worker"
    server.kill()
    until(lambda: all(gone(process) for process in old), 10, "all processes of a server that was killed have ended")
    with pytest.raises((ServerError, OSError)):
        complete(server.url, prompt, deadline=5)
    server.start()
    server.wait()
    assert complete(server.url, prompt).tokens == before
    assert not set(old) & set(server.processes())


def test_a_server_that_is_told_to_stop_leaves_no_process_behind(server):
    old = list(server.processes())
    assert server.stop() == []
    assert all(gone(process) for process in old)


def test_nothing_is_left_when_the_test_itself_is_killed():
    holder = subprocess.Popen(
        [sys.executable, "-c", "import time, harness, settings\n"
         "one = harness.Server(settings.of('llama')); one.start()\n"
         "harness.until(lambda: len(one.processes()) >= 2, 120, 'it begins')\n"
         "print(*one.processes(), flush=True); time.sleep(600)"],
        cwd=HERE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    started = [int(word) for word in holder.stdout.readline().split()]
    assert started
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    until(lambda: all(gone(process) for process in started), 20, "all processes of a test that was killed have ended")


def test_nothing_is_left_when_the_tests_group_is_ended():
    """As timeout(1) does it: one SIGTERM to the test and to the keepers that it started; what they keep is in sessions of its own."""
    holder = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys, time\n"
         "keeper = [sys.executable, 'keeper.py', '/dev/null', 'sh', '-c', 'setsid sleep 600 & echo $!; sleep 600']\n"
         "kept = subprocess.Popen(keeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
         "print(int(kept.stdout.readline()), kept.pid, flush=True); time.sleep(600)"],
        cwd=HERE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    kept, keeper = map(int, holder.stdout.readline().split())
    os.killpg(holder.pid, signal.SIGTERM)
    holder.wait()
    holder.stdout.close()
    until(lambda: gone(kept) and gone(keeper), 20, "all that the keeper kept, and the keeper, have ended")
