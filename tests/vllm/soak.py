"""Many requests as a trace has them, from clients of which some leave; and what servers' processes hold, to compare before and after.

    asked = trace(200, seed=0)                              # lengths as in samples/requests.jsonl, scaled to our servers
    with Clients(proxy.url, asked, at_once=8) as clients:   # .begun: how many were asked so far
        told = clients.answers()                            # [Told], in order: tokens, an error, or that the client left

Law: each request is asked once, and gives one Told. A client that leaves has little patience: it waits for the next token for as long as was
drawn for it, or takes as many as were drawn; so it leaves in any state of its request, and nobody sleeps.
Threads: `at_once`, which end with the block.
"""

import contextlib
import dataclasses
import json
import pathlib
import random
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from ask import ANSWER_DEADLINE, complete, stream
from harness import Kept, Server, ServerError
from keeper import shared_files
from settings import REPOSITORY

SCALE = 16  # the trace's tokens for one of ours: prompts of up to 32,000 and answers of up to 1,500 become 1,900 and 93
LONGEST = 1_900
LEAVE = 0.1  # part of the requests whose clients leave
SHARED = 0.25  # part that begins as an earlier one did


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request. `patience`, `events`: its client leaves after so many seconds without a token, or so many events; None: it stays."""

    prompt: list[int]
    max_tokens: int
    streamed: bool
    patience: float | None = None  # seconds
    events: int | None = None

    @property
    def leaves(self) -> bool:
        return self.patience is not None


@dataclasses.dataclass(frozen=True)
class Told:
    """What the client got: exactly one of them is set, or neither if it left."""

    tokens: tuple[int, ...] | None = None
    error: str | None = None


def trace(count: int, seed: int) -> list[Asked]:
    """Requests with the trace's lengths, drawn with `seed`; 10% leave, exactly."""
    draw = random.Random(seed)
    lines = [json.loads(line) for line in (REPOSITORY / "samples/requests.jsonl").read_text().splitlines()]
    leaving = set(draw.sample(range(count), round(count * LEAVE)))
    out: list[Asked] = []
    for number in range(count):
        if number % len(lines) == 0:
            draw.shuffle(lines)
        line = lines[number % len(lines)]
        length = max(1, min(LONGEST, line["input_length"] // SCALE))
        made = Asked(_prompt(draw, length, out), max(1, line["output_length"] // SCALE), streamed=draw.random() < 0.5)
        if number in leaving:
            made = dataclasses.replace(made, streamed=True, patience=draw.choice([0.001, 0.05, 0.2, 0.8]), events=draw.randrange(8))
        out.append(made)
    return out


def _prompt(draw: random.Random, length: int, before: list[Asked]) -> list[int]:
    fresh = [draw.randrange(256) for _ in range(length)]
    if not before or draw.random() >= SHARED:
        return fresh
    earlier = draw.choice(before).prompt
    return (earlier[: len(earlier) // 2] + fresh)[:length]


class Clients:
    """All of them, `at_once` at a time, from now on."""

    def __init__(self, url: str, asked: list[Asked], at_once: int = 8):
        self._url = url
        self._lock = threading.Lock()
        self.begun = 0
        self._pool = ThreadPoolExecutor(at_once)
        self._futures: list[Future[Told]] = [self._pool.submit(self._ask, one) for one in asked]

    def answers(self) -> list[Told]:
        return [future.result() for future in self._futures]

    def _ask(self, one: Asked) -> Told:
        with self._lock:
            self.begun += 1
        try:
            if not one.streamed:
                return Told(tokens=complete(self._url, one.prompt, one.max_tokens).tokens)
            return self._read(one)
        except (ServerError, RuntimeError, OSError) as error:
            return Told(error=str(error) or repr(error))

    def _read(self, one: Asked) -> Told:
        with stream(self._url, one.prompt, one.max_tokens, deadline=one.patience or ANSWER_DEADLINE) as reading:
            if not one.leaves:
                return Told(tokens=tuple(reading.rest()))
            with contextlib.suppress(TimeoutError):
                for _ in range(one.events or 0):
                    if reading.next() is None:
                        break
        return Told()

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


# ---- what is held ----


@dataclasses.dataclass(frozen=True)
class Held:
    """Of one server's engine and worker processes. Not of its HTTP server, whose connections live on for a while."""

    threads: int
    sockets: int
    shared: int  # mappings of memory without a name (memfd): one's own cache, and those of peers


def held(server: Kept) -> Held:
    processes = [process for process, name in server.processes().items() if name.startswith("VLLM::")]
    return Held(
        sum(len(list(pathlib.Path(f"/proc/{process}/task").iterdir())) for process in processes),
        sum(_links(process).count("socket:") for process in processes),
        sum(line.count("/memfd:") for process in processes for line in pathlib.Path(f"/proc/{process}/maps").read_text().splitlines()),
    )


def _links(process: int) -> str:
    out = []
    for entry in pathlib.Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            out.append(str(entry.readlink()))
    return "\n".join(out)


def named(server: Server) -> set[str]:
    """Files of shared memory, and sockets with a name in the file system outside the server's own folder, that its processes have now."""
    lines = [line.split() for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = {f"socket:[{fields[6]}]": fields[7] for fields in lines if len(fields) > 7 and fields[7].startswith("/")}
    processes = list(server.processes())
    sockets = {paths[link] for process in processes for link in _links(process).splitlines() if link in paths}
    return shared_files(processes) | {path for path in sockets if pathlib.Path(path).parent != server.sockets}


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
