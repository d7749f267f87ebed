"""The laws of choosing: bounded imbalance, affinity, stable ties, load given back once."""

import json
import random

import pytest

from kvloom.vllm.proxy import asked
from kvloom.vllm.proxy.asked import BLOCK_TOKENS, Asked
from kvloom.vllm.proxy.choose import Lease, Pool
from kvloom.vllm.proxy.config import Instance


def pool(
    count: int, imbalance: int = 65_536, affinity: float = 1.0, weights: tuple[float, ...] = (), remembered: int = 65_536
) -> Pool:
    instances = [Instance("prefill", f"http://10.0.0.{n}:8100", weights[n] if weights else 1.0) for n in range(count)]
    made = Pool(instances, affinity=affinity, imbalance=imbalance, remembered=remembered)
    for member in made.members:
        member.up = True
    return made


def request(text: str, **fields: object) -> Asked:
    return asked.read("completions", json.dumps({"prompt": text, **fields}).encode())


def take(p: Pool, text: str) -> Lease:
    one = request(text)
    lease = p.take(one.tokens, one.head, one.blocks)
    assert lease is not None
    return lease


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_chosen_far_above_the_least_loaded(seed: int) -> None:
    rng = random.Random(seed)
    bound = rng.choice([0, 1000, 20_000])
    p = pool(rng.randint(2, 6), imbalance=bound)
    heads = [str(n) * 4096 * rng.randint(1, 20) for n in range(4)]
    leases: list[Lease] = []
    for _ in range(300):
        before = {member.name: member.tokens for member in p.members}
        lease = take(p, rng.choice(heads) + str(rng.random()))
        chosen = before[lease.member.name]
        assert chosen - min(before.values()) <= min(bound, lease.matched)
        leases.append(lease)
        for _ in range(rng.randint(0, 2)):
            leases.pop(rng.randrange(len(leases))).release() if leases else None
    for lease in leases:
        lease.release()
        lease.release()  # once is what counts
    assert all((member.open, member.tokens) == (0, 0) for member in p.members)


def test_the_same_prefix_goes_where_it_was() -> None:
    p = pool(4)
    chosen = {}
    for n in range(40):
        first = take(p, f"{n:04}" * 1024)
        chosen[n] = first.member
        first.release()
    for n in range(40):
        again = take(p, f"{n:04}" * 1024 + "and a question")
        assert again.member is chosen[n]
        assert again.matched == 1024
        again.release()


def test_a_cache_is_worth_as_much_work_as_it_saves() -> None:
    p = pool(2)
    for n in range(20):
        prefix = f"{n:04}" * 1024  # 1,024 tokens
        first = take(p, prefix)
        first.release()
        for queued, stays in ((1000, True), (1100, False)):
            first.member.tokens += queued
            again = take(p, prefix)
            assert (again.member is first.member) == stays
            again.release()
            first.member.tokens -= queued
            next(member for member in p.members if member is not first.member).forget()


def test_without_affinity_only_load_counts() -> None:
    p = pool(2, affinity=0.0)
    counts = {member.name: 0 for member in p.members}
    for _ in range(100):
        counts[take(p, "x" * 4096).member.name] += 1
    assert set(counts.values()) == {50}


def test_idle_servers_share_different_prompts_and_two_proxies_agree() -> None:
    one, other = pool(4), pool(4)
    names = []
    for n in range(400):
        a, b = take(one, f"prompt {n}"), take(other, f"prompt {n}")
        assert a.member.name == b.member.name
        names.append(a.member.name)
        a.release()
        b.release()
    assert all(50 < names.count(member.name) < 150 for member in one.members)


def test_a_server_that_leaves_moves_only_its_own_prefixes() -> None:
    whole, less = pool(4), pool(4)
    gone = less.members[2]
    gone.up = False
    for n in range(200):
        a, b = take(whole, f"prompt {n}"), take(less, f"prompt {n}")
        assert a.member.name == b.member.name or a.member.name == gone.name
        a.release()
        b.release()


def test_weight_is_a_share_of_the_load() -> None:
    p = pool(2, weights=(1.0, 3.0))
    for n in range(400):
        take(p, f"{n} " * 100)
    light, heavy = (member.tokens for member in p.members)
    assert 2.7 < heavy / light < 3.3


def test_those_to_avoid_are_taken_when_nobody_else_is_up() -> None:
    p = pool(2)
    first, second = p.members
    for n in range(20):
        lease = p.take(10, str(n).encode(), (), {first})
        assert lease is not None
        assert lease.member is second
    second.up = False
    lease = p.take(10, b"", (), {first})
    assert lease is not None
    assert lease.member is first
    first.up = False
    assert p.take(10, b"", ()) is None


def test_what_is_remembered_is_bounded_and_forgets_tails_first() -> None:
    p = pool(1, remembered=8)
    long = request("".join(f"{n:0512}" for n in range(6)))
    member = p.members[0]
    member.remember(long.blocks)
    member.remember(request("y" * 512 * 4).blocks)
    assert member.matched(long.blocks) == 4  # the last two made room
    member.forget()
    assert member.matched(long.blocks) == 0


def test_digests_tell_prefixes_apart() -> None:
    base = request("a" * 512 * 3)
    assert len(base.blocks) == 3
    assert base.tokens == 3 * BLOCK_TOKENS
    assert request("a" * 512 * 3 + "b" * 511).blocks == base.blocks
    assert request("a" * 512 * 2 + "b" * 512).blocks[:2] == base.blocks[:2]
    assert request("b" + "a" * 511 + "a" * 1024).blocks[1] != base.blocks[1]  # a digest covers all before it
    for field, value in (("model", "other"), ("cache_salt", "s"), ("chat_template", "t")):
        assert not set(request("a" * 512 * 3, **{field: value}).blocks) & set(base.blocks)
    assert request("a" * 512 * 3, temperature=0.5).blocks == base.blocks


def test_sizes_are_estimated_from_what_is_there() -> None:
    def size(route: asked.Route, **fields: object) -> int:
        return asked.read(route, json.dumps(fields).encode()).tokens

    assert size("completions", prompt=list(range(1000))) == 1000
    assert size("completions", prompt="织" * 4) == 3  # 12 bytes
    assert size("completions", prompt="") == 1
    image = {"type": "image_url", "image_url": {"url": "data:" + "x" * 10_000}}
    assert size("chat", messages=[{"role": "user", "content": [{"type": "text", "text": "four"}, image]}]) == 4 + 1 + 576
    assert size("chat", messages=[1, None, {"role": "user"}]) == 4
    assert len(asked.read("completions", json.dumps({"prompt": "x" * 10**6}).encode()).blocks) == asked.MOST_BLOCKS


def test_chats_that_grow_keep_their_blocks() -> None:
    turns = [
        {"role": "user", "content": "u" * 700},
        {"role": "assistant", "content": "a" * 700},
        {"role": "user", "content": "more"},
    ]
    short = asked.read("chat", json.dumps({"messages": turns[:2]}).encode())
    long = asked.read("chat", json.dumps({"messages": turns}).encode())
    assert short.blocks
    assert long.blocks[: len(short.blocks)] == short.blocks
