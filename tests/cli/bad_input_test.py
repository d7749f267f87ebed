"""Bad input: its words, and exit codes. 0 fine, 1 the job failed, 2 bad usage."""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cli  # noqa: E402


class BadInput(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.models = cli.Models()
        cls.mla = ["--model", cls.models.path("mla.json")]
        cls.gqa = ["--model", cls.models.path("gqa.json")]

    @classmethod
    def tearDownClass(cls):
        cls.models.close()

    def refused(self, words, *sentences, code=2):
        got, out, err = cli.run(*words)
        self.assertEqual(got, code, f"{words}: {err}")
        self.assertEqual(out, "", "nothing goes out where the words were wrong")
        for sentence in sentences:
            self.assertIn(sentence, err)

    def plan(self, prefill, decode, *more, model=None):
        return ["plan", *(model or self.mla), "--prefill", prefill, "--decode", decode, *more]

    def moves(self, *more):
        return ["run", *self.mla, "--prefill", "tp=1", "--decode", "tp=1", "--tokens", 64, "--html", "", "--json", *more]

    def test_no_verb_and_unknown_ones(self):
        self.refused([], "kvloom: say what to do: a verb is required", "See 'kvloom --help'")
        self.refused(["pln"], "kvloom: unknown verb pln; did you mean plan?")
        self.refused(["frobnicate"], "kvloom: unknown verb frobnicate\n")

    def test_unknown_options_and_words(self):
        self.refused(self.plan("tp=1", "tp=1", "--token", 5), "kvloom plan: unknown option --token; did you mean --tokens?", "See 'kvloom plan --help'")
        self.refused(["describe", *self.mla, "extra"], "unknown word extra")
        self.refused(["completion", "tcsh"], "'tcsh' is no shell that we know: bash, zsh or fish")

    def test_what_is_missing(self):
        self.refused(["describe"], "--model is required")
        self.refused(["plan", *self.mla, "--decode", "tp=1"], "--prefill is required")
        self.refused(self.plan("tp=1", "tp=1", "--tokens"), "--tokens wants one value")

    def test_options_that_exclude_each_other(self):
        self.refused(self.plan("tp=1", "tp=1", "--json", "--text"), "can't be said beside")
        self.refused(self.plan("tp=1", "tp=1", "--runs", "--explain"), "can't be said beside")

    def test_numbers(self):
        for number, sentence in [("0", "--tokens: 0 is too small: it must be 1 or more"), ("-5", "--tokens: -5 is too small"),
                                 ("12x", "--tokens: '12x' is not a whole number"), ("1.5", "--tokens: '1.5' is not a whole number"),
                                 ("99999999999999999999", "--tokens: 99999999999999999999 is out of range"),
                                 ("9223372036854775807", "is too large: at most 1099511627776")]:
            with self.subTest(number):
                self.refused(self.plan("tp=1", "tp=1", "--tokens", number), sentence)
        self.refused(["describe", *self.mla, "--page-tokens", 0], "--page-tokens: 0 is too small")
        self.refused(["describe", *self.mla, "--memory", "80XB"], "'80XB' is not a number of bytes: write 80GiB")
        self.refused(["describe", *self.mla, "--memory", "1e30"], "is not a number of bytes")
        self.refused(["describe", *self.mla, "--memory", "99999999999TiB"], "99999999999TiB is too large")
        self.refused(["describe", *self.mla, "--memory", "0"], "0 is too small")

    def test_a_prefix_beyond_the_tokens(self):
        self.refused(self.plan("tp=1", "tp=1", "--tokens", 10, "--prefix", 11), "--prefix 11 is beyond the request's --tokens 10")
        self.refused(self.plan("tp=1", "tp=1", "--prefix", 11), "--prefix 11 without --tokens")

    def test_lengths_that_are_needed(self):
        self.refused(["describe", *self.mla, "--decode", "cp=2:zigzag"], "--decode: zigzag and blocked cut the request's length: say --tokens T")
        self.refused(self.plan("cp=2:zigzag", "tp=1"), "zigzag and blocked cut the request's length")
        self.refused(self.plan("tp=1", "tp=1", "--runs"), "--runs wants --tokens")
        self.refused(self.plan("tp=1", "tp=1", "--tables", "random:1"), "--tables wants --tokens")

    def test_more_tokens_than_memory_is_said_before_it_is_taken(self):
        self.refused(self.plan("tp=1", "tp=1", "--tokens", 1 << 40, "--page-tokens", 1), "page tables of", "of memory are free", code=1)

    def test_model_files(self):
        self.refused(["describe", "--model", "/nowhere/config.json"], "--model: /nowhere/config.json: can't be read: No such file or directory")
        self.refused(["describe", "--model", self.models.folder.name], "is a folder, not a file")
        for name, text, sentence in [("cut.json", '{"num_hidden_layers": ', "not JSON"), ("list.json", "[]", "list"),
                                     ("none.json", '{"num_attention_heads": 8}', "num_hidden_layers"),
                                     ("zero.json", json.dumps({**cli.MODELS["gqa"], "num_key_value_heads": 0}), "num_key_value_heads"),
                                     ("text.json", json.dumps({**cli.MODELS["gqa"], "num_hidden_layers": "4"}), "num_hidden_layers"),
                                     ("huge.json", json.dumps({**cli.MODELS["gqa"], "head_dim": 10**18}), "head_dim")]:
            with self.subTest(name):
                self.refused(["describe", "--model", self.models.write(name, text)], sentence)
        self.refused(["describe", *self.mla, "--kv-cache-dtype", "fp9"], "--kv-cache-dtype", "fp9", "fp8-dsa")

    def test_sharding_words_are_marked(self):
        self.refused(self.plan("tp=2,tpp=3", "tp=1"), "--prefill: unknown sharding word 'tpp'", "  tp=2,tpp=3\n       ^^^\n")
        self.refused(self.plan("tp=0", "tp=1"), "--prefill: tp=0 must be 1 or more", "  tp=0\n     ^\n")
        self.refused(self.plan("tp=1", "dcp=4:strip=1"), "--decode:", "  dcp=4:strip=1\n        ^^^^^^^\n")
        self.refused(self.plan("tp=3", "tp=1", model=self.gqa), "tp=3 does not divide 4 heads of group kv; 1, 2, 4, 8, ... do", "  tp=3\n  ^^^^\n")
        self.refused(self.plan("tp=1", "dcp=2:stripe=7"), "stripe=7 does not divide the page of 64 tokens")
        self.refused(self.plan("tp=1", "nosuch:replicated"), "has no cache group 'nosuch'")
        self.refused(self.plan("tp=99999999999999999999", "tp=1"), "--prefill:", "too large")

    def test_pairs_that_cannot_be(self):
        self.refused(self.plan("latent:none", "tp=1"), "decode has the cache group latent, prefill has not")

    def test_explain_wants_two_ranks(self):
        self.refused(self.plan("tp=2", "tp=1", "--explain", "x"), "'x' is not SOURCE:TARGET")
        self.refused(self.plan("tp=2", "tp=1", "--explain", "2:0"), "there is no prefill rank 2: 0 to 1")
        self.refused(self.plan("tp=2", "tp=1", "--explain", "0:1"), "there is no decode rank 1: 0 to 0")

    def test_a_picture_that_cannot_be_written(self):
        code, _, err = cli.run(*self.plan("tp=1", "tp=1", "--html", "/nowhere/plan.html"))
        self.assertEqual(code, 1)
        self.assertIn("/nowhere/plan.html: can't be written", err)

    def test_a_result_that_cannot_be_written(self):
        import subprocess
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run([cli.KVLOOM, "describe", *self.mla], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("can't write the result", done.stderr)

    def test_transports(self):
        for verb in (self.moves(), self.moves("--stream"), ["soak"]):
            with self.subTest(verb[0]):
                self.refused([*verb, "--transport", "nonsense"], "--transport: 'nonsense' is not known here: shm or cuda")
                self.refused([*verb, "--prefill-gpus", "0"], "--prefill-gpus is for --transport cuda; this is shm")
                self.refused([*verb, "--decode-gpus", "0"], "--decode-gpus is for --transport cuda; this is shm")
                for gpus in ("0,x", "", "0,", "-1", "1.5", "99999999999"):
                    self.refused([*verb, "--transport", "cuda", "--decode-gpus=" + gpus], "--decode-gpus")
                self.refused([*verb, "--transport", "cuda", "--decode-gpus", "0,x"], "--decode-gpus: '0,x' is no list of GPUs: write 0, or 0,1")

    def test_copies(self):
        for verb in (self.moves(), self.moves("--stream"), ["soak"], ["bench"]):
            with self.subTest(verb[0]):
                self.refused([*verb, "--copy-blocks", 4], "--copy-blocks is for --transport cuda; this is shm")
                self.refused([*verb, "--copy-in-flight", "64MiB"], "--copy-in-flight is for --transport cuda; this is shm")
                self.refused([*verb, "--copy-priority", "0"], "--copy-priority is for --transport cuda; this is shm")
        cuda = self.moves("--transport", "cuda")
        self.refused([*cuda, "--copy-blocks", 0], "--copy-blocks: 0 is too small: it must be 1 or more")
        self.refused([*cuda, "--copy-blocks", 1025], "--copy-blocks: 1025 is too large: at most 1024")
        self.refused([*cuda, "--copy-blocks", "many"], "--copy-blocks: 'many' is not a whole number")
        self.refused([*cuda, "--copy-priority", "99999"], "--copy-priority: 99999 is too large: at most 1000")
        self.refused([*cuda, "--copy-in-flight", "1KiB"], "--copy-in-flight: 1KiB is not in 1.00 MiB..64.0 GiB")
        self.refused([*cuda, "--copy-in-flight", "1TiB"], "--copy-in-flight: 1TiB is not in 1.00 MiB..64.0 GiB")

    def test_copies_of_a_plan(self):
        self.refused(self.plan("tp=1", "tp=1", "--transport", "cuda"), "--transport wants --explain")
        self.refused(self.plan("tp=1", "tp=1", "--explain", "--transport", "nonsense"), "'nonsense' is not known here: shm or cuda")

    def test_loads(self):
        gemm = ["--load", "gemm"]
        self.refused(self.moves(*gemm), "--load gemm is for run --stream")
        self.refused(self.moves("--stream", *gemm), "--load gemm is for --transport cuda; this is shm")
        self.refused(self.moves("--stream", "--decode-load", "gemm"), "--decode-load gemm is for --transport cuda; this is shm")
        self.refused(self.moves("--stream", "--cublas", "/nowhere"), "--cublas is for --load gemm and --decode-load gemm")
        self.refused(self.moves("--stream", "--load", "fft"), "--load")
        self.refused(self.moves("--stream", "--rounds", 0), "--rounds: 0 is too small")

    def test_cuda_where_it_is_not_built_or_has_no_gpu(self):
        cuda = json.loads(cli.run("doctor", "--json")[1])["cuda"]
        if "built without CUDA" in cuda["why"]:
            for verb in (self.moves(), self.moves("--stream"), ["soak"]):
                self.refused([*verb, "--transport", "cuda"],
                             "--transport cuda: this kvloom was built without CUDA: configure with -DKVLOOM_CUDA=ON")
            self.refused(self.plan("tp=1", "tp=1", "--explain", "--transport", "cuda"), "--transport cuda: this kvloom was built without CUDA")
            return
        self.refused(self.moves("--transport", "cuda", "--naive"), "--naive moves host memory only")
        gemm = self.moves("--stream", "--transport", "cuda", "--load", "gemm")
        self.refused([*gemm, "--busy"], "--busy is for --load sleep")
        self.refused([*gemm, "--layer-time", "2ms"], "--layer-time is for --load sleep")
        if not cuda["works"]:
            self.refused(self.moves("--transport", "cuda"), " rank 0: ", code=1)
        else:
            self.refused(self.moves("--transport", "cuda", "--prefill-gpus", 1000), "prefill rank 0: GPU 1000 of ", code=1)

    def tables(self, document, *sentences, prefill="tp=2", decode="tp=1"):
        text = document if isinstance(document, str) else json.dumps(document)
        file = self.models.write("tables.json", text)
        self.refused(self.plan(prefill, decode, "--tokens", 200, "--json", "--tables", file), *sentences)

    def test_table_files(self):
        self.tables("{", "tables.json: not JSON")
        self.tables([], "expected {\"prefill\"")
        self.tables({"decod": {}}, "'decod' is no side: prefill or decode")
        self.tables({"decode": {"kv": []}}, "decode: the plan has no group 'kv': it has latent, draft")
        self.tables({"decode": {"latent": 3}}, "decode group latent: expected a list of page ids, found number")
        self.tables({"decode": {"latent": [0, 1, -2, 3]}}, "decode group latent: page table: column 2 is -2, not a page id")
        self.tables({"decode": {"latent": [0, 1, 1.5, 3]}}, "column 2 is 1.5, not a page id")
        self.tables({"decode": {"latent": [0, 1, 2**63, 3]}}, "column 2 is 9223372036854775808, not a page id")
        self.tables({"decode": {"latent": {"7": [0]}}}, "'7' is no rank of 0 to 0")
        self.tables({"prefill": {"latent": {"0": [0, 1, 2, 3]}}}, "prefill rank 1 group latent: the file has tables for other ranks")
        self.tables({"decode": {"latent": {"pool": -1, "pages": [0]}}}, "\"pool\" is -1, not a number of pages")

    def test_tables_that_do_not_fit(self):
        self.tables({"decode": {"latent": [0, 1]}}, "decode rank 0 group latent: token 199 stands in column 3", "2 columns")
        self.tables({"decode": {"latent": [0, 1, 1, 3]}}, "decode group latent: page table: page 1 stands in columns 1 and 2")
        self.tables({"decode": {"latent": {"pool": 4, "pages": [0, 1, 2, 4]}}}, "column 3 names page 4, but the pool has 4 pages")
        self.tables({"decode": {"latent": [0, None, 2, 3]}}, "column 1 names no page")
        self.tables({"decode": {"latent": [0, 1, 2, 2**60]}}, "does not fit 63 bits")
        self.tables({"decode": {"latent": {"0": [0, 2], "1": [1, 3]}}}, "ownership by page value needs one table", decode="dcp=2:value")

    def test_tables_words(self):
        self.refused(self.plan("tp=1", "tp=1", "--tokens", 5, "--tables", "random:x"), "'x' is not a seed")
        self.refused(self.plan("tp=1", "tp=1", "--tokens", 5, "--tables", "/nowhere"), "/nowhere: can't be read", "or say identity, or random:SEED")


if __name__ == "__main__":
    unittest.main()
