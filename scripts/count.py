#!/usr/bin/env python3
"""count.py TESTS.XML OUT: reads what ctest wrote, prints the cases that failed with their words and the slowest ones, and writes
`passed failed` to OUT. A file that is missing or empty counts as one failure, and ends with 1."""

import sys
import xml.etree.ElementTree as ElementTree


def read(path):
    try:
        cases = ElementTree.parse(path).getroot().findall("testcase")
    except (OSError, ElementTree.ParseError):
        return []
    return [(c.get("name"), c.get("status"), float(c.get("time", 0)), c.findtext("system-out") or "") for c in cases]


def main():
    cases = read(sys.argv[1])
    passed = [c for c in cases if c[1] == "run"]
    skipped = [c for c in cases if c[1] in ("notrun", "disabled") and "SKIP" in c[3].upper()]
    failed = [c for c in cases if c not in passed and c not in skipped]
    for name, _, seconds, words in failed:
        print(f"\n--- {name} failed after {seconds:.1f} s\n{words.rstrip()[-8000:]}")
    for name, _, _, _ in skipped:
        print(f"skipped: {name}")
    slowest = sorted(cases, key=lambda c: -c[2])[:5]
    print(f"{len(cases)} cases: {len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped")
    print("slowest: " + ", ".join(f"{name} {seconds:.1f} s" for name, _, seconds, _ in slowest))
    with open(sys.argv[2], "w", encoding="utf-8") as out:
        out.write(f"{len(passed)} {len(failed) if cases else 1}\n")
    return 0 if cases else 1


if __name__ == "__main__":
    sys.exit(main())
