"""What describe and plan print: golden JSON, and what has to hold between the numbers."""

import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cli  # noqa: E402
import golden  # noqa: E402


class Output(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.models = cli.Models()

    @classmethod
    def tearDownClass(cls):
        cls.models.close()

    def words(self, model, prefill, decode, *more):
        return ["--model", self.models.path(model + ".json"), "--prefill", prefill, "--decode", decode, *more]

    def test_json_is_as_it_was_read(self):
        self.maxDiff = None
        for name in golden.CASES:
            with self.subTest(name):
                self.assertEqual(golden.told(self.models, name), (golden.FOLDER / f"{name}.json").read_text(encoding="utf-8"))

    def test_the_samples_are_described(self):
        refused = []
        for sample in sorted((cli.SOURCE / "samples").glob("*.json")):
            with self.subTest(sample.name):
                code, _, words = cli.run("describe", "--model", sample)
                if code == 2 and "can't be sharded yet" in words:
                    refused.append(sample.name)
                    continue
                told = cli.read_json("describe", "--model", sample, "--memory", "80GiB")
                self.assertEqual(told["prefill"][0]["bytes_per_token"], told["bytes_per_token"])
                self.assertGreater(told["capacity"]["decode"]["tokens"], 0)
                self.assertIn(told["model"], cli.fine("describe", "--model", sample))
        self.assertLessEqual(len(refused), 3)

    def test_the_dsa_index_page_is_all_keys_then_all_scales(self):
        groups = {g["name"]: g for g in cli.read_json("describe", "--model", cli.SOURCE / "samples/glm-5.2.json")["groups"]}
        index = groups["index_k"]
        self.assertEqual((index["page_tokens"], index["page_stride"]), (64, 64 * 132))
        self.assertEqual([(p["offset"], p["token_stride"], p["bytes"]) for p in index["planes"]], [(0, 128, 128), (64 * 128, 4, 4)])
        self.assertNotIn("content_stride", index["planes"][0])
        self.assertNotIn("prefill", index)  # both sides are alike

    def test_the_cpu_layout_says_its_content_stride(self):
        told = cli.read_json("describe", *self.words("gqa8", "tp=2,layout=cpu", "tp=2"))
        group = told["groups"][0]
        self.assertEqual(group["planes"][0]["content_stride"], 2 * 64)
        self.assertEqual(group["planes"][0]["element_bytes"], 2)
        self.assertEqual(group["prefill"]["planes"], group["planes"])
        self.assertNotIn("content_stride", group["decode"]["planes"][0])

    def test_paths_add_up(self):
        told = cli.read_json("plan", *self.words("dsa", "cp=2:layers", "dcp=4", "--tokens", 1000, "--prefix", 100))
        row = cli.read_json("describe", *self.words("dsa", "cp=2:layers", "dcp=4"))["bytes_per_token"]
        self.assertEqual(told["total_bytes"], 900 * row)
        self.assertEqual(told["naive_bytes"], 4 * told["total_bytes"])
        self.assertEqual(sum(p["bytes"] for p in told["paths"]), told["total_bytes"])
        self.assertEqual(sum(p["runs"] for p in told["paths"]), told["total_runs"])
        for path in told["paths"]:
            self.assertEqual(sum(g["bytes"] for g in path["groups"]), path["bytes"])
            self.assertEqual(sorted({layer for g in path["groups"] for layer in g["layers"]}), path["layers"])
            for group in path["groups"]:
                self.assertEqual(group["bytes"], group["row_bytes"] * group["token_count"] * len(group["layers"]))

    def test_token_texts_hold_as_many_tokens_as_they_say(self):
        def size(text):
            total = 0
            for family in text.split("|"):
                first, *levels = family.split("/")
                count = int(first.split("+")[1])
                for level in levels:
                    count *= int(level.split("*")[1])
                total += count
            return total
        for prefill, decode in [("cp=2:layers", "dcp=4"), ("cp=2:zigzag", "dcp=4:stripe=1"), ("cp=4:interleave=16", "dcp=2")]:
            for path in cli.read_json("plan", *self.words("mla", prefill, decode, "--tokens", 999, "--prefix", 77))["paths"]:
                for group in path["groups"]:
                    self.assertEqual(size(group["tokens"]), group["token_count"], group)

    def test_one_plan_has_one_digest_and_text(self):
        words = self.words("mla", "cp=2:layers", "dcp=2")
        digest = cli.read_json("plan", *words)["digest"]
        text = cli.fine("plan", *words, "--text")
        self.assertTrue(text.startswith("kvloom plan 1\n"))
        self.assertIn(f"digest {digest}", text)
        self.assertNotEqual(digest, cli.read_json("plan", *self.words("mla", "cp=2:layers", "dcp=2:stripe=1"))["digest"])

    def test_the_table_shows_every_path_or_says_how_many_more(self):
        words = self.words("mla", "tp=16", "dcp=16")
        self.assertIn("more paths", cli.fine("plan", *self.words("mla", "cp=16:interleave=1", "dcp=8"), "--tokens", 4096))
        self.assertNotIn("more paths", cli.fine("plan", *words, "--tokens", 4096, "--all"))
        table = cli.fine("plan", *words, "--tokens", 4096)
        self.assertRegex(table, r"compiled in [\d.]+ (ns|us|ms); digest [0-9a-f]{32}")
        self.assertIn("16.00 x", table)

    def test_explain_gives_reasons_of_one_path_and_of_all(self):
        words = self.words("mla", "cp=2:layers", "dcp=2")
        self.assertIn("prefill", cli.fine("plan", *words, "--explain", "1:0"))
        self.assertGreater(len(cli.fine("plan", *words, "--explain", "--tokens", 200)), 40)

    def test_explain_says_how_a_gpu_would_copy(self):
        if "built without CUDA" in json.loads(cli.fine("doctor", "--json"))["cuda"]["why"]:
            return  # refused there: bad_input_test
        words = self.words("mla", "cp=2:layers", "dcp=2", "--explain", "--transport", "cuda")
        text = cli.fine("plan", *words)
        self.assertIn("By cuda, a layer of a request of 16,384 tokens, each run alone:\n", text)
        self.assertIn("0:0 latent, 0:1 latent", text)
        self.assertIn("pages in order: 1 run of 128 x 4,096 B: copy kernel: 2.5 us beside 4.4 us by the copy engine\n", text)
        self.assertRegex(text, r"pages in no order: \d+ runs of 2 x 4,096 B: copy kernel: ")
        self.assertIn("a request of 200 tokens", cli.fine("plan", *words, "--tokens", 200))
        one = self.words("mla", "cp=2:layers", "dcp=2", "--explain", "1:0", "--transport", "cuda")
        self.assertIn("\n  1:0 latent, 1:0 draft\n", cli.fine("plan", *one))

    def test_the_picture_stands_by_itself(self):
        page = pathlib.Path(self.models.path("plan.html"))
        cli.fine("plan", *self.words("dsa", "cp=4:layers", "dcp=2", "--tokens", 500, "--html", page))
        text = page.read_text(encoding="utf-8")
        self.assertEqual(text.count('class="cell"'), 8)
        self.assertEqual(text.count("<tr data-path="), 8)
        self.assertEqual(text.count('tabindex="0"'), 1)
        self.assertEqual(re.findall(r"(?:src|href)\s*=|@import|url\(", text), [])
        self.assertEqual(set(re.findall(r"https?://[^'\"]+", text)), {"http://www.w3.org/2000/svg"})
        self.assertIn("prefers-color-scheme: dark", text)
        self.assertEqual(list(page.parent.glob("*.part")), [])

    def test_the_picture_escapes_what_it_is_given(self):
        odd = self.models.write("<b>&.json", json.dumps(cli.MODELS["mla"]))
        page = pathlib.Path(self.models.path("odd.html"))
        cli.fine("plan", "--model", odd, "--prefill", "tp=1", "--decode", "tp=1", "--html", page)
        text = page.read_text(encoding="utf-8")
        self.assertIn("&lt;b&gt;&amp;", text)
        self.assertNotIn("<b>&.", text)

    def test_the_picture_of_many_ranks_stays_a_page(self):
        page = pathlib.Path(self.models.path("many.html"))
        cli.fine("plan", *self.words("mla", "cp=64:interleave=1", "dcp=64:stripe=1", "--tokens", 100000, "--html", page))
        self.assertLess(page.stat().st_size, 6 << 20)

    def test_doctor_says_what_can_run_and_why_not(self):
        code, out, _ = cli.run("doctor", "--json")
        told = json.loads(out)
        self.assertEqual([t["name"] for t in told["transports"]], ["shm", "loopback", "cuda", "ucx", "mooncake", "nixl"])
        self.assertEqual(code, 0 if told["transports"][0]["can_run"] else 1)
        self.assertTrue(all(t["why"] for t in told["transports"]))
        self.assertIn("plain", told["copy_kernels"])
        cuda = told["cuda"]
        if cuda["works"]:
            self.assertGreater(len(cuda["gpus"]), 0)
            self.assertEqual(len(cuda["links"]), len(cuda["gpus"]) * (len(cuda["gpus"]) - 1))
        if "built without CUDA" in cuda["why"]:
            self.assertIn("-DKVLOOM_CUDA=ON", told["transports"][2]["why"])
            self.assertEqual(cuda["choices"], [])
        else:
            self.assertEqual(len(cuda["choices"]), 3)
        self.assertGreater(told["cores"], 0)
        self.assertGreater(told["memory"]["usable"], 0)
        self.assertIn("shm", cli.run("doctor")[1])

    def test_help_has_examples_that_run(self):
        for verb in ("describe", "plan", "doctor", "completion"):
            text = cli.fine(verb, "--help")
            self.assertIn("Examples:", text)
            for line in text.split("Examples:")[1].splitlines():
                words = line.split()
                if len(words) < 2 or words[0] != "kvloom" or ">" in words or "--html" in words:
                    continue
                with self.subTest(line):
                    cli.fine(*[str(cli.SOURCE / w) if w.startswith("samples/") else w for w in words[1:]])


if __name__ == "__main__":
    unittest.main()
