#!/usr/bin/env python3
"""kvloom run, with its real processes: bytes for many shardings, and nothing left behind however it ends."""
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest

CLI = os.environ["KVLOOM_CLI"]
SOURCE = os.environ["KVLOOM_SOURCE_DIR"]
DEADLINE = 120  # seconds, for anything that is waited for


def sample(name):
    return os.path.join(SOURCE, "samples", name + ".json")


def words(model, prefill, decode, tokens, *more):
    return [CLI, "run", "--model", sample(model), "--prefill", prefill, "--decode", decode, "--tokens", str(tokens), "--html", "", *more]


def run(*args):
    done = subprocess.run(words(*args, "--seed", "5", "--json"), capture_output=True, text=True, timeout=DEADLINE, check=False)
    return done, (json.loads(done.stdout) if done.returncode == 0 else None)


def named_files():
    """All names in /dev/shm, and of /tmp those that name us: other tests, beside this one, have folders of their own there."""
    ours = {name for name in os.listdir("/tmp") if "kvloom" in name}
    return ours | {os.path.join("/dev/shm", name) for name in os.listdir("/dev/shm")}


def ranks_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
        return [int(child) for child in children.read().split()]


def wait_gone(pidfds):
    """Until every process behind these descriptors has ended."""
    end = time.monotonic() + DEADLINE
    for fd in pidfds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0, end - time.monotonic()) * 1000):
            raise AssertionError("a rank outlived the run")
        os.close(fd)


class Started:
    """A run whose stderr is a terminal, so that its progress shows which phase it is in."""

    def __init__(self, *args, folder):
        self.terminal, ours = pty.openpty()
        self.process = subprocess.Popen(words(*args), stdout=subprocess.DEVNULL, stderr=ours, cwd=folder, env={**os.environ, "TMPDIR": folder})
        os.close(ours)
        self.text = ""

    def until(self, phase):
        end = time.monotonic() + DEADLINE
        while phase not in self.text:
            ready, _, _ = select.select([self.terminal], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise AssertionError(f"no '{phase}' in: {self.text}")
            self.text += os.read(self.terminal, 4096).decode()
        self.ranks = ranks_of(self.process.pid)
        self.pidfds = [os.pidfd_open(pid) for pid in self.ranks]

    def end(self):
        code = self.process.wait(DEADLINE)
        while True:
            try:
                chunk = os.read(self.terminal, 4096)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            self.text += chunk.decode()
        os.close(self.terminal)
        wait_gone(self.pidfds)
        return code


class Bytes(unittest.TestCase):
    def check(self, *args, naive=None):
        done, report = run(*args)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(report["wrong_bytes"], 0)
        self.assertEqual(report["landed_bytes"], report["wanted_bytes"])
        self.assertEqual(report["sent_bytes"], report["wanted_bytes"])
        self.assertTrue(report["checksums_equal"])
        if naive is not None:
            self.assertEqual(report["naive_sent_bytes"], naive * report["sent_bytes"])
        return report

    def test_the_main_job_in_small(self):
        report = self.check("glm-5.2", "cp=8:layers", "dcp=4", 2048, "--prefix", "1000", naive=4)
        # 48,408 B a token (78 x 576 latent, 576 draft, 22 x 132 index keys), tokens 1000 to 2047, each once
        self.assertEqual(report["wanted_bytes"], 1048 * (79 * 576 + 22 * 132))

    def test_stripe_1_with_a_replicated_draft(self):
        self.check("glm-5.2", "cp=8:layers", "dcp=4:stripe=1,draft:replicated,draft_index_k:replicated", 600, "--kv-cache-dtype", "fp8-dsa")

    def test_zigzag_to_pages_and_ownership_by_value(self):
        self.check("glm-5.2", "cp=4:zigzag", "dcp=4", 1000, "--prefix", "64")
        self.check("glm-5.2", "tp=8", "dcp=4:value", 1000, "--prefix", "64")
        self.check("glm-5.2", "dcp=4:value", "dcp=2:stripe=1", 300)

    def test_heads_page_sizes_and_layouts(self):
        self.check("llama-3.1-8b", "tp=2,page=16,layout=hnd", "tp=4,layout=packed-nhd", 333, "--prefix", "33")
        self.check("llama-3.1-8b", "tp=16", "tp=2,dcp=2:stripe=16", 200)
        self.check("llama-3.1-8b", "pp=4", "pp=2:10,22", 100)

    def test_keys_that_are_transposed_inside_a_page(self):
        self.check("qwen3-0.6b", "tp=2,layout=cpu", "tp=1", 100, "--prefix", "7")

    def test_windows_and_states(self):
        self.check("gpt-oss-120b", "tp=2", "tp=4", 400)
        self.check("nemotron-3-nano-30b", "tp=2", "tp=4", 100)

    def test_more_ranks_than_layers_and_nothing_to_send(self):
        self.check("qwen3-0.6b", "cp=40:layers", "tp=1", 100)
        self.check("glm-5.2", "cp=8:layers", "dcp=4", 100, "--prefix", "100")


class Endings(unittest.TestCase):
    MAIN = ("glm-5.2", "cp=8:layers", "dcp=4", 4096, "--prefix", "1000")

    def setUp(self):
        self.files = named_files()
        self.folder = tempfile.TemporaryDirectory()  # where the run works, and keeps temporary files if it keeps any

    def tearDown(self):
        self.assertEqual(os.listdir(self.folder.name), [], "files were left behind")
        self.folder.cleanup()
        self.assertEqual(named_files() - self.files, set(), "files were left behind")

    def start(self, *more):
        return Started(*self.MAIN, *more, folder=self.folder.name)

    def kill_rank(self, index, phase):
        started = self.start()
        started.until(phase)
        self.assertEqual(len(started.ranks), 12)
        os.kill(started.ranks[index], signal.SIGKILL)
        self.assertEqual(started.end(), 1, started.text)
        return started.text

    def test_a_prefill_rank_is_killed_while_it_fills(self):
        self.assertIn("prefill rank 3 was killed by signal 9", self.kill_rank(3, "filling the caches"))

    def test_a_decode_rank_is_killed_while_it_fills(self):
        self.assertIn("decode rank 1 was killed by signal 9", self.kill_rank(9, "filling the caches"))

    def test_a_decode_rank_is_killed_while_it_checks(self):
        self.assertIn("decode rank 0 was killed by signal 9", self.kill_rank(8, "checking every byte"))

    # Bytes move from the first word of the bar on; checking takes much longer, so whenever the signal arrives the run is not over.
    def test_a_prefill_rank_is_killed_while_bytes_move(self):
        self.assertIn("prefill rank 5 was killed by signal 9", self.kill_rank(5, "kvloom ["))

    def test_a_decode_rank_is_killed_while_bytes_move(self):
        self.assertIn("decode rank 2 was killed by signal 9", self.kill_rank(10, "kvloom ["))

    def test_the_first_process_is_killed(self):
        for phase in ("filling the caches", "kvloom [", "checking every byte"):
            started = self.start()
            started.until(phase)
            started.process.kill()
            self.assertEqual(started.end(), -signal.SIGKILL)

    def test_ctrl_c(self):
        for phase in ("filling the caches", "kvloom [", "checking every byte"):
            started = self.start()
            started.until(phase)
            started.process.send_signal(signal.SIGINT)
            self.assertEqual(started.end(), 1, started.text)
            self.assertIn("stopped by signal 2; all ranks are ended", started.text)

    def test_a_frozen_rank_ends_the_run(self):
        started = self.start("--patience", "1")
        started.until("filling the caches")
        os.kill(started.ranks[2], signal.SIGSTOP)
        self.assertEqual(started.end(), 1, started.text)
        self.assertIn("nothing was heard for 1 s; still waited for:", started.text)
        self.assertIn("prefill rank 2", started.text)


class Refusals(unittest.TestCase):
    def refused(self, code, sentence, *args):
        done, _ = run(*args)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn(sentence, done.stderr)

    def test_too_little_memory_is_said_before_anything_is_allocated(self):
        self.refused(1, "of which", "glm-5.2", "cp=8:layers", "dcp=4", 100_000_000)

    def test_a_prefix_beyond_the_tokens(self):
        self.refused(2, "prefix", "glm-5.2", "cp=8:layers", "dcp=4", 100, "--prefix", "101")

    def test_impossible_pairs_are_refused_with_the_reason(self):
        self.refused(2, "say draft:none for decode", "glm-5.2", "cp=8:layers,draft:none", "dcp=4", 100)


if __name__ == "__main__":
    unittest.main(argv=sys.argv, verbosity=2)
