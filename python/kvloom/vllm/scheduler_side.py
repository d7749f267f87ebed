"""The connector's half in the scheduler: which requests are sent or loaded, and what the workers are told with each step.  No I/O.

    prefill request   known ──► offered ──► chunks... ──► finished: blocks held ──► workers say sent: forgotten
    decode request    known ──► matched ──► loading ──► landed or failed, or cancelled ──► finished: forgotten

Law: `finished` holds the blocks of each request that was offered, until every worker has answered; so each is reported once, whether its
transfer had ended before, ends later, or never began. A load is begun at most once; what comes back to the scheduler afterwards (failed,
preempted) is computed here. Law: who was named by the proxy is told of the end: a decode request that wants nothing, or leaves before it
began, still begins with an empty range, by which its prefill ranks are done. Law: whatever vLLM's prefix cache offers is whole: a window that begins
inside a block is loaded from there on, and vLLM takes the block for computed; it is withdrawn from the cache before anybody else can find it.
Thread: the scheduler's.  Clock: `now`, seconds.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from kvloom.errors import InvalidArgument
from kvloom.vllm.metadata import Chunk, Load, Offer, Step
from kvloom.vllm.params import DECODE, PREFILL, Transfer

logger = logging.getLogger("vllm.kvloom")

WAITING, LOADING, OVER = "waiting", "loading", "over"


@dataclasses.dataclass
class Sending:
    """A prefill request."""

    key: str
    prompt: int  # tokens
    tables: list[list[int]]
    tokens: int = 0  # that were scheduled so far
    over: bool = False  # no more chunks: it was preempted
    kept: list[Any] = dataclasses.field(default_factory=list)  # blocks that we hold ourselves (Holder)


@dataclasses.dataclass
class Loading:
    """A decode request."""

    transfer: Transfer | None
    until: float
    prompt: int  # tokens
    state: str = WAITING
    local: int = 0  # tokens that are cached here
    partial: set[int] = dataclasses.field(default_factory=set)  # blocks of windows of which only the end is loaded
    refused: str = ""


class SchedulerSide:
    def __init__(
        self, prefills: bool, decodes: bool, groups: int, windows: dict[int, tuple[int, int]] | None = None, sync: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`windows`: of KV cache groups with a sliding window, (tokens of the window, tokens of a block)."""
        self._prefills, self._decodes, self._groups, self._sync, self._now = prefills, decodes, groups, sync, now
        self._windows = windows or {}
        self._pool: Any = None
        self._sending: dict[str, Sending] = {}
        self._loading: dict[str, Loading] = {}
        self._held: set[str] = set()
        self._partial: dict[str, set[int]] = {}  # `partial` of loads that are over, until their requests go on
        self._step = Step()

    def bind_pool(self, pool: Any) -> None:
        self._pool = pool

    # ---- requests come ----

    def know(self, request: Any) -> None:
        """Called as soon as vLLM tells of a request; again does nothing."""
        name = request.request_id
        if name in self._sending or name in self._loading or not request.kv_transfer_params:
            return
        try:
            transfer = Transfer.parse(request.kv_transfer_params)
        except InvalidArgument as wrong:
            self._know_wrong(request, str(wrong))
            return
        if transfer is None:
            return
        if transfer.role == PREFILL and self._prefills:
            self._sending[name] = Sending(transfer.key, request.num_prompt_tokens, [[] for _ in range(self._groups)])
            self._step.offers.append(Offer(name, transfer.key, transfer.seconds))
        elif transfer.role == DECODE and self._decodes:
            self._loading[name] = Loading(transfer, self._now() + transfer.seconds, request.num_prompt_tokens)
        else:
            self._know_wrong(request, f"the request is for {transfer.role}, which this server's kv_role does not do")

    def _know_wrong(self, request: Any, why: str) -> None:
        """A decode request fails by the policy of failed loads; a prefill request is computed, and nothing is sent."""
        logger.error("kvloom: request %s: %s", request.request_id, why)
        params = request.kv_transfer_params
        said = params.get("kvloom") if isinstance(params, dict) else None
        if self._decodes and not (isinstance(said, dict) and said.get("role") == PREFILL):
            self._loading[request.request_id] = Loading(None, self._now(), request.num_prompt_tokens, refused=why)

    # ---- decode ----

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """(tokens to load beyond `computed`, whether the request waits for them). The last prompt token is always computed here.
        None: `computed` may count blocks that were just withdrawn; ask again."""
        self.know(request)
        self._partial.pop(request.request_id, None)  # its load has failed, and the blocks aren't its own any more
        found = [self._withdraw(blocks) for blocks in self._partial.values()]
        if computed and any(found):
            return None, False
        load = self._loading.get(request.request_id)
        if load is None or load.state != WAITING:
            return 0, False
        load.local = computed
        wanted = max(0, load.prompt - 1 - computed)
        return wanted, wanted > 0 and not self._sync

    def allocated(self, request: Any, tables: tuple[list[int], ...], external: int) -> None:
        load = self._loading.get(request.request_id)
        if load is None:
            return
        if load.state != WAITING:
            self._withdraw(self._partial.pop(request.request_id, set()))
        elif external > 0:
            load.state = LOADING
            tokens = (load.local, load.local + external)
            load.partial = self._in_part(tokens, tables)
            if self._sync:
                self._withdraw(load.partial)
            self._begin(request.request_id, load, tokens, tables)
        else:
            load.state = OVER
            self._decline(request.request_id, load)

    def _begin(self, name: str, load: Loading, tokens: tuple[int, int], tables: tuple[list[int], ...]) -> None:
        transfer = load.transfer
        seconds = max(0.0, load.until - self._now())
        key, sources = (transfer.key, transfer.sources) if transfer else ("", [])
        refused = load.refused
        if transfer and not seconds:
            refused = f"the {transfer.seconds:g} s that it was given were over before this server had blocks for it"
        self._step.loads.append(Load(name, key, seconds, sources, *tokens, tables, self._sync and tokens[1] > tokens[0], refused))

    def _in_part(self, tokens: tuple[int, int], tables: tuple[list[int], ...]) -> set[int]:
        """Blocks in the midst of which a window begins: what is before is not loaded, since nobody reads it for this request."""
        begin, end = tokens
        found = set()
        for group, (window, block) in self._windows.items():
            first = end - window + 1  # the next token reads it and those after it
            if first > begin and first % block:
                found.add(tables[group][first // block])
        return found

    def _withdraw(self, blocks: set[int]) -> bool:
        """From vLLM's prefix cache, which has them once their request goes on. @return whether some were there."""
        if self._pool is None:
            return False
        cached = {number for number in blocks if self._pool.blocks[number].block_hash is not None}
        if cached:
            self._pool.evict_blocks(cached)
        return bool(cached)

    def _decline(self, name: str, load: Loading) -> None:
        if load.transfer is not None and load.until > self._now():  # afterwards prefill has given it up by itself
            self._begin(name, load, (0, 0), tuple([] for _ in range(self._groups)))

    # ---- each step ----

    def build(self, output: Any) -> Step:
        """What the workers are told; from now on the next step's is gathered."""
        if self._sending:
            self._go_on(output)
        self._step.idle = not output.total_num_scheduled_tokens
        step, self._step = self._step, Step()
        return step

    def _go_on(self, output: Any) -> None:
        for request in output.scheduled_new_reqs:
            self._grow(request.req_id, request.block_ids, request.num_computed_tokens, output, fresh=True)
        cached = output.scheduled_cached_reqs
        resumed = resumed_of(cached)
        for place, name in enumerate(cached.req_ids):
            if name in self._sending:
                self._grow(name, cached.new_block_ids[place], cached.num_computed_tokens[place], output, fresh=name in resumed)
        self._step.preempted += self._preempted(set(getattr(output, "preempted_req_ids", None) or ()) | resumed)

    def _grow(self, name: str, blocks: tuple[list[int], ...] | None, computed: int, output: Any, fresh: bool) -> None:
        sending = self._sending.get(name)
        if sending is None or sending.over or (fresh and sending.tokens):  # fresh again: it was preempted, and is over below
            return
        for table, more in zip(sending.tables, blocks or (), strict=False):
            table += more
        tokens = min(sending.prompt, computed + output.num_scheduled_tokens.get(name, 0))
        if tokens > sending.tokens:
            sending.tokens = tokens
            self._step.chunks.append(Chunk(name, tokens, tuple(list(table) for table in sending.tables), tokens == sending.prompt))
            if tokens == sending.prompt:
                self._keep(sending)

    def _keep(self, sending: Sending) -> None:
        """vLLM frees a window's blocks as it moves, and the last token moves it past what decode wants: hold those ourselves."""
        if self._pool is None:
            return
        for group, (window, block) in self._windows.items():
            table = sending.tables[group]
            columns = table[max(0, sending.prompt - window) // block :]
            sending.kept += [self._pool.blocks[number] for number in columns if number]
        if sending.kept:
            self._pool.touch(sending.kept)

    def _preempted(self, names: set[str]) -> list[str]:
        lost = []
        for name in names:
            sending = self._sending.get(name)
            if sending is not None and not sending.over:
                sending.over = True
                lost.append(name)
        return lost

    # ---- requests end ----

    def finished(self, request: Any) -> bool:
        """True: the blocks stay until the workers have answered. A prompt that was computed is sent, however the request ended."""
        name = request.request_id
        self._forget_load(name)
        sending = self._sending.get(name)
        if sending is None:
            return False
        if sending.tokens < sending.prompt - 1 and not sending.over:
            self._step.cancelled.append((name, "the request ended before its prompt was computed"))
        self._held.add(name)
        self._step.held.append(name)
        return True

    def _forget_load(self, name: str) -> None:
        load = self._loading.pop(name, None)
        self._partial.pop(name, None)
        if load is None or load.state == OVER:
            return
        if load.state == LOADING:
            self._step.cancelled.append((name, "the request was aborted"))
        else:
            self._decline(name, load)

    def landed(self, names: set[str] | None) -> None:
        """Loads that the workers have reported, whatever became of them."""
        for name in names or ():
            if load := self._loading.get(name):
                load.state = OVER
                if load.partial and not self._sync:
                    self._partial[name] = load.partial

    def sent(self, names: set[str] | None) -> None:
        """Finished prefills that no worker reads any more."""
        for name in names or ():
            self._held.discard(name)
            sending = self._sending.pop(name, None)
            if sending and sending.kept:
                self._pool.free_blocks(sending.kept)

    def pending(self) -> bool:
        """Whether the engine has to go on stepping though no request is live: workers have to be told, or to answer."""
        step = self._step
        return bool(self._held or step.offers or step.loads or step.cancelled or step.held or step.preempted)


def resumed_of(cached: Any) -> set[str]:
    """Requests that come back after a preemption, with new blocks. 0.24 named them one by one, older ones in step with req_ids."""
    resumed = getattr(cached, "resumed_req_ids", None)
    if resumed is not None:
        return set(resumed)
    flags = getattr(cached, "resumed_from_preemption", None) or ()
    return {name for name, flag in zip(cached.req_ids, flags, strict=False) if flag}
