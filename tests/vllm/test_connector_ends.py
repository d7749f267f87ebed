"""Everything that ends a request, with two real engines: each answered in time, nothing held on either side afterwards, the next one right."""

import signal
import time

import pytest
from ask import new_prompt
from instance import Instance
from meeting import Meeting
from models import model
from settings import Settings

SOON = 2.0  # seconds until all is free, of what was noticed
LOOK = 1.5  # more, for a busy machine; nothing is measured here


@pytest.fixture(scope="module")
def meeting():
    with Meeting(Settings(model("llama")), Settings(model("llama"))) as made:
        yield made.ready()


@pytest.fixture
def prompt() -> list[int]:
    return new_prompt(1_500)


def right_again(meeting: Meeting, alone: Instance, prompt: list[int]) -> None:
    meeting.quiet(SOON + LOOK)
    assert meeting.ask(f"after-{time.monotonic_ns()}", prompt) == alone.tokens(prompt, 12)
    meeting.quiet(SOON + LOOK)


def test_prefill_is_done_and_decode_never_asks(meeting, alone, prompt):
    to_prefill, _ = meeting.parameters(seconds=1.0)
    meeting.prefill.add("unasked", prompt, 1, to_prefill)
    meeting.prefill.ended("unasked")
    assert not meeting.prefill.pool().quiet  # held for who may still ask
    right_again(meeting, alone, prompt)


def test_decode_asks_and_prefill_never_comes(meeting, alone, prompt):
    _, to_decode = meeting.parameters(seconds=1.0)
    meeting.decode.add("alone", prompt, 12, to_decode)
    assert meeting.decode.ended("alone", 30).tokens == alone.tokens(prompt, 12)  # recomputed
    right_again(meeting, alone, prompt)


def test_decode_asks_where_nobody_listens(meeting, alone, prompt):
    _, to_decode = meeting.parameters()
    to_decode["kvloom"]["prefill"] = ["tcp://127.0.0.1:1"]
    meeting.decode.add("nobody", prompt, 12, to_decode)
    assert meeting.decode.ended("nobody", 30).tokens == alone.tokens(prompt, 12)
    right_again(meeting, alone, prompt)


@pytest.mark.parametrize("wrong", [{"prefill": []}, {"seconds": -1}, {"transfer": ""}, {"role": "both"}])
def test_wrong_parameters_fail_that_transfer_alone(meeting, alone, prompt, wrong):
    _, to_decode = meeting.parameters()
    to_decode["kvloom"] |= wrong
    meeting.decode.add(f"wrong-{wrong}", prompt[:300], 12, to_decode)
    assert meeting.decode.ended(f"wrong-{wrong}", 30).tokens == alone.tokens(prompt[:300], 12)
    right_again(meeting, alone, prompt)


def test_decodes_client_leaves_while_it_waits(meeting, alone, prompt):
    _, to_decode = meeting.parameters()
    meeting.decode.add("left", prompt, 12, to_decode)
    assert meeting.decode.pool().requests == {"WAITING_FOR_REMOTE_KVS": 1}
    meeting.decode.abort("left")
    right_again(meeting, alone, prompt)


def test_decodes_client_leaves_and_prefill_is_told(meeting, alone, prompt):
    to_prefill, to_decode = meeting.parameters()
    meeting.decode.add("left-2", prompt, 12, to_decode)
    meeting.prefill.add("left-2-p", prompt, 1, to_prefill)
    meeting.decode.abort("left-2")
    meeting.prefill.ended("left-2-p")
    right_again(meeting, alone, prompt)


def test_prefills_client_leaves_in_mid_prompt(meeting, alone, prompt):
    to_prefill, to_decode = meeting.parameters()
    meeting.decode.add("cut", prompt, 12, to_decode)
    meeting.prefill.add("cut-p", prompt, 1, to_prefill)
    meeting.prefill.abort("cut-p")
    assert meeting.decode.ended("cut", 30).tokens == alone.tokens(prompt, 12)
    right_again(meeting, alone, prompt)


def test_prefills_client_leaves_after_the_prompt(meeting, alone, prompt):
    """The proxy may close prefill's request early: what was computed still arrives."""
    to_prefill, to_decode = meeting.parameters()
    meeting.prefill.add("early-p", prompt[:200], 50, to_prefill)  # goes on decoding, which a proxy never asks for
    meeting.prefill.pool()  # answered between two steps: the first one has computed the prompt
    meeting.prefill.abort("early-p")
    meeting.decode.add("early", prompt[:200], 12, to_decode)
    assert meeting.decode.ended("early", 30).tokens == alone.tokens(prompt[:200], 12)
    right_again(meeting, alone, prompt)


def test_both_clients_leave_before_anything_began(meeting, alone, prompt):
    to_prefill, to_decode = meeting.parameters(seconds=1.0)
    meeting.decode.add("none", prompt, 12, to_decode)
    meeting.decode.abort("none")
    meeting.prefill.add("none-p", prompt, 1, to_prefill)
    meeting.prefill.abort("none-p")
    right_again(meeting, alone, prompt)


def test_prefill_is_killed_while_decode_waits(meeting, alone, prompt):
    _, to_decode = meeting.parameters()
    meeting.decode.add("waits", prompt, 12, to_decode)
    meeting.prefill.kill()
    assert meeting.decode.ended("waits", 30).tokens == alone.tokens(prompt, 12)
    meeting.decode.quiet(SOON + LOOK)
    meeting.restart_prefill()
    right_again(meeting, alone, prompt)


def test_prefill_is_killed_in_mid_prompt(meeting, alone, prompt):
    to_prefill, to_decode = meeting.parameters()
    meeting.decode.add("torn", prompt, 12, to_decode)
    meeting.prefill.add("torn-p", prompt, 1, to_prefill)
    meeting.prefill.kill()
    assert meeting.decode.ended("torn", 30).tokens == alone.tokens(prompt, 12)
    meeting.decode.quiet(SOON + LOOK)
    meeting.restart_prefill()
    right_again(meeting, alone, prompt)


def test_a_frozen_prefill_is_given_up(meeting, alone, prompt):
    meeting.ask(f"met-{time.monotonic_ns()}", prompt[:50])  # who was frozen before they met is missed when time is up
    to_prefill, to_decode = meeting.parameters()
    meeting.decode.add("frozen", prompt, 12, to_decode)
    meeting.prefill.signal(signal.SIGSTOP)
    try:
        assert meeting.decode.ended("frozen", 30).tokens == alone.tokens(prompt, 12)
        meeting.decode.quiet(SOON + LOOK)
    finally:
        meeting.prefill.signal(signal.SIGCONT)
    right_again(meeting, alone, prompt)
