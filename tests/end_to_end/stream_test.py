#!/usr/bin/env python3
"""kvloom run --stream and kvloom soak, with their real processes."""
import json
import os
import re
import subprocess
import tempfile
import unittest

CLI = os.environ["KVLOOM_CLI"]
SOURCE = os.environ["KVLOOM_SOURCE_DIR"]
DEADLINE = 200  # seconds, for anything that is waited for
# What AddressSanitizer keeps after it was freed is no growth of ours.
ENVIRONMENT = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=8"}
SAMPLES = os.path.join(SOURCE, "samples")


def kvloom(*words):
    return subprocess.run([CLI, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE, check=False)


def stream(model, prefill, decode, *more):
    return kvloom("run", "--model", os.path.join(SAMPLES, model + ".json"), "--prefill", prefill, "--decode", decode, "--stream",
                  "--layer-time", "100us", "--seed", "5", *more)


class Streams(unittest.TestCase):
    def check(self, *words, requests):
        done = stream(*words, "--requests", str(requests), "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual(len(report["requests"]), requests)
        self.assertEqual(report["wrong_bytes"], 0)
        for request in report["requests"]:
            self.assertLessEqual({"id", "tokens", "prefill_alone_ms", "prefill_ms", "landed_ms", "exposed_tail_ms", "wrong_bytes"}, set(request))
            self.assertEqual(request["wrong_bytes"], 0)
            self.assertGreaterEqual(request["exposed_tail_ms"], 0)
            self.assertGreater(request["bytes"], 0)
        for name in ("exposed_tail_ms", "one_shot_tail_ms"):
            self.assertLessEqual(report[name]["p50"], report[name]["p99"])
            self.assertLessEqual(report[name]["p99"], report[name]["max"])
        self.assertGreater(report["layer_wire_ms"], 0)
        return report

    def test_one_request_in_one_chunk(self):
        self.check("qwen3-0.6b", "tp=1", "tp=1", "--tokens", "300", requests=1)

    def test_many_requests_in_chunks_from_a_trace_to_another_sharding(self):
        report = self.check("qwen3-0.6b", "tp=2", "tp=1", "--trace", os.path.join(SAMPLES, "requests.jsonl"), "--scale", "64", "--chunk", "48",
                            "--at-once", "4", requests=6)
        with open(os.path.join(SAMPLES, "requests.jsonl"), encoding="utf-8") as trace:
            lengths = [max(1, json.loads(line)["input_length"] // 64) for line in trace]
        self.assertEqual([request["tokens"] for request in report["requests"]], lengths[:6])

    def test_layers_are_pushed_fewer_times_than_they_are_computed_where_they_join(self):
        report = self.check("glm-5.2", "cp=2:layers", "dcp=2", "--tokens", "16", requests=1)
        self.assertLessEqual(report["posts"], report["layers_times_chunks"])

    def test_computing_may_burn_a_core(self):
        self.check("qwen3-0.6b", "tp=1", "tp=1", "--tokens", "64", "--busy", "--rate", "100MB", requests=2)

    def test_rounds_take_turns_and_every_one_is_checked(self):
        report = self.check("qwen3-0.6b", "tp=1", "tp=1", "--tokens", "128", "--rounds", "3", requests=2)
        self.assertEqual(report["rounds"], 3)
        self.assertEqual(len(report["prefill_slowed_rounds"]), 3)
        self.assertEqual(report["prefill_slowed"], sorted(report["prefill_slowed_rounds"])[1])
        self.assertEqual((report["load"], report["decode_load"]), ("sleep", "none"))
        self.assertNotIn("layer_compute_ms", report)

    def test_the_timeline_shows_layers_that_land_before_later_chunks_are_computed(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "timeline.json")
            done = stream("qwen3-0.6b", "tp=1", "tp=1", "--tokens", "256", "--chunk", "64", "--timeline", file)
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(file, encoding="utf-8") as trace:
                events = json.load(trace)["traceEvents"]
            self.assertEqual(os.listdir(folder), ["timeline.json"])
        streamed = [e for e in events if e.get("args", {}).get("transfer", "").endswith("#3")]
        posts = [e for e in streamed if e["name"] == "post"]
        computes = [e for e in streamed if e.get("cat") == "compute"]
        self.assertTrue(posts and computes)
        self.assertTrue({"landed", "ready"} <= {e["name"] for e in streamed})
        first_landed = min(e["ts"] + e["dur"] for e in posts)
        last_computed = max(e["ts"] for e in computes)
        self.assertLess(first_landed, last_computed)

    def test_bad_words_say_what_to_do(self):
        for words, sentence in (
            (("--layer-time", "2"), "'2' is not a length of time: write 2ms, 500us, 1.5s"),
            (("--requests", "2"), "--tokens or --trace is required"),
            (("--trace", "no-such-file"), "no-such-file: can't be read"),
            (("--trace", os.path.join(SAMPLES, "glm-5.2.json")), "glm-5.2.json line 1: not a JSON object"),
            (("--tokens", "100000000", "--requests", "100"), "fewer --requests or --tokens"),
            (("--tokens", "64", "--log", "loud"), "'loud' is no level: write debug, info, warning or error"),
        ):
            done = kvloom("run", "--model", os.path.join(SAMPLES, "qwen3-0.6b.json"), "--prefill", "tp=1", "--decode", "tp=1", "--stream", *words)
            self.assertIn(sentence, done.stderr)
            self.assertNotEqual(done.returncode, 0)

    def test_ranks_log_what_they_are_asked_to(self):
        words = ("qwen3-0.6b", "tp=1", "tp=1", "--tokens", "64")
        self.assertNotIn("kvloom[", stream(*words).stderr)
        said = stream(*words, "--log", "info").stderr
        for rank in ("prefill", "decode"):
            self.assertRegex(said, rf"kvloom\[{rank} rank 0\] info transfer \S+: landed\n")


class Soaks(unittest.TestCase):
    def test_ranks_die_and_nothing_is_lost(self):
        done = kvloom("soak", "--requests", "150", "--kill-every", "30", "--cancel-percent", "8", "--seed", "11", "--trace",
                      os.path.join(SAMPLES, "requests.jsonl"))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        last = done.stdout.strip().split("\n")[-1]
        self.assertEqual(last, "soak: 150 requests, 0 wrong bytes, 0 pages lost, 0 descriptors lost")

    def test_json_has_the_same_numbers(self):
        done = kvloom("soak", "--requests", "40", "--prefill", "cp=2:zigzag", "--decode", "dcp=3", "--kill-every", "15", "--seed", "3", "--json")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual(report["landed"] + report["cancelled"], 40)
        self.assertEqual(report["kills"], 2)
        self.assertTrue(re.fullmatch(r"0+", "".join(str(report[name]) for name in ("wrong_bytes", "lost_pages", "lost_descriptors", "lost_requests"))))


if __name__ == "__main__":
    unittest.main()
