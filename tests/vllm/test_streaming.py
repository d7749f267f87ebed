"""Layers leave a real vLLM while it computes the prompt, and what is left after that beside vLLM's own connector that works on CPUs.

Proof by traces: prefill's and decode's are of one clock (CLOCK_MONOTONIC). A post's span ends when the decode rank has said that its bytes are
there, so a post that ended before a step began had landed by then. A step of the engine is a span of its own (kvloom/vllm/steps.py).
The figures are printed and never asserted. ExampleConnector takes no prompt of several chunks, so it is compared with a step that takes the
whole prompt, for both; medians of ROUNDS, the two in turn.
"""

import dataclasses
import json
import pathlib
import statistics
import time

from ask import prompts_of
from instance import Instance
from meeting import Meeting
from models import model
from settings import Settings, connector

PROMPT = 1_500  # tokens
CHUNK = 256
CHUNKS = -(-PROMPT // CHUNK)
ROUNDS = 5


def prompts(seed: int, count: int = ROUNDS) -> list[list[int]]:
    return prompts_of([PROMPT] * count, seed)


def milliseconds(times) -> str:
    ordered = sorted(1000 * each for each in times)
    return f"{statistics.median(ordered):.2f} ms ({ordered[0]:.2f} to {ordered[-1]:.2f})"


@dataclasses.dataclass(frozen=True)
class Asked:
    """One prompt to both. Seconds of time.monotonic()."""

    transfer: str
    asked: float
    prefilled: float  # prefill's answer came
    first: float  # decode's first token came
    tokens: tuple[int, ...]


def ask(meeting: Meeting, name: str, prompt: list[int]) -> Asked:
    """Decode first, as the proxy does it in effect: both at once."""
    to_prefill, to_decode = meeting.parameters()
    asked = time.monotonic()
    meeting.decode.add(name, prompt, 1, to_decode)
    meeting.prefill.add(f"{name}-p", prompt, 1, to_prefill)
    tokens = meeting.decode.ended(name).tokens
    meeting.prefill.ended(f"{name}-p")
    return Asked(f"{to_decode['kvloom']['transfer']}#1", asked, meeting.prefill.when[f"{name}-p"], meeting.decode.when[name], tokens)


def events_of(folder: pathlib.Path, side: str) -> list[dict]:
    """What one rank's trace has, metadata aside; `ts` and `dur` are in microseconds."""
    (file,) = folder.glob(f"{side}-0-*.json")
    trace = json.loads(file.read_text())
    assert trace["otherData"] == {"clock": "CLOCK_MONOTONIC", "dropped_events": 0}
    return [event for event in trace["traceEvents"] if event["ph"] in "Xi"]


class Seen:
    """One transfer, in both ranks' traces. Times: microseconds of one clock."""

    def __init__(self, folder: pathlib.Path, transfer: str):
        prefill, decode = events_of(folder, "prefill"), events_of(folder, "decode")
        own = [event for event in (*prefill, *decode) if event.get("args", {}).get("transfer") == transfer]
        self.posts = [event for event in own if event["name"] == "post"]
        self.ready = [event for event in own if event["name"] == "ready"]
        self.layers = [event for event in own if event["name"] == "landed" and event["ph"] == "i"]  # decode's: all chunks of a layer
        chunked = [(event, event.get("args", {}).get("chunks", {}).get(transfer)) for event in prefill if event["name"] == "step"]
        self.steps = sorted((event["ts"], event["ts"] + event["dur"], tokens) for event, tokens in chunked if tokens)
        (self.landed,) = [e["ts"] + e["dur"] for e in decode if e["name"] == "landed" and e["ph"] == "X" and e["args"]["transfer"] == transfer]

    def post(self, layer: int, tokens: str) -> dict:
        (found,) = [post for post in self.posts if post["args"]["layer"] == layer and post["args"]["tokens"] == tokens]
        return found

    @property
    def early(self) -> float:
        """How long before the second chunk the first one's first layer was there."""
        first = self.post(0, f"[0, {CHUNK})")
        return self.steps[1][0] - first["ts"] - first["dur"]

    @property
    def tail(self) -> float:
        """From the last layer that was ready until all was there."""
        return self.landed - max(event["ts"] for event in self.ready)

    @property
    def whole(self) -> float:
        return self.landed - min(event["ts"] for event in self.ready)


def test_the_first_layer_is_there_before_the_second_chunk_is_computed(tmp_path, shown):
    with Meeting(Settings(model("llama"), chunk=CHUNK), Settings(model("llama"), chunk=CHUNK), trace=tmp_path) as meeting:
        meeting.ready()
        ask(meeting, "met", prompts(1, 1)[0])
        asked = [ask(meeting, f"{number}", prompt) for number, prompt in enumerate(prompts(2))]
        meeting.quiet()
    seen = [Seen(tmp_path, each.transfer) for each in asked]
    for one in seen:
        assert [tokens for _, _, tokens in one.steps] == [min(CHUNK * (chunk + 1), PROMPT) for chunk in range(CHUNKS)]
        assert one.steps[0][0] < one.post(0, f"[0, {CHUNK})")["ts"]
        assert one.early > 0
        last = one.steps[-1]
        assert sum(post["ts"] + post["dur"] < last[0] for post in one.posts) >= CHUNKS - 1  # and so it went on
        assert [event["args"]["layer"] for event in sorted(one.layers, key=lambda event: event["ts"])] == [0, 1, 2, 3]
    early, tail, whole = (milliseconds(time / 1e6 for time in times) for times in zip(*[(s.early, s.tail, s.whole) for s in seen]))
    shown(f"kvloom, {PROMPT} tokens in chunks of {CHUNK}, medians of {ROUNDS} (least to most):")
    shown(f"  layer 0 of chunk 0 landed {early} before chunk 1 began; exposed tail {tail} of a transfer of {whole}")


def handed_on(prefill: Instance, decode: Instance, name: str, prompt: list[int]) -> Asked:
    """By ExampleConnector: decode is asked when prefill has answered, since it would find nothing before."""
    asked = time.monotonic()
    prefill.add(f"{name}-p", prompt, 1)
    prefill.ended(f"{name}-p")
    decode.add(name, prompt, 1)
    tokens = decode.ended(name).tokens
    return Asked(name, asked, prefill.when[f"{name}-p"], decode.when[name], tokens)


def test_what_is_left_after_prefill_beside_vllms_own_connector(tmp_path_factory, shown):
    files, trace = str(tmp_path_factory.mktemp("files")), tmp_path_factory.mktemp("trace")
    whole = Settings(model("llama"), chunk=2_048, prefix_caching=False)
    theirs = [
        Instance(whole.but(connector=connector("ExampleConnector", role=role, shared_storage_path=files), cores=(core,)), role)
        for core, role in enumerate(("kv_producer", "kv_consumer"))
    ]
    with theirs[0] as prefill, theirs[1] as decode, Meeting(whole, whole, trace=trace) as ours:
        ours.ready(), prefill.ready(), decode.ready()
        ask(ours, "met", prompts(3, 1)[0])
        handed_on(prefill, decode, "met", prompts(3, 1)[0])
        pairs = [(ask(ours, f"{n}", prompt), handed_on(prefill, decode, f"{n}", prompt)) for n, prompt in enumerate(prompts(4))]
        ours.quiet()
    assert all(own.tokens == other.tokens for own, other in pairs)
    names = ("kvloom", "ExampleConnector")
    shown(f"{PROMPT} tokens in one step, medians of {ROUNDS} (least to most), the two in turn:")
    for name, several in zip(names, ([pair[0] for pair in pairs], [pair[1] for pair in pairs])):
        shown(
            f"  {name:16s} asked to decode's first token {milliseconds(a.first - a.asked for a in several)}; "
            f"of that after prefill's answer {milliseconds(a.first - a.prefilled for a in several)}"
        )
    seen = [Seen(trace, pair[0].transfer) for pair in pairs]
    shown(f"  kvloom's trace: exposed tail {milliseconds(s.tail / 1e6 for s in seen)} of a transfer of {milliseconds(s.whole / 1e6 for s in seen)}")
