#!/usr/bin/env python3
"""kvloom run, run --stream and soak between processes whose caches are in GPU memory: every byte, for many shardings. Prints `no GPU` where there is none."""
import json
import os
import subprocess
import sys
import unittest

CLI = os.environ["KVLOOM_CLI"]
SOURCE = os.environ["KVLOOM_SOURCE_DIR"]
DEADLINE = 250  # seconds, for one command


def kvloom(*words):
    done = subprocess.run([CLI, *map(str, words), "--json"], capture_output=True, text=True, timeout=DEADLINE, check=False)
    return done, (json.loads(done.stdout) if done.stdout else None)


def job(model, prefill, decode, tokens):
    sample = os.path.join(SOURCE, "samples", model + ".json")
    return ["run", "--model", sample, "--prefill", prefill, "--decode", decode, "--tokens", tokens, "--seed", 5, "--transport", "cuda"]


CUDA = kvloom("doctor")[1]["cuda"]
ALL = [str(gpu["ordinal"]) for gpu in CUDA["gpus"]]


@unittest.skipUnless(CUDA["works"], CUDA["why"])
class Bytes(unittest.TestCase):
    def check(self, *args, more=()):
        done, report = kvloom(*job(*args), "--html", "", *more)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(report["transport"], "cuda")
        self.assertEqual(report["wrong_bytes"], 0)
        self.assertGreater(report["wanted_bytes"], 0)
        self.assertEqual(report["landed_bytes"], report["wanted_bytes"])
        self.assertEqual(report["sent_bytes"], report["wanted_bytes"])
        self.assertTrue(report["checksums_equal"])
        self.assertEqual(report["naive_sent_bytes"], 0)
        self.assertNotIn("memcpy_gb_per_s", report)

    def test_the_main_job_in_small(self):
        self.check("glm-5.2", "cp=8:layers", "dcp=4", 2048, more=("--prefix", 1000))

    def test_on_one_gpu_and_the_other_way_round(self):
        self.check("glm-5.2", "cp=2:layers", "dcp=2", 600, more=("--prefill-gpus", 0, "--decode-gpus", 0))
        self.check("glm-5.2", "cp=2:layers", "dcp=2", 600, more=("--prefill-gpus", ",".join(ALL), "--decode-gpus", ",".join(reversed(ALL))))

    def test_stripe_1_with_a_replicated_draft(self):
        self.check("glm-5.2", "cp=8:layers", "dcp=4:stripe=1,draft:replicated,draft_index_k:replicated", 600)

    def test_ownership_by_value(self):
        self.check("glm-5.2", "tp=8", "dcp=4:value", 1000, more=("--prefix", 64))

    def test_heads_page_sizes_and_layouts(self):
        self.check("llama-3.1-8b", "tp=2,page=16,layout=hnd", "tp=4,layout=packed-nhd", 333, more=("--prefix", 33))
        self.check("qwen3-0.6b", "tp=2,layout=cpu", "tp=1", 100, more=("--prefix", 7))

    def test_windows_and_states(self):
        self.check("gpt-oss-120b", "tp=2", "tp=4", 400)
        self.check("nemotron-3-nano-30b", "tp=2", "tp=4", 100)

    def test_streamed(self):
        done, report = kvloom(*job("qwen3-0.6b", "tp=2", "tp=1", 512), "--stream", "--chunk", 128, "--requests", 4, "--layer-time", "200us")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(report["transport"], "cuda")
        self.assertEqual(report["wrong_bytes"], 0)
        self.assertEqual(len(report["requests"]), 4)
        self.assertTrue(all(request["bytes"] > 0 for request in report["requests"]))

    def test_streamed_beside_a_load(self):
        done, report = kvloom(*job("qwen3-0.6b", "tp=1", "tp=1", 512), "--stream", "--chunk", 256, "--load", "gemm", "--decode-load", "gemm", "--rounds", 2)
        if "no cuBLAS" in done.stderr:
            self.assertIn("--cublas PATH", done.stderr)
            return
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(report["wrong_bytes"], 0)
        self.assertEqual(len(report["prefill_slowed_rounds"]), 2)
        layers = report["layer_compute_ms"]
        self.assertEqual((layers["alone"]["count"], layers["with_push"]["count"], layers["one_shot"]["count"]), (2 * 2 * 28, 2 * 2 * 28, 2 * 28))
        self.assertGreater(layers["alone"]["mean"], 0)
        self.assertGreater(report["decode_step_ms"]["with_push"]["count"], 0)
        self.assertGreater(report["decode_step_bytes"], 1 << 30)
        self.assertEqual(report["shares_gpu"], report["prefill_gpus"] == report["decode_gpus"])

    def test_a_cublas_that_is_none(self):
        done, _ = kvloom(*job("qwen3-0.6b", "tp=1", "tp=1", 64), "--stream", "--load", "gemm", "--cublas", "/nowhere/libcublas.so.13")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--cublas /nowhere/libcublas.so.13: ", done.stderr)
        self.assertIn("say the file libcublas.so.13", done.stderr)

    def test_ranks_that_die_under_load(self):
        done, report = kvloom("soak", "--transport", "cuda", "--requests", 120, "--kill-every", 40, "--seed", 7)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(report["wrong_bytes"], 0)
        self.assertEqual(report["kills"], 2)
        self.assertEqual(report["landed"] + report["cancelled"], 120)


if __name__ == "__main__":
    if not CUDA["works"]:
        print(f"no GPU: {CUDA['why']}")
        sys.exit(0)
    unittest.main()
