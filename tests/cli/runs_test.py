"""Every byte that `plan --runs` moves, against an enumeration of our own.

Nothing of the plan is used: who holds a (layer, token, head), and in which column and slot, follows from the words by the formulas of
the design; only the strides inside a page are taken from `describe --json`. Each wanted target byte has to be written exactly once, from
the byte of the same coordinate on a rank that holds it, and no other byte at all.
"""

import collections
import itertools
import json
import random
import sys
import pathlib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cli  # noqa: E402

HEADER = "source target group layer source_offset target_offset bytes count source_step target_step".split()


def blocks(first, count, parts):
    """`count` things from `first` on, cut into parts, the first ones one longer."""
    starts = [first + d * (count // parts) + min(d, count % parts) for d in range(parts + 1)]
    return list(zip(starts, starts[1:]))


class Words:
    """The words of one side as numbers: tp (dcp included), dcp, cp, pp, and the rules of dcp and cp."""

    def __init__(self, words, tp=1, dcp=1, stripe=0, value=False, cp=1, rule="replicated", interleave=0, pp=1, page=64):
        self.words, self.tp, self.dcp, self.stripe, self.value = words, tp, dcp, stripe or page, value
        self.cp, self.rule, self.interleave, self.pp, self.page = cp, rule, interleave, pp, page
        self.ranks = tp * cp * pp

    def place(self, rank):
        return rank % self.tp, rank // self.tp % self.cp, rank // self.tp // self.cp

    def layers(self, rank, model_layers, ids):
        _, cp, pp = self.place(rank)
        begin, end = blocks(0, model_layers, self.pp)[pp]
        last = pp == self.pp - 1
        if self.rule == "layers":
            begin, end = blocks(begin, end - begin, self.cp)[cp]
            last = last and cp == self.cp - 1
        return [i for i in ids if begin <= i < end or (last and i >= model_layers)]

    def heads(self, rank, heads, state):
        tp, _, _ = self.place(rank)
        turns = 1 if state else self.dcp  # ranks that take turns at the tokens of the same heads
        slices = self.tp // turns
        parts = min(slices, heads)
        part = tp // turns // (slices // parts)
        return list(range(part * heads // parts, (part + 1) * heads // parts))

    def place_of_token(self, rank, token, total, table):
        """(column, slot) of a token on a rank, or None if the rank does not hold it."""
        tp, cp, _ = self.place(rank)
        page = self.page
        if self.rule in ("zigzag", "blocked"):
            if self.rule == "blocked":
                pieces = [blocks(0, total, self.cp)[cp]]
            else:
                chunk = -(-total // (2 * self.cp))
                pieces = [(c * chunk, min(total, (c + 1) * chunk)) for c in (cp, 2 * self.cp - 1 - cp)]
            before = 0
            for begin, end in pieces:
                if begin <= token < end:
                    return divmod(before + token - begin, page)
                before += max(0, end - begin)
            return None
        if self.value:  # virtual page v belongs to rank v mod N
            column, slot = divmod(token, page)
            return (column, slot) if table[column] % self.dcp == tp % self.dcp else None
        if self.rule == "interleave":
            count, own, stripe = self.cp * self.dcp, cp * self.dcp + tp % self.dcp, self.interleave
        else:
            count, own, stripe = self.dcp, tp % self.dcp, self.stripe
        # The widened page: V tokens of all ranks stand in one column.
        column, inside = divmod(token, page * count)
        if inside // stripe % count != own:
            return None
        return column, inside // (count * stripe) * stripe + inside % stripe

    def physical(self, page_id):
        return page_id // self.dcp if self.value else page_id


def plane_bytes(plane, slot, head):
    """Offsets in the page of a plane's bytes, in the order of the content."""
    base = plane["offset"] + slot * plane["token_stride"] + head * plane["head_stride"]
    stride, element = plane.get("content_stride", 0), plane.get("element_bytes", 1)
    return [base + (x // element * stride + x % element if stride else x) for x in range(plane["bytes"])]


class Runs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.models = cli.Models()

    @classmethod
    def tearDownClass(cls):
        cls.models.close()

    def tables(self, side, words, groups, total, seed):
        """Random tables: each prefill rank its own, decode ranks one together; virtual pages one for the side."""
        rng = random.Random(f"{side} {seed}")
        needed, out = -(-total // words.page) + 1, {}
        for group in groups:
            if group["kind"] == "state":  # one slot a request
                out[group["name"]] = {str(rank): [rng.randrange(9)] for rank in range(words.ranks)}
                continue
            def pages():
                pool = needed + 5 + (-(needed + 5)) % words.dcp
                return rng.sample(range(pool), needed)
            shared = side == "decode" or words.value
            out[group["name"]] = pages() if shared else {str(rank): pages() for rank in range(words.ranks)}
        return out

    def addresses(self, words, side, group, tables, total):
        """{rank: {(layer, token, head, plane, byte): offset}} of one side, every token of the request."""
        numbers = group.get(side) or group
        out = {}
        for rank in range(words.ranks):
            table = tables[group["name"]]
            table = table if isinstance(table, list) else table[str(rank)]
            at = out[rank] = {}
            state = group["kind"] == "state"
            heads = words.heads(rank, group["heads"], state)
            for token in range(1 if state else total):
                place = (0, 0) if state else words.place_of_token(rank, token, total, table)
                if place is None:
                    continue
                base = (table[0] if state else words.physical(table[place[0]])) * numbers["page_stride"]
                for local, head in enumerate(heads):
                    for plane in numbers["planes"]:
                        for x, offset in enumerate(plane_bytes(plane, place[1], local)):
                            at[token, head, plane["name"], x] = base + offset
        return out

    def written(self, text):
        """{(source, target, group, layer): [(source byte, target byte)]}"""
        lines = text.splitlines()
        self.assertEqual(lines[0].split("\t"), HEADER)
        out = collections.defaultdict(list)
        for line in lines[1:]:
            source, target, group, layer, *numbers = line.split("\t")
            from_, to, size, count, from_step, to_step = map(int, numbers)
            self.assertTrue(size > 0 and count > 0 and from_ >= 0 and to >= 0, line)
            if count == 1:
                self.assertEqual((from_step, to_step), (0, 0), line)
            for i in range(count):
                for x in range(size):
                    out[int(source), int(target), group, int(layer)].append((from_ + i * from_step + x, to + i * to_step + x))
        return out

    def check(self, model, prefill, decode, total, prefix=0, extra=(), seed=1):
        common = ["--model", self.models.path(model + ".json"), "--prefill", prefill.words, "--decode", decode.words, "--tokens", total, *extra]
        told = cli.read_json("describe", *common)
        tables = {"prefill": self.tables("prefill", prefill, told["groups"], total, seed),
                  "decode": self.tables("decode", decode, told["groups"], total, seed)}
        file = self.models.write("tables.json", json.dumps(tables))
        text = cli.fine("plan", *common, "--prefix", prefix, "--runs", "--tables", file)
        written = self.written(text)
        model_layers, wanted_bytes = told["model_layers"], 0
        for group in told["groups"]:
            source = self.addresses(prefill, "prefill", group, tables["prefill"], total)
            target = self.addresses(decode, "decode", group, tables["decode"], total)
            first = max(prefix, total - group["window"]["tokens"]) if "window" in group else prefix
            if group["kind"] == "state":
                first = 0  # it stands for all tokens before it, whatever prefix the target has
            for rank, layer in itertools.product(range(decode.ranks), group["layers"]):
                holds = layer in decode.layers(rank, model_layers, group["layers"])
                wanted = {at: what for what, at in target[rank].items() if what[0] >= first} if holds else {}
                wanted_bytes += len(wanted)
                seen = set()
                for sender in range(prefill.ranks):
                    pairs = written.pop((sender, rank, group["name"], layer), [])
                    if pairs:
                        self.assertIn(layer, prefill.layers(sender, model_layers, group["layers"]))
                    for from_, to in pairs:
                        self.assertNotIn(to, seen, "written twice")
                        seen.add(to)
                        self.assertIn(to, wanted, "written, but not wanted")
                        self.assertEqual(source[sender].get(wanted[to]), from_, (sender, rank, group["name"], layer, wanted[to]))
                self.assertEqual(len(seen), len(wanted), (rank, group["name"], layer))
        self.assertFalse(written, "runs between ranks, groups or layers that there are not")
        self.assertGreater(wanted_bytes, 0)
        counted = cli.read_json("plan", *common, "--prefix", prefix, "--tables", file)
        self.assertEqual(counted["total_bytes"], wanted_bytes)
        self.assertEqual(counted["total_runs"], len(text.splitlines()) - 1)

    def test_mla_from_layers_to_stripes_of_pages_after_a_prefix(self):
        self.check("mla", Words("cp=2:layers", cp=2, rule="layers"), Words("dcp=4", tp=4, dcp=4), 700, 70)

    def test_mla_replicas_to_stripes_of_one_token(self):
        self.check("mla", Words("tp=4", tp=4), Words("dcp=2:stripe=1", tp=2, dcp=2, stripe=1), 203)

    def test_more_ranks_than_layers(self):
        self.check("mla", Words("cp=7:layers", cp=7, rule="layers"), Words("tp=2", tp=2), 90)

    def test_dsa_index_pages_of_two_planes_between_page_sizes(self):
        self.check("dsa", Words("cp=2:layers", cp=2, rule="layers"), Words("dcp=2,page=16", tp=2, dcp=2, page=16), 150, 33,
                   ["--kv-cache-dtype", "fp8-dsa"])

    def test_gqa_heads_between_page_sizes(self):
        self.check("gqa", Words("tp=4", tp=4), Words("tp=2,page=16", tp=2, page=16), 100, 5)

    def test_gqa_with_more_ranks_than_heads_and_back(self):
        self.check("gqa", Words("tp=8,page=16", tp=8, page=16), Words("tp=1,page=16", tp=1, page=16), 70)
        self.check("gqa", Words("tp=1,page=16", tp=1, page=16), Words("tp=8,page=16", tp=8, page=16), 40)

    def test_gqa_stages_to_heads_and_stripes(self):
        self.check("gqa", Words("pp=2", pp=2), Words("tp=4,dcp=2:stripe=16", tp=4, dcp=2, stripe=16), 150)

    def test_the_cpu_layout_keeps_keys_transposed(self):
        self.check("gqa8", Words("tp=2,layout=cpu,page=16", tp=2, page=16), Words("tp=4,page=16", tp=4, page=16), 60, 3)
        self.check("gqa8", Words("tp=2,layout=hnd,page=16", tp=2, page=16), Words("tp=1,layout=cpu,page=32", tp=1, page=32), 60)

    def test_packed_layouts_and_padded_pages(self):
        self.check("gqa8", Words("tp=2,layout=packed-nhd,page=16,page_stride=5000", tp=2, page=16), Words("tp=1,layout=packed-hnd,page=64", tp=1), 130)

    def test_prefill_cuts_tokens_in_every_way(self):
        self.check("mla", Words("cp=2:zigzag", cp=2, rule="zigzag"), Words("dcp=2", tp=2, dcp=2), 301)
        self.check("mla", Words("cp=3:blocked", cp=3, rule="blocked"), Words("dcp=2:stripe=16", tp=2, dcp=2, stripe=16), 200, 11)
        self.check("mla", Words("cp=4:interleave=1", cp=4, rule="interleave", interleave=1), Words("tp=2", tp=2), 130)
        self.check("mla", Words("cp=4:interleave=16", cp=4, rule="interleave", interleave=16), Words("dcp=2:stripe=4", tp=2, dcp=2, stripe=4), 300)

    def test_pages_that_belong_to_ranks_by_their_value(self):
        self.check("mla", Words("cp=2:layers", cp=2, rule="layers"), Words("dcp=2:value", tp=2, dcp=2, value=True), 400, 100)
        self.check("mla", Words("dcp=2:value", tp=2, dcp=2, value=True), Words("tp=1,page=16", page=16), 300)

    def test_a_sliding_window_moves_only_its_tokens(self):
        self.check("swa", Words("tp=2,page=16", tp=2, page=16), Words("tp=1,page=32", page=32), 100, 10)

    def test_states_per_request_go_by_heads_of_all_tp_ranks(self):
        self.check("ssm", Words("tp=2,page=16", tp=2, page=16), Words("tp=4,dcp=2,page=16", tp=4, dcp=2, page=16), 70, 20)
        self.check("ssm", Words("tp=8,page=16", tp=8, page=16), Words("tp=1,page=16", page=16), 40)
        self.check("ssm", Words("pp=2", pp=2), Words("tp=2", tp=2), 40)

    def test_random_tables_are_the_same_for_a_seed(self):
        words = ["plan", "--model", self.models.path("mla.json"), "--prefill", "cp=2:layers", "--decode", "dcp=2", "--tokens", 500, "--runs"]
        one, again, other = (cli.fine(*words, "--tables", f"random:{seed}") for seed in (7, 7, 8))
        self.assertEqual(one, again)
        self.assertNotEqual(one, other)
        self.assertNotEqual(one, cli.fine(*words))

    def test_the_identity_is_the_default(self):
        words = ["plan", "--model", self.models.path("gqa.json"), "--prefill", "tp=2", "--decode", "tp=2", "--tokens", 640, "--runs"]
        lines = [line.split("\t") for line in cli.fine(*words).splitlines()[1:]]
        self.assertEqual(lines, [[str(r), str(r), "kv", str(layer), "0", "0", str(640 * 2 * 64), "1", "0", "0"] for r in range(2) for layer in range(4)])

    def test_a_prefix_of_all_tokens_moves_nothing(self):
        words = ["plan", "--model", self.models.path("gqa.json"), "--prefill", "tp=2", "--decode", "tp=1", "--tokens", 64, "--prefix", 64]
        self.assertEqual(cli.fine(*words, "--runs").splitlines(), ["\t".join(HEADER)])
        self.assertEqual(cli.read_json(*words)["total_bytes"], 0)


if __name__ == "__main__":
    unittest.main()
