"""A vLLM in a process of its own, stepped as a server's engine is: for tests of two that meet, which need two processes, and of their ends.

    with Instance(Settings(model("llama"), connector=...)) as prefill, Instance(...) as decode:
        prefill.add("a", prompt, 1, parameters)      requests run at once, as they come
        decode.ended("b")                            waits for the answer
        decode.pool(), decode.sums("b", tokens)      what its engine holds; checksums of a request's KV, whatever its layout and blocks
        prefill.kill()                               SIGKILL

The child steps its engine as long as vLLM's scheduler has something to do, and sleeps otherwise, as EngineCore's loop does
(vllm/v1/engine/core.py, run_busy_loop). 10 seconds to start; what a server adds (HTTP, tokens of text) is not in it.
Owner: the test. Nothing outlives it: the child dies with its parent.
"""

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time

from harness import Pool, until
from in_process import Engine, Ended
from settings import Settings

START_DEADLINE = 600.0  # seconds; where others take the cores, an engine takes minutes to start
DEADLINE = 120.0


class Instance:
    def __init__(self, settings: Settings, what: str = "instance"):
        self.what, self.settings = what, settings
        self._log = tempfile.TemporaryFile("w+")
        self._ended: dict[str, Ended] = {}
        self.when: dict[str, float] = {}  # a request's answer came, seconds of time.monotonic()
        self._answers: dict[int, object] = {}
        self._asked = 0
        self._silent = False  # it says nothing any more: it has ended, or is about to
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, __file__, repr(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=os.environ | settings.environment_of(),
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            said = json.loads(line)
            with self._news:
                if "ended" in said:
                    self.when[said["ended"]] = time.monotonic()
                    self._ended[said["ended"]] = Ended(said["ended"], tuple(said["tokens"]), said["reason"], said["params"])
                else:
                    self._answers[said["to"]] = said["answer"]
                self._news.notify_all()
        with self._news:
            self._silent = True
            self._news.notify_all()

    def _wait(self, found, what: str, deadline: float):
        with self._news:
            self._news.wait_for(lambda: found() is not None or self._silent, deadline)
            if (answer := found()) is not None:
                return answer
        raise RuntimeError(f"{self.what} did not answer {what}; its log ends with\n{self.log()[-4000:]}")

    def _ask(self, command: str, *arguments, deadline: float = DEADLINE):
        self._asked += 1
        number = self._asked
        self._process.stdin.write(json.dumps([number, command, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._wait(lambda: self._answers.get(number), command, deadline)
        return answer[0]

    def log(self) -> str:
        return pathlib.Path(f"/proc/self/fd/{self._log.fileno()}").read_text(errors="replace")

    def ready(self) -> "Instance":
        self._ask("nothing", deadline=START_DEADLINE)
        return self

    def add(self, name: str, prompt: list[int], max_tokens: int = 16, params: dict | None = None) -> None:
        self._ask("add", name, list(prompt), max_tokens, params)

    def ended(self, name: str, deadline: float = DEADLINE) -> Ended:
        """Waits for a request's answer. @error not in time."""
        return self._wait(lambda: self._ended.get(name), f"request {name}", deadline)

    def abort(self, name: str) -> None:
        """The client leaves."""
        self._ask("abort", name)

    def pool(self) -> Pool:
        return Pool(**self._ask("pool"))

    def quiet(self, deadline: float) -> None:
        """Until nothing is held and nobody is known. @error not in time."""
        until(lambda: self.pool().quiet, deadline, f"{self.what} holds nothing; it holds {self.pool()}\n{self.log()[-3000:]}")

    def sums(self, name: str, tokens: int) -> dict[str, int]:
        """(group, layer) -> checksum of a request's first tokens, as the connector saw its blocks last. @pre nothing overwrote them."""
        return self._ask("sums", name, tokens)

    def tokens(self, prompt: list[int], max_tokens: int = 16, name: str | None = None) -> tuple[int, ...]:
        """The answer to one request without a transfer."""
        name = name or f"plain-{time.monotonic_ns()}"
        self.add(name, prompt, max_tokens)
        return self.ended(name).tokens

    def steps_in(self, seconds: float) -> int:
        """How many steps the engine takes in that time."""
        return self._ask("steps_in", seconds)

    def step_times(self, prompt: list[int], max_tokens: int) -> list[float]:
        """Seconds of each step that one request takes, alone."""
        return self._ask("step_times", list(prompt), max_tokens)

    def forget_prefixes(self) -> None:
        assert self._ask("forget_prefixes"), "blocks are held"

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> "Instance":
        return self

    def __exit__(self, *_) -> None:
        self.close()


# ---- the child ----


class Child:
    def __init__(self, engine: Engine, out):
        self.engine, self.out = engine, out
        self.tables: dict[str, tuple] = {}
        self.steps = 0
        if engine.scheduler.connector is not None and engine.scheduler.vllm_config.parallel_config.world_size == 1:
            self._listen()  # with more ranks, they are processes of their own

    def _listen(self) -> None:
        """Remember each request's blocks as the connector is told them."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        bind = connector.bind_connector_metadata

        def bind_and_note(step):
            for each in [*getattr(step, "chunks", ()), *getattr(step, "loads", ())]:  # other connectors' metadata has none
                self.tables[each.request] = each.tables
            bind(step)

        connector.bind_connector_metadata = bind_and_note

    def say(self, **said) -> None:
        print(json.dumps(said), file=self.out, flush=True)

    def step(self) -> None:
        self.steps += 1
        for ended in self.engine.step():
            self.say(ended=ended.name, tokens=ended.tokens, reason=ended.reason, params=ended.kv_transfer_params)

    def loop(self, commands) -> None:
        while True:
            busy = self.engine.working
            if select.select([commands], [], [], 0 if busy else None)[0]:
                line = commands.readline()
                if not line:
                    return
                number, command, arguments = json.loads(line)
                self.say(to=number, answer=[getattr(self, command)(*arguments)])
            if self.engine.working:
                self.step()

    def nothing(self) -> None: ...

    def add(self, name, prompt, max_tokens, params) -> None:
        self.engine.add(name, prompt, max_tokens, params)

    def abort(self, name) -> None:
        self.engine.abort(name)
        self.say(ended=name, tokens=[], reason="abort", params=None)

    def pool(self) -> dict:
        seen = self.engine.pool()
        return {"blocks": seen.blocks, "free": seen.free, "cached": seen.cached, "requests": seen.requests}

    def forget_prefixes(self) -> bool:
        return self.engine.scheduler.reset_prefix_cache()

    def steps_in(self, seconds) -> int:
        before, end = self.steps, time.monotonic() + seconds
        while time.monotonic() < end and self.engine.scheduler.has_requests():
            self.step()
        time.sleep(max(0.0, end - time.monotonic()))
        return self.steps - before

    def step_times(self, prompt, max_tokens) -> list[float]:
        self.engine.add(f"timed-{self.steps}", prompt, max_tokens)
        times = []
        while self.engine.scheduler.has_requests():
            begin = time.monotonic()
            self.engine.step()
            times.append(time.monotonic() - begin)
            self.steps += 1
        return times

    def sums(self, name, tokens) -> dict[str, int]:
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        import kvloom

        worker = get_kv_transfer_group()._worker
        placed, out = worker._placed, {}
        for group in placed.groups:
            pages = [max(0, page) for page in placed.table(group, self.tables[name], tokens).pages]  # columns before a window: not read
            for cache in group.caches:
                tensor = worker.tensors[cache.name]
                raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())[tensor.storage_offset() * tensor.element_size() :]
                begin = 0 if group.shape.window is None else max(0, tokens - group.shape.window.tokens)
                total, _ = kvloom.checksum(placed.side, group.name, placed.rank, cache.layer, raw.cpu().numpy(), pages, (begin, tokens), tokens)
                out[f"{group.name} {cache.layer}"] = total
        return out


def main() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is log
    commands = os.fdopen(os.dup(0), "r", buffering=1)
    with Engine(eval(sys.argv[1], {"Settings": Settings, "PosixPath": pathlib.PosixPath})) as engine:
        Child(engine, out).loop(commands)


if __name__ == "__main__":
    main()
