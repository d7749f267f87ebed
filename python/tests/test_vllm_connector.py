"""The vLLM connector's halves without vLLM: the scheduler's against a scripted order of calls, the workers' with real sessions over numpy memory."""

from __future__ import annotations

import dataclasses
import re
import socket
import time

import numpy as np
import pytest
from conftest import LONG
from vllm_stand_in import installed
from vllm_stand_in.engine import Request, alike, cache_config, layer_names, output, tensor_of, vllm_config

import kvloom

with installed():
    from kvloom.vllm.decode_side import DecodeSide
    from kvloom.vllm.layouts import place
    from kvloom.vllm.metadata import Chunk, Load, Offer, Step
    from kvloom.vllm.params import Settings, Transfer
    from kvloom.vllm.prefill_side import PrefillSide
    from kvloom.vllm.scheduler_side import SchedulerSide
    from kvloom.vllm.stats import Counts, KVLoomStats

pytestmark = pytest.mark.usefixtures("stand_in")

TO_PREFILL = {"kvloom": {"role": "prefill", "transfer": "key", "seconds": 30}}
TO_DECODE = {"kvloom": {"role": "decode", "transfer": "key", "seconds": 30, "prefill": ["tcp://127.0.0.1:1"]}}


# ---- what it is told ----


def test_requests_parameters_are_read():
    assert Transfer.parse(None) is None and Transfer.parse({"other": 1}) is None
    assert Transfer.parse(TO_PREFILL) == Transfer("prefill", "key", 30.0)
    keyed = Transfer.parse({"kvloom": TO_DECODE["kvloom"] | {"prefill_keys": ["k"], "unknown": 1}})
    assert keyed is not None and keyed.sources == [("tcp://127.0.0.1:1", "k")]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([], "wanted an object"),
        ({"role": "prefill"}, "lacks transfer, seconds"),
        (TO_DECODE["kvloom"] | {"role": "both"}, "wanted one of 'prefill', 'decode'"),
        (TO_DECODE["kvloom"] | {"seconds": True}, "seconds=True: wanted a number"),
        (TO_DECODE["kvloom"] | {"prefill": []}, "prefill is empty"),
        (TO_DECODE["kvloom"] | {"prefill": "tcp://x"}, "wanted a list of texts"),
        (TO_DECODE["kvloom"] | {"prefill_keys": ["a", "b"]}, "2 keys for 1 addresses"),
    ],
)
def test_wrong_parameters_say_which(said, words):
    with pytest.raises(kvloom.InvalidArgument, match=words):
        Transfer.parse({"kvloom": said})


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "control_port is missing"),
        ({"control_port": 70000}, "wanted a number from 1 to 65535"),
        ({"port": 1}, "port is not known; there are .*control_port"),
        ({"control_port": 1, "control_keys": ["a"]}, r"wanted \[public, secret\]"),
        ({"control_port": 1, "transport": "tcp"}, "wanted one of 'auto', 'shm', 'cuda'"),
    ],
)
def test_wrong_settings_stop_the_server(extra, words):
    with pytest.raises(kvloom.InvalidArgument, match=words):
        Settings.parse(extra, prefills=True)


def test_ranks_listen_one_after_another():
    settings = Settings.parse({"control_port": 18100, "control_host": "::1"}, prefills=True)
    assert settings.address(3) == "tcp://[::1]:18103"
    assert Settings.parse(None, prefills=False) == Settings()


# ---- the scheduler's half ----


def prefilling(**options) -> SchedulerSide:
    return SchedulerSide(prefills=True, decodes=False, groups=1, **options)


def decoding(**options) -> SchedulerSide:
    return SchedulerSide(prefills=False, decodes=True, groups=1, **options)


def test_blocks_are_told_chunk_by_chunk():
    side, request = prefilling(), Request("a", 300, TO_PREFILL)
    side.know(request)
    side.know(request)
    assert side.matched(request, 0) == (0, False)
    step = side.build(output(new={"a": (([1, 2],), 0, 128)}))
    assert step.offers == [Offer("a", "key", 30.0)] and step.chunks == [Chunk("a", 128, ([1, 2],), False)] and not step.idle
    assert side.build(output(cached={"a": (([3, 4],), 128, 128)})).chunks == [Chunk("a", 256, ([1, 2, 3, 4],), False)]
    assert side.build(output(cached={"a": (([5],), 256, 44)})).chunks == [Chunk("a", 300, ([1, 2, 3, 4, 5],), True)]
    assert side.build(output(cached={"a": (None, 300, 1)})) == Step()  # it decodes: nothing more is sent
    assert side.finished(request) and side.pending()
    assert side.build(output()) == Step(held=["a"], idle=True) and side.pending()
    side.sent({"a"})
    assert not side.pending()


def test_a_prefix_hit_of_prefill_is_ready_with_the_first_chunk():
    side = prefilling()
    side.know(Request("a", 300, TO_PREFILL))
    assert side.build(output(new={"a": (([1, 2, 3],), 256, 44)})).chunks == [Chunk("a", 300, ([1, 2, 3],), True)]


def test_others_requests_are_nobodys_business():
    side, plain = prefilling(), Request("plain", 10)
    side.know(plain)
    assert side.build(output(new={"plain": (([1],), 0, 10)})) == Step() and not side.finished(plain) and not side.pending()


@pytest.mark.parametrize(("tokens", "cancelled"), [(128, True), (298, True), (299, False), (300, False)])
def test_an_abort_ends_what_was_not_computed(tokens, cancelled):
    side, request = prefilling(), Request("a", 300, TO_PREFILL)
    side.know(request)
    side.build(output(new={"a": (([1, 2, 3],), 0, tokens)}))
    assert side.finished(request)
    step = side.build(output())
    assert step.held == ["a"] and bool(step.cancelled) is cancelled


def test_a_preempted_prefill_is_fenced_and_sends_no_more():
    side, request = prefilling(), Request("a", 300, TO_PREFILL)
    side.know(request)
    side.build(output(new={"a": (([1, 2],), 0, 128)}))
    assert side.build(output(preempted={"a", "other"})).preempted == ["a"]
    assert side.build(output(cached={"a": (([7, 8, 9],), 0, 300)}, resumed={"a"})) == Step()
    assert side.finished(request) and side.build(output()).held == ["a"]


def test_a_load_is_asked_for_once():
    clock = [100.0]
    side, request = decoding(now=lambda: clock[0]), Request("a", 300, TO_DECODE)
    side.know(request)
    clock[0] += 4
    assert side.matched(request, 128) == (171, True) and side.matched(request, 128) == (171, True)
    side.allocated(request, ([5, 6, 7],), 171)
    step = side.build(output())
    assert step.loads == [Load("a", "key", 26.0, ["tcp://127.0.0.1:1"], 128, 299, ([5, 6, 7],))] and step.idle
    side.landed({"a"})
    side.allocated(request, ([5, 6, 7],), 0)
    assert side.matched(request, 0) == (0, False)  # failed or preempted: computed here
    assert side.build(output()) == Step(idle=True)
    assert not side.finished(request) and not side.pending()


@pytest.mark.parametrize("prompt", [1, 129])
def test_who_needs_nothing_says_so(prompt):
    side, request = decoding(), Request("a", prompt, TO_DECODE)
    assert side.matched(request, prompt - 1) == (0, False)
    side.allocated(request, ([1, 2],), 0)
    (load,) = side.build(output()).loads
    assert (load.begin, load.end, load.tables) == (0, 0, ([],))


def test_who_leaves_while_it_waits_says_so():
    side, request = decoding(), Request("a", 300, TO_DECODE)
    side.know(request)
    assert not side.finished(request)
    assert [(load.begin, load.end) for load in side.build(output()).loads] == [(0, 0)]


def test_who_leaves_while_it_loads_cancels():
    side, request = decoding(), Request("a", 300, TO_DECODE)
    side.matched(request, 0)
    side.allocated(request, ([1, 2, 3],), 299)
    side.build(output())
    assert not side.finished(request) and side.pending()
    assert side.build(output()).cancelled == [("a", "the request was aborted")]


def test_a_wrong_decode_request_fails_as_a_load_does():
    side, request = decoding(), Request("a", 300, {"kvloom": {"role": "decode"}})
    assert side.matched(request, 0) == (299, True)
    side.allocated(request, ([1, 2, 3],), 299)
    assert "lacks transfer, seconds" in side.build(output()).loads[0].refused


def test_who_waited_too_long_for_blocks_is_told_so():
    clock = [100.0]
    side, late, left = decoding(now=lambda: clock[0]), Request("a", 300, TO_DECODE), Request("b", 300, TO_DECODE)
    side.know(left)
    side.matched(late, 0)
    clock[0] += 31
    side.allocated(late, ([5, 6, 7],), 299)
    side.finished(left)
    (load,) = side.build(output()).loads  # nobody is told of the one that left: prefill has given it up as well
    assert (load.request, load.refused) == ("a", "the 30 s that it was given were over before this server had blocks for it")


def test_a_layer_by_layer_start_is_a_synchronous_load():
    side, request = decoding(sync=True), Request("a", 300, TO_DECODE)
    assert side.matched(request, 0) == (299, False)
    side.allocated(request, ([1, 2, 3],), 299)
    assert side.build(output(new={"a": (([1, 2, 3],), 299, 1)})).loads[0].sync


# ---- the workers' halves, with real sessions ----

BLOCKS, HEADS, WIDE, LAYERS = 32, 4, 16, 3
NAMES = layer_names(LAYERS)


class Rank:
    """A worker's half over shared memory."""

    def __init__(self, role: str, block: int, isa: str = "vec", layers: int = LAYERS, heads: int = HEADS, item: type = np.float32) -> None:
        from kvloom.vllm.regions import local_cache

        transport = kvloom.shm_transport("*" if role == "decode" else "")
        each = BLOCKS * heads * block * WIDE * np.dtype(item).itemsize
        region = transport.allocate(each * layers)
        self.memory = np.asarray(region.array()).view(item).reshape(layers, BLOCKS, heads, block, WIDE)
        self.tensors = {name: tensor_of(memory) for name, memory in zip(layer_names(layers), self.memory, strict=True)}
        groups = alike(layers, block)
        self.placed = place(vllm_config(groups, heads, isa=isa), cache_config(groups, BLOCKS), self.tensors, 0)
        cache, self.counts = local_cache(self.placed, self.tensors, [region]), Counts()
        if role == "prefill":
            self.session = kvloom.SourceSession(transport, cache, events=True)
            self.side = PrefillSide(self.session, self.placed, self.counts)
            self.memory[:] = np.random.default_rng(1).random(self.memory.shape, np.float32)
        else:
            self.session = kvloom.TargetSession(transport, events=True)
            self.side = DecodeSide(self.session, self.session.describe(cache), self.placed, self.counts)

    def row(self, layer: int, table: list[int], token: int, block: int) -> np.ndarray:
        """K and V of a token, [heads, content]."""
        page = self.memory[layer, table[token // block]].reshape(HEADS, 2, -1)
        keys = page[:, 0].reshape(HEADS, WIDE // 2, block)[:, :, token % block]
        return np.concatenate([keys, page[:, 1].reshape(HEADS, block, WIDE // 2)[:, token % block]], axis=1)

    def heard(self, until) -> list:
        end, said = time.monotonic() + LONG, []
        while time.monotonic() < end:
            said.append(self.side.heard())
            if until(said):
                return said
            time.sleep(0.002)
        raise AssertionError(f"not within {LONG} s: {said[-3:]}")


@pytest.fixture
def ranks():
    made: list[Rank] = []

    def make(*arguments, **options) -> Rank:
        made.append(Rank(*arguments, **options))
        return made[-1]

    yield make
    for rank in made:
        if isinstance(rank.side, DecodeSide):
            rank.side.close()
        rank.session.close()


def load(prefill: Rank, begin: int, end: int, table: list[int], name: str = "d", **more) -> Load:
    return Load(name, more.pop("key", "key"), more.pop("seconds", LONG), [prefill.session.address], begin, end, (table,), **more)


def over(said: list) -> bool:
    return any(landed.over for landed in said)


def test_layers_land_as_their_hooks_fire(ranks):
    prefill, decode = ranks("prefill", 32), ranks("decode", 64)
    source, target = [3, 9, 4, 20], [7, 1]
    decode.side.begin(Step(loads=[load(prefill, 64, 99, target)]))
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG)], chunks=[Chunk("p", 64, (source[:2],), False)]))
    for layer in range(LAYERS):
        prefill.side.layer(NAMES[layer])
    prefill.side.sweep()
    prefill.side.begin(Step(chunks=[Chunk("p", 100, (source,), True)]))
    prefill.side.layer(NAMES[1])
    prefill.side.layer("a layer that is not ours")
    prefill.side.sweep()  # the others have no hook
    said = decode.heard(over)
    assert [(landed.over, landed.failed) for landed in said if landed.over] == [({"d"}, set())]
    for layer in range(LAYERS):
        for token in range(64, 99):
            assert np.array_equal(decode.row(layer, target, token, 64), prefill.row(layer, source, token, 32)), (layer, token)
        assert not decode.row(layer, target, 63, 64).any() and not decode.row(layer, target, 99, 64).any()
    prefill.side.begin(Step(held=["p"]))
    assert prefill.heard(lambda said: {"p"} in said)[-1] == {"p"}
    assert not prefill.side.open and not decode.side.open and decode.side.heard().over == set()


def test_packed_blocks_land_whole(ranks):
    prefill, decode = ranks("prefill", 32, "amx"), ranks("decode", 32, "amx")
    decode.side.begin(Step(loads=[load(prefill, 32, 99, [5, 6, 7, 8])]))
    for tokens, last in ((50, False), (100, True)):
        prefill.side.begin(Step(offers=[] if last else [Offer("p", "key", LONG)], chunks=[Chunk("p", tokens, ([1, 2, 3, 4],), last)]))
        prefill.side.sweep()
    decode.heard(over)
    assert np.array_equal(decode.memory[:, 6:9], prefill.memory[:, 2:5]) and not decode.memory[:, 5].any()


def test_an_empty_load_ends_prefill_and_is_not_reported(ranks):
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG)], held=["p"]))
    decode.side.begin(Step(loads=[load(prefill, 0, 0, [])]))
    prefill.heard(lambda said: {"p"} in said)
    end = time.monotonic() + LONG
    while decode.side.open and time.monotonic() < end:
        assert decode.side.heard().over == set()
    assert not decode.side.open


@pytest.mark.parametrize("by", ["decode", "prefill", "gone", "preempted"])
def test_each_end_is_reported_once_by_request_and_block(ranks, by):
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    decode.side.begin(Step(loads=[load(prefill, 32, 99, [5, 6, 7, 8])]))
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG)], chunks=[Chunk("p", 100, ([1, 2, 3, 4],), True)]))
    prefill.side.layer(NAMES[0])
    decode.session.wait_layer(kvloom.TransferKey("key"), 0, LONG)  # they have met: who was never there is missed only when time is up
    match by:
        case "decode":
            decode.side.begin(Step(cancelled=[("d", "left")]))
        case "prefill":
            prefill.side.begin(Step(cancelled=[("p", "left")]))
        case "gone":
            prefill.session.close()
        case "preempted":
            prefill.side.preempted(["p", "unknown"])
            assert prefill.session.open == 0  # it returned only when nobody reads the blocks
    landed = next(landed for landed in decode.heard(over) if landed.over)
    assert (landed.over, landed.failed, landed.blocks) == ({"d"}, {"d"}, {6, 7, 8})
    assert all(not landed.over for landed in decode.heard(lambda _: not decode.side.open))
    if by != "gone":
        prefill.side.begin(Step(held=["p"]))
        prefill.heard(lambda said: {"p"} in said)


def test_prefill_is_told_when_a_client_left_before_they_had_met(ranks):
    """Prefill computes the prompt, and keeps it for nobody."""
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    decode.side.begin(Step(loads=[load(prefill, 32, 99, [5, 6, 7, 8])]))
    decode.side.begin(Step(cancelled=[("d", "left")]))
    decode.heard(over)
    prefill.side.begin(Step(offers=[Offer("p", "key", 100 * LONG)], chunks=[Chunk("p", 100, ([1, 2, 3, 4],), True)], held=["p"]))
    prefill.side.sweep()
    prefill.heard(lambda said: {"p"} in said)
    decode.heard(lambda _: not decode.side.open)
    assert decode.counts.loads_cancelled == 1 and decode.counts.loads_failed == 0


def test_what_can_not_begin_is_reported_at_once(ranks):
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    decode.side.begin(Step(loads=[load(prefill, 0, 99, [1, 2, 3, 4], refused="no key"), load(prefill, 0, 99, [1, 2, 3, BLOCKS], "e", key="other")]))
    landed = decode.side.heard()
    assert landed.over == landed.failed == {"d", "e"} and decode.counts.refused == 2


def test_who_is_not_there_is_not_waited_for(ranks):
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    gone = dataclasses.replace(load(prefill, 0, 99, [1, 2, 3, 4]), sources=["tcp://127.0.0.1:1"])
    begun = time.monotonic()
    decode.side.begin(Step(loads=[gone]))
    assert next(landed for landed in decode.heard(over) if landed.over).failed == {"d"}
    assert time.monotonic() - begun < LONG / 2


def test_who_goes_before_they_have_met_is_not_waited_for(ranks):
    """As a server that is killed: it was there when it was asked first."""
    decode = ranks("decode", 32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        decode.side.begin(Step(loads=[Load("d", "key", 100 * LONG, [address], 0, 99, ([1, 2, 3, 4],))]))
        listener.accept()[0].close()
    assert next(landed for landed in decode.heard(over) if landed.over).failed == {"d"}


def test_nobody_is_asked_for_what_is_over_while_the_engine_sleeps(ranks):
    """An empty load: its engine has no request that waits, so nothing is heard until the next one comes."""
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG)], held=["p"]))
    decode.side.begin(Step(loads=[load(prefill, 0, 0, [], seconds=100 * LONG)]))
    prefill.heard(lambda said: {"p"} in said)
    end = time.monotonic() + LONG
    while decode.side._probe._watched and time.monotonic() < end:
        time.sleep(0.01)
    assert not decode.side._probe._watched and decode.side.open


def test_an_offer_with_a_key_in_use_is_computed_and_not_sent(ranks):
    prefill = ranks("prefill", 32)
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG), Offer("q", "key", LONG)], chunks=[Chunk("q", 32, ([1],), True)], held=["q"]))
    prefill.side.sweep()
    assert prefill.side.heard() == {"q"}


def test_who_is_refused_for_a_key_in_use_takes_nobody_with_it(ranks):
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    decode.side.begin(Step(loads=[load(prefill, 32, 99, [5, 6, 7, 8])]))
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG), Offer("q", "key", LONG)]))
    prefill.side.begin(Step(cancelled=[("q", "its client left")], held=["q"]))
    prefill.side.begin(Step(chunks=[Chunk("p", 100, ([1, 2, 3, 4],), True)]))
    prefill.side.sweep()
    assert next(landed for landed in decode.heard(over) if landed.over).failed == set()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"layers": 2}, "decode has the cache group kv_l0_of_standin_256_2_0_float32, prefill has not"),
        ({"item": np.float16}, "decode has the cache group kv_l0_of_standin_256_3_0_float16, prefill has not"),
        ({"heads": 2}, "prefill has 4 heads, decode 2: they must be one model's"),
    ],
)
def test_sides_that_do_not_fit_are_refused_when_they_meet(ranks, caplog, other, words):
    """The load fails, which vLLM answers by kv_load_failure_policy; the log says why."""
    prefill, decode = ranks("prefill", 32), ranks("decode", 32, **other)
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG)]))
    decode.side.begin(Step(loads=[load(prefill, 0, 99, [1, 2, 3, 4])]))
    begun = time.monotonic()
    assert next(landed for landed in decode.heard(over) if landed.over).failed == {"d"}
    assert time.monotonic() - begun < LONG / 2  # not for want of time
    assert re.search(f"request d was not loaded: .*{words}", caplog.text)
    prefill.side.begin(Step(held=["p"]))
    prefill.heard(lambda said: {"p"} in said)  # it is told, and does not keep its blocks for as long as it was given


def test_a_forward_pass_waits_layer_by_layer(ranks):
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    decode.side.begin(Step(loads=[load(prefill, 0, 99, [5, 6, 7, 8], sync=True)]))
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG)], chunks=[Chunk("p", 100, ([1, 2, 3, 4],), True)]))
    for layer in range(LAYERS):
        prefill.side.layer(NAMES[layer])
        decode.side.wait_layer(NAMES[layer])
        assert np.array_equal(decode.row(layer, [5, 6, 7, 8], 98, 32), prefill.row(layer, [1, 2, 3, 4], 98, 32))
    decode.side.end_step()
    end = time.monotonic() + LONG
    while decode.side.open and time.monotonic() < end:
        assert decode.side.heard() == type(decode.side.heard())()
    assert not decode.side.open


def test_a_layer_that_never_comes_is_reported_with_the_step(ranks):
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    decode.side.begin(Step(loads=[load(prefill, 32, 99, [5, 6, 7, 8], sync=True)]))
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG)], cancelled=[("p", "left")]))
    decode.side.wait_layer(NAMES[0])
    decode.side.wait_layer(NAMES[1])
    landed = decode.side.heard()
    assert landed.blocks == {6, 7, 8} and landed.over == set()


def test_a_layer_without_a_hook_that_never_comes_is_reported_with_the_step(ranks):
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    decode.side.begin(Step(loads=[load(prefill, 32, 99, [5, 6, 7, 8], sync=True)]))
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG)], chunks=[Chunk("p", 100, ([1, 2, 3, 4],), True)]))
    prefill.side.layer(NAMES[0])
    decode.side.wait_layer(NAMES[0])  # vLLM calls no other
    prefill.side.begin(Step(cancelled=[("p", "left")]))
    decode.side.end_step()
    assert decode.side.heard().blocks == {6, 7, 8}


def test_where_a_step_is_computed_in_parts_no_hook_is_believed(ranks):
    prefill, decode = ranks("prefill", 32), ranks("decode", 32)
    prefill.side._hooks = False
    decode.side.begin(Step(loads=[load(prefill, 0, 99, [5, 6, 7, 8])]))
    prefill.side.begin(Step(offers=[Offer("p", "key", LONG)], chunks=[Chunk("p", 100, ([1, 2, 3, 4],), True)]))
    for layer in range(LAYERS):
        prefill.side.layer(NAMES[layer])
    assert prefill.session.counts()["posts"] == 0
    prefill.side.sweep()
    assert next(landed for landed in decode.heard(over) if landed.over).failed == set()


# ---- statistics ----


def test_counts_add_up_over_workers():
    counts = [Counts(loaded=1, bytes=10, load_seconds=[0.2]), Counts(loads_failed=2, load_seconds=[0.1])]
    one, two = (each.take() for each in counts)
    assert one is not None and two is not None and counts[0].take() is None
    assert one.aggregate(two).reduce() == {"loaded": 1, "loads_failed": 2, "bytes": 10, "load_seconds p50": 0.2, "load_seconds max": 0.2}
    assert KVLoomStats().is_empty()
