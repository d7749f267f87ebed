"""kvloom simulate: the invariants under faults, every edge of the state machines, and the tables in the docs."""

import sys
import pathlib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cli  # noqa: E402


class Simulate(unittest.TestCase):
    def test_ten_thousand_schedules_break_nothing_and_walk_every_edge(self):
        report = cli.read_json("simulate", "--schedules", 10000, "--seed", 1, "--jobs", 2)
        self.assertEqual((report["schedules"], report["violations"]), (10000, 0), report["broken"])
        self.assertEqual([edge for edge in report["edge_counts"] if edge["walked"] == 0], [])
        self.assertEqual(report["edges_walked"], report["edges"])
        self.assertGreater(report["schedules_per_second"], 0)
        self.assertGreater(min(report["faults"].values()), 0)
        self.assertEqual(len(report["faults"]), 17, "every kind of fault was injected")
        self.assertGreater(report["outcomes"]["landed"], report["outcomes"]["failed"])

    def test_a_seed_is_the_same_schedules_in_any_number_of_threads(self):
        words = ["simulate", "--schedules", 300, "--seed", 5]
        one, two = (cli.read_json(*words, "--jobs", jobs) for jobs in (1, 2))
        for report in (one, two):
            del report["schedules_per_second"]
        self.assertEqual(one, two)

    def test_the_docs_have_the_tables_of_edges(self):
        text = (cli.SOURCE / "docs" / "protocol.md").read_text(encoding="utf-8")
        self.assertTrue(text.endswith(cli.fine("simulate", "--edges")), "kvloom simulate --edges prints what docs/protocol.md has to end with")


if __name__ == "__main__":
    unittest.main()
