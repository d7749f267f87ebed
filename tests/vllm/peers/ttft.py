"""Time to first token over prefill and decode, beside one server that does both: all connectors in one interleaved run.

A round has a block for each (length, at once) and connector, connectors in another order each round. In a block only that pair runs: the others are
frozen (SIGSTOP), since an idle worker of one of them spins a core. After each thaw requests are sent until one loads as it should: pairs that were
frozen for longer than they wait for each other meet anew, and that is not what is measured. Prompts are random and never seen before, the same for
all connectors of a round.

A sample is one block: the median of its requests' times, from before the first byte is sent until decode's first token has been read. Two things are
checked of every block: the tokens are the single server's, and decode computed nothing of the prompts but the last token of each, by vLLM's own count of
tokens per step (vllm:iteration_tokens_total). A load that failed and was recomputed would otherwise be measured as one.
"""

import dataclasses
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from ask import prompts_of, stream
from failures import Half
from harness import ServerError

from .connectors import Pair

LENGTHS = (256, 1_024, 1_900)  # prompt tokens
AT_ONCE = (1, 8)
ALONE_REPEATS = 3  # requests of a block with one at once
TOKENS = 4  # that decode is asked for
SECONDS = 60.0  # that a transfer is given
WARM_LENGTH, WARM_TRIES = 200, 8
WARM_WITHIN = 120.0  # seconds, after which no other request is tried
COMPUTED = "vllm:iteration_tokens_total_sum"


@dataclasses.dataclass(frozen=True)
class Sample:
    connector: str
    round: int
    length: int
    at_once: int
    seconds: tuple[float, ...]  # of each request
    recomputed: int  # prompt tokens that decode computed, beyond the last of each
    wrong: int  # answers whose tokens are not the single server's

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def first_token(pair: Pair, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
    """One request, asked as the connector's own proxy does. @return seconds to the first token, all tokens."""
    if pair.way is None:
        begin, half, params = time.monotonic(), None, {}
    else:
        halves = pair.way.halves(SECONDS)
        begin = time.monotonic()
        half = Half(pair.prefill.url, prompt, 1, halves.to_prefill, SECONDS)
        params = {"kv_transfer_params": halves.to_decode(None if pair.way.decode_first else half.wait().params)}
    with stream((pair.decode or pair.prefill).url, prompt, TOKENS, deadline=SECONDS, **params) as reading:
        reading.next()
        seconds = time.monotonic() - begin
        tokens = tuple(reading.rest())
    if half is not None and half.wait().outcome != "tokens":
        raise ServerError(f"{pair.prefill.what} did not compute its half: {half.outcome}")
    return seconds, tokens


def computed(pair: Pair) -> int:
    """Tokens that decode's engine has computed since it started."""
    return int(pair.decode.metrics(SECONDS).get(COMPUTED, 0)) if pair.decode is not None else 0


def warm(pair: Pair, seed: int) -> None:
    """Ask until the pair answers with what was loaded. @error it never does: ServerError."""
    begin, attempt = time.monotonic(), 0
    for attempt, prompt in enumerate(prompts_of([WARM_LENGTH] * WARM_TRIES, seed=-seed - 1)):
        before = computed(pair)
        first_token(pair, prompt)
        if computed(pair) - before < WARM_LENGTH and attempt > 0:
            return
        if time.monotonic() - begin > WARM_WITHIN:
            break
    raise ServerError(f"{pair.name}: decode computed {attempt + 1} prompts itself in a row; its log ends with\n{pair.decode.last_words()}")


def block(pair: Pair, number: int, length: int, at_once: int, prompts: list[list[int]], right: list[tuple[int, ...]] | None) -> tuple[Sample, list]:
    """@return the sample, and the tokens. `right`: what they should be."""
    before = computed(pair)
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda prompt: first_token(pair, prompt), prompts))
    tokens = [answer[1] for answer in answers]
    beyond = max(0, computed(pair) - before - (TOKENS + 1) * len(prompts))
    wrong = sum(one != other for one, other in zip(tokens, right or tokens, strict=True))
    return Sample(pair.name, number, length, at_once, tuple(answer[0] for answer in answers), beyond, wrong), tokens


def measure(pairs: list[Pair], rounds: int, say=print) -> list[Sample]:
    """@pre all pairs run and are frozen; the first is the single server. @post they are frozen."""
    samples = []
    for number in range(rounds):
        turned = pairs[1:][number % max(1, len(pairs) - 1) :] + pairs[1:][: number % max(1, len(pairs) - 1)]
        # The single server begins each round, since its tokens are the right ones; it has no peer whose order could matter.
        for at_once in AT_ONCE:
            for length in LENGTHS:
                seed = (number * 100 + at_once) * 10_000 + length
                prompts = prompts_of([length] * (ALONE_REPEATS if at_once == 1 else at_once), seed=seed)
                right = None
                for pair in [pairs[0], *turned]:
                    pair.thaw()
                    warm(pair, seed)
                    sample, tokens = block(pair, number, length, at_once, prompts, right)
                    pair.freeze()
                    right = right or tokens
                    samples.append(sample)
                these = ", ".join(f"{s.connector} {s.median * 1e3:.1f}" for s in samples[-len(pairs) :])
                say(f"round {number + 1} of {rounds}, {length} tokens, {at_once} at once: {these} ms")
    return samples


def beyond(samples: list[Sample], connector: str, length: int, at_once: int) -> list[float]:
    """Seconds beyond the single server's, of each round."""
    of = {(s.connector, s.round): s.median for s in samples if (s.length, s.at_once) == (length, at_once)}
    return [seconds - of["none", number] for (name, number), seconds in sorted(of.items()) if name == connector]
