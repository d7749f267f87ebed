"""vLLM's engine in the test's own process, stepped by hand: for tests that ask what happens at which step, and for fast ones.

    with Engine(Settings(model("llama"))) as engine:            one at a time in a process; a second one needs a process of its own
        engine.tokens([[1, 2, 3]], 16)                          [(ids), ...]
        engine.add("a", [1, 2, 3], 16); engine.step()           one scheduler step, one forward pass; returns who ended, with all ids

Scheduler, worker and connector's both sides share this process (VLLM_ENABLE_V1_MULTIPROCESSING=0): 5 seconds to start, and a step returns
when it is over. What differs from a server: nothing happens between two calls of `step`, and when nobody has anything to do it takes none.
"""

import dataclasses
import os
import sys

from harness import Pool
from settings import Settings


@dataclasses.dataclass(frozen=True)
class Ended:
    """A request that ended in a step."""

    name: str
    tokens: tuple[int, ...]
    reason: str | None
    kv_transfer_params: dict | None


class Engine:
    """@pre no other engine is open in this process, and vLLM wasn't imported before with other variables."""

    def __init__(self, settings: Settings):
        os.environ.update(settings.environment_of() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"})
        for folder in reversed(os.environ["PYTHONPATH"].split(os.pathsep)):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = settings.engine_arguments()
        if isinstance(arguments.get("kv_transfer_config"), dict):
            from vllm.config import KVTransferConfig

            arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=False)

    def add(self, name: str, prompt: list[int], max_tokens: int = 16, kv_transfer_params: dict | None = None) -> None:
        """A greedy request for exactly `max_tokens` tokens."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)

    def step(self) -> list[Ended]:
        """One step."""
        return [
            Ended(out.request_id, tuple(out.outputs[0].token_ids), out.outputs[0].finish_reason, getattr(out, "kv_transfer_params", None))
            for out in self._engine.step()
            if out.finished
        ]

    def abort(self, *names: str) -> None:
        """As when the client leaves."""
        self._engine.abort_request(list(names))

    @property
    def busy(self) -> bool:
        """Whether a request isn't answered yet."""
        return self._engine.has_unfinished_requests()

    @property
    def working(self) -> bool:
        """Whether a step has anything to do: with a pipeline, batches may be on their way when nobody is left in the scheduler."""
        core = self._engine.engine_core.engine_core
        return core.scheduler.has_requests() or bool(core.batch_queue)

    def run(self, steps: int = 10_000) -> dict[str, Ended]:
        """Step until all are answered. @error not within `steps`: RuntimeError."""
        ended: dict[str, Ended] = {}
        for _ in range(steps):
            if not self.busy:
                return ended
            ended |= {one.name: one for one in self.step()}
        raise RuntimeError(f"requests are still open after {steps} steps")

    def drain(self, steps: int = 10_000) -> dict[str, Ended]:
        """Step until the scheduler has nothing left either: blocks that the connector keeps are back. @error not within `steps`: RuntimeError."""
        ended: dict[str, Ended] = {}
        for _ in range(steps):
            if not self.busy and not self.working:
                return ended
            ended |= {one.name: one for one in self.step()}
        raise RuntimeError(f"the scheduler still has requests after {steps} steps: {self.pool()}")

    def tokens(self, prompts: list[list[int]], max_tokens: int = 16) -> list[tuple[int, ...]]:
        """The answers to all, computed together."""
        names = [f"request-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts):
            self.add(name, prompt, max_tokens)
        ended = self.run()
        return [ended[name].tokens for name in names]

    @property
    def scheduler(self):
        """vLLM's own."""
        return self._engine.engine_core.engine_core.scheduler

    def pool(self) -> Pool:
        from kvloom_test_eye import look_at

        seen = look_at(self.scheduler)
        return Pool(**seen["pool"], requests=seen["requests"])

    def close(self) -> None:
        """@post another engine may be made in this process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()
