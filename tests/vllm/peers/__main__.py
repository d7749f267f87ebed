"""python -m peers [--only idle,ttft,ends] [--connectors kvloom,nixl,mooncake] [--rounds N] [--model KIND] [--json FILE]

kvloom beside vLLM's NixlConnector and MooncakeConnector, and beside one server without a connector. Run by scripts/bench_vllm_peers.sh, which installs
what it needs; half an hour or more on 2 cores with 24 GiB that have nothing else to do.
"""

import argparse
import contextlib
import pathlib
import sys
import time

from harness import running
from settings import of

from . import ends, idle, report, ttft
from .connectors import MAKERS, NAMES

PARTS = ("idle", "ttft", "ends")


def said() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_some_of(PARTS), default=list(PARTS), help="parts to measure, with commas (idle,ttft,ends)")
    parser.add_argument("--connectors", type=_some_of(NAMES[1:]), default=list(NAMES[1:]), help="with commas (kvloom,nixl,mooncake)")
    parser.add_argument("--rounds", type=int, default=5, help="of times to first token (5)")
    parser.add_argument("--model", default="llama", help="one of tests/vllm/models.py (llama)")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds after which a wait is given up, beyond the time given (30)")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures here")
    return parser.parse_args()


def _some_of(known: tuple[str, ...]):
    def parse(words: str) -> list[str]:
        for word in words.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words.split(",")

    return parse


def note(words: str) -> None:
    print(f"  [{time.monotonic() - BEGIN:5.0f} s] {words}", file=sys.stderr, flush=True)


def main() -> int:
    asked = said()
    settings = of(asked.model, prefix_caching=True)
    pairs = [MAKERS[name](settings, asked.patience) for name in (*NAMES[:1] * (asked.only != ["ends"]), *asked.connectors)]
    figures, samples, rows = [], [], []
    with contextlib.ExitStack() as running_servers:
        for together in ([pair for pair in pairs if pair.name != "nixl"], [pair for pair in pairs if pair.name == "nixl"]):
            running_servers.enter_context(running(*(server for pair in together for server in pair.servers)))
            for pair in together:
                pair.freeze()  # nixl comes last and alone: its workers spin as soon as they are there, and the others' start would take twice as long
        note("all servers are healthy")
        if "idle" in asked.only:
            figures += report.idle_figures(idle.measure(pairs, note))
        if "ttft" in asked.only:
            samples = ttft.measure(pairs, asked.rounds, note)
            figures += report.ttft_figures(samples)
        if "ends" in asked.only:
            for pair in pairs:
                if pair.way is None:
                    pair.close()
            rows = ends.measure([pair for pair in pairs if pair.way is not None], note)
    where, shape = report.place(), {"model": asked.model, "dtype": settings.dtype, "chunk": settings.chunk, "block": settings.block, "blocks": settings.blocks}
    print("; ".join(f"{name} {value}" for name, value in {**where, **shape, "rounds": asked.rounds}.items()))
    print(report.text(figures) if figures else "", report.ends_text(rows) if rows else "", sep="\n")
    if asked.json:
        asked.json.write_text(report.as_json(where, shape | {"rounds": asked.rounds}, figures, samples, rows))
    return 0


BEGIN = time.monotonic()
if __name__ == "__main__":
    sys.exit(main())
