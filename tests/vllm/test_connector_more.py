"""Less usual set-ups with two real engines: both roles in one server, keys, and a prefill that is preempted.

What a CPU can't show: DCP. vLLM wants attention that gives log-sum-exps to merge, and none of its CPU backends does (check_attention_cp_compatibility
in vllm/v1/worker/cp_utils.py; can_return_lse_for_decode in vllm/v1/attention/backend.py).
"""

import secrets
import sys

import pytest
from instance import Instance
from meeting import SECONDS, Meeting, free_ports, kvloom_connector
from models import model
from settings import Settings, python_path


# ---- both roles, and keys ----


class Pair:
    """Two servers that do either role, and let nobody in but each other."""

    def __init__(self):
        sys.path[:0] = [folder for folder in python_path() if folder not in sys.path]
        import kvloom

        self.keys = [kvloom.make_curve_keys() for _ in range(2)]
        self.stranger = kvloom.make_curve_keys()
        self.ports = [free_ports(1) for _ in range(2)]
        self.engines = [Instance(Settings(model("llama"), connector=self._connector(n), cores=(n,)), f"both-{n}") for n in range(2)]

    def _connector(self, number: int) -> dict:
        keys = dict(control_keys=list(self.keys[number]), control_clients=[self.keys[1 - number][0]])
        return kvloom_connector("kv_both", control_port=self.ports[number], **keys)

    def add(self, name: str, prompt: list[int], prefill: int, public: str | None = None, seconds: float = SECONDS) -> None:
        """`prefill` computes the prompt, the other one goes on; `public`: the key that it expects of prefill."""
        said = {"transfer": secrets.token_hex(16), "seconds": seconds}
        where = {"prefill": [f"tcp://127.0.0.1:{self.ports[prefill]}"], "prefill_keys": [public or self.keys[prefill][0]]}
        self.engines[1 - prefill].add(name, prompt, 12, {"kvloom": {"role": "decode", **said, **where}})
        self.engines[prefill].add(f"{name}-p", prompt, 1, {"kvloom": {"role": "prefill", **said}})

    def quiet(self) -> None:
        for engine in self.engines:
            engine.quiet(5.0)


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    with made.engines[0], made.engines[1]:
        for engine in made.engines:
            engine.ready()
        yield made


def test_two_servers_prefill_for_each_other_at_once_behind_keys(pair, alone, text):
    prompts = {f"{n}": [n, *text][: 200 + 200 * n] for n in range(4)}
    for name, prompt in prompts.items():
        pair.add(name, prompt, prefill=int(name) % 2)
    for name, prompt in prompts.items():
        assert pair.engines[1 - int(name) % 2].ended(name).tokens == alone.tokens(prompt, 12), name
    pair.quiet()
    assert not any("was not loaded" in engine.log() for engine in pair.engines)


def test_who_has_another_key_than_expected_is_not_met(pair, alone, text):
    prompt = [99, *text][:300]
    pair.add("strange", prompt, prefill=0, public=pair.stranger[0], seconds=1.5)
    assert pair.engines[1].ended("strange", 30).tokens == alone.tokens(prompt, 12)  # recomputed
    assert "request strange was not loaded" in pair.engines[1].log()
    pair.quiet()
    pair.add("known", prompt[:200], prefill=0)
    assert pair.engines[1].ended("known").tokens == alone.tokens(prompt[:200], 12)
    pair.quiet()


# ---- preemption ----


def test_a_prefill_that_is_preempted_is_computed_by_decode(alone, text):
    """39 blocks of 32: one request generates and has five blocks or more, so the other's 35 can't all be there as long as it does."""
    small = Settings(model("llama"), block=32, blocks=40, chunk=64, max_length=1_100, prefix_caching=False, whole_prompt_fits=False)
    with Meeting(small, Settings(model("llama"))) as meeting:
        meeting.ready()
        prompt, to_both = [55, *text][:1_090], meeting.parameters()
        meeting.prefill.add("in the way", text[:150], 900)
        meeting.decode.add("b", prompt, 12, to_both[1])
        meeting.prefill.add("b-p", prompt, 1, to_both[0])
        assert meeting.decode.ended("b").tokens == alone.tokens(prompt, 12)
        assert "prefill was preempted" in meeting.prefill.log()
        meeting.prefill.ended("b-p")
        meeting.prefill.ended("in the way")
        meeting.quiet()
        assert meeting.ask("after", prompt[:500]) == alone.tokens(prompt[:500], 12)
        meeting.quiet()
