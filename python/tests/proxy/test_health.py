"""Who is up: looks, flapping, and what requests have seen."""

import asyncio
import socket

import pytest
from aiohttp import web

from kvloom.vllm.proxy.choose import Member
from kvloom.vllm.proxy.config import Instance
from kvloom.vllm.proxy.health import Watch
from kvloom.vllm.proxy.upstream import probing_socket

from .fakes import Seen, answer, die, in_turn, rig, says, until


def watch(fall: int = 2, rise: int = 2) -> Watch:
    return Watch(Member(Instance("decode", "http://10.0.0.1:8200"), 10), fall, rise)


def states(one: Watch, looks: str) -> str:
    """The state after each look: + well, - ill, ! refused."""
    said = ""
    for look in looks:
        one.well() if look == "+" else one.ill(sure=look == "!")
        said += "u" if one.member.up else "d"
    return said


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ("+", "u"),  # the first look ever decides
        ("-++", "ddu"),
        ("+-+-+-", "uuuuuu"),  # one failure is none
        ("+--+-+-++", "uuddddddu"),  # out until it was well for a while
        ("+!+-++", "udddd" + "u"),
        ("+-!+", "uudd"),
    ],
)
def test_flapping(looks: str, expected: str) -> None:
    assert states(watch(), looks) == expected


def test_one_that_comes_back_has_an_empty_cache() -> None:
    one = watch()
    one.well()
    one.member.remember((b"block",))
    states(one, "--++")
    assert one.member.up
    assert one.member.matched((b"block",)) == 0


@pytest.mark.asyncio
async def test_looks_find_servers_that_are_ill_gone_and_back() -> None:
    async with rig(prefill=2, decode=1) as r:
        members = r.proxy.prefill.members
        r.prefill[0].healthy = False
        await r.prefill[1].stop()
        await r.proxy.health.look()
        assert [member.up for member in members] == [True, True]
        await r.proxy.health.look()
        assert [member.up for member in members] == [False, False]
        r.prefill[0].healthy = True
        await r.prefill[1].start()
        await r.proxy.health.look()
        await r.proxy.health.look()
        assert [member.up for member in members] == [True, True]
        assert r.metric("kvloom_proxy_health_checks_total", role="prefill", instance=r.prefill[0].name, outcome="failed") == 2


@pytest.mark.asyncio
async def test_a_server_that_hangs_up_on_a_request_is_looked_at_at_once() -> None:
    async with rig(health_fall=2, decode_attempts=1) as r:

        async def last_words(seen: Seen) -> web.StreamResponse:
            r.decode[0].healthy = False
            return await die(seen)

        r.decode[0].script = last_words
        got = await r.post(prompt="hi")
        assert got.status == 502

        await until(lambda: not r.proxy.decode.members[0].up)  # the interval is an hour here


def test_connections_to_servers_notice_a_host_that_vanished() -> None:
    with probing_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


@pytest.mark.asyncio
async def test_a_status_does_not_take_a_server_out() -> None:
    async with rig() as r:
        r.decode[0].script = in_turn(says(500), says(500), answer)
        assert (await r.post(prompt="hi")).status == 500
        assert (await r.post(prompt="hi")).status == 200


@pytest.mark.asyncio
async def test_a_look_that_goes_wrong_is_not_the_last() -> None:
    async with rig(prefill=1, decode=1) as r:
        health, looks = r.proxy.health, 0

        async def look() -> None:
            nonlocal looks
            looks += 1
            await asyncio.sleep(0)  # as one that asks a server; else the loop would see nothing but looks
            health._soon.set()
            if looks == 1:
                raise RuntimeError("nobody thought of this")

        health.look = look
        health._soon.set()
        await until(lambda: looks > 1)
