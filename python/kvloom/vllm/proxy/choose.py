"""Which instance a request goes to: the one that can answer first, as far as the proxy knows.

Sentence: work(i) = (open tokens of i + the request's tokens - what i's cache saves) / weight(i); the least wins.
Law: with equal weights nobody is chosen whose open tokens exceed the least loaded one's by more than `imbalance`, nor by more
than its cache saves. Equal work is decided by rendezvous hashing of the first block: several proxies in front of the same idle
servers agree, and an instance that leaves moves only its own prefixes. What caches hold is what was sent there (least recently
used blocks forgotten), and nothing after a restart.
Owner: the loop's thread; no I/O, no clock. Source: rendezvous hashing, Thaler & Ravishankar 1998.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable

from kvloom.vllm.proxy.asked import BLOCK_TOKENS
from kvloom.vllm.proxy.config import Instance


class Member:
    """One instance with what is open on it and what its cache may hold."""

    def __init__(self, instance: Instance, remembered: int) -> None:
        self.instance = instance
        self.name = instance.name
        self.up = False
        self.open = 0  # requests
        self.tokens = 0  # of these
        self._remembered = remembered
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def matched(self, blocks: Iterable[bytes]) -> int:
        """How many leading blocks were sent here before."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count

    def remember(self, blocks: tuple[bytes, ...]) -> None:
        """Last block first: of one prompt, its head is forgotten last."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._remembered:
            self._blocks.popitem(last=False)

    def forget(self) -> None:
        """Its process ended: the cache is empty."""
        self._blocks.clear()


class Lease:
    """A request's share of an instance's load, given back once."""

    def __init__(self, member: Member, tokens: int, matched: int) -> None:
        self.member = member
        self.matched = matched  # tokens that its cache should hold
        self._tokens = tokens
        self._open = True
        member.open += 1
        member.tokens += tokens

    def release(self) -> None:
        if self._open:
            self._open = False
            self.member.open -= 1
            self.member.tokens -= self._tokens


class Pool:
    """All instances of one role."""

    def __init__(
        self, instances: Iterable[Instance], *, affinity: float = 1.0, imbalance: int = 65_536, remembered: int = 65_536
    ) -> None:
        self.members = [Member(instance, remembered) for instance in instances]
        self._affinity = affinity
        self._imbalance = imbalance

    def any_up(self) -> bool:
        return any(member.up for member in self.members)

    def take(self, tokens: int, head: bytes, blocks: tuple[bytes, ...], avoid: Collection[Member] = ()) -> Lease | None:
        """The member for a request of that many tokens, or None when all are down. Those to avoid are taken only when no other is
        up."""
        up = [member for member in self.members if member.up]
        open_to = [member for member in up if member not in avoid] or up
        if not open_to:
            return None
        matched = {member.name: member.matched(blocks) * BLOCK_TOKENS for member in open_to}

        def work(member: Member) -> tuple[float, bytes]:
            saved = min(self._affinity * matched[member.name], self._imbalance, tokens)
            tie = hashlib.blake2b(head, digest_size=8, key=member.name.encode()[:64]).digest()
            return (member.tokens + tokens - saved) / member.instance.weight, tie

        best = min(open_to, key=work)
        best.remember(blocks)
        return Lease(best, tokens, min(matched[best.name], tokens))
