"""Whoever leaves, and whatever runs out of time: both servers see their connection close, and no load stays counted."""

import asyncio

import pytest
from aiohttp import web

from kvloom.vllm.proxy import dispatch
from kvloom.vllm.proxy.upstream import Failed, Opened

from .fakes import DONE, Rig, Seen, begin, chunk, hang, in_turn, rig, says, soon, until

pytestmark = pytest.mark.asyncio


async def both_gone(r: Rig) -> None:
    for fake in (*r.prefill, *r.decode):
        for seen in fake.seen:
            await soon(seen.gone.wait())
    await r.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_ends_both(stream: bool) -> None:
    async with rig() as r:
        r.prefill[0].script = r.decode[0].script = hang
        task = r.post(prompt="hi", stream=stream)
        await r.prefill[0].arrival()
        await r.decode[0].arrival()
        task.cancel()
        await both_gone(r)
        assert r.metric("kvloom_proxy_requests_total", route="completions", outcome="client left") == 1
        assert r.metric("kvloom_proxy_attempts_total", role="decode", instance=r.decode[0].name, outcome="cancelled") == 1


async def streaming(seen: Seen) -> web.StreamResponse:
    await begin(seen, chunk(seen, "a"))
    return await hang(seen)


async def test_a_client_that_leaves_in_mid_stream_ends_both() -> None:
    async with rig() as r:
        r.prefill[0].script, r.decode[0].script = hang, streaming
        async with r.session.post(r.url + "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
            await both_gone(r)


async def test_openai_closing_its_stream_ends_both() -> None:
    async with rig() as r:
        r.prefill[0].script, r.decode[0].script = hang, streaming
        stream = await r.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        async for part in stream:
            assert part.choices[0].delta.content == "a"
            break
        await stream.close()
        await both_gone(r)


async def test_a_client_that_leaves_between_two_attempts_ends_the_second() -> None:
    async with rig() as r:
        r.prefill[0].script, r.decode[0].script = in_turn(says(500), hang), hang
        task = r.post(prompt="hi")
        await r.prefill[0].arrival()
        await r.prefill[0].arrival()
        task.cancel()
        await soon(r.prefill[0].seen[1].gone.wait())
        for seen in r.decode[0].seen:
            await soon(seen.gone.wait())
        await r.quiet()


async def test_a_prefill_that_goes_on_after_the_answer_is_ended() -> None:
    async with rig() as r:
        r.prefill[0].script = hang
        assert (await r.post(prompt="hi")).status == 200
        await soon(r.prefill[0].seen[0].gone.wait())
        await r.quiet()


async def test_no_first_token_in_time_is_504_and_ends_both() -> None:
    async with rig(first_token_timeout=0.05) as r:
        r.prefill[0].script = r.decode[0].script = hang
        got = await r.post(prompt="hi", stream=True)
        assert got.status == 504
        assert "no token within 0.05 s" in got.json["error"]["message"]
        await both_gone(r)


async def test_a_request_out_of_time_is_504_and_ends_both() -> None:
    async with rig(request_timeout=0.05) as r:
        r.prefill[0].script = hang
        r.decode[0].script = hang
        got = await r.post(prompt="hi", stream=True)
        assert got.status == 504
        await both_gone(r)
        assert r.metric("kvloom_proxy_requests_total", route="completions", outcome="deadline") == 1


async def test_a_stream_that_falls_silent_ends_with_an_error_event() -> None:
    async with rig(stall_timeout=0.05) as r:
        r.decode[0].script = streaming
        got = await r.post(prompt="hi", stream=True)
        first, last, done = got.raw.split(b"\n\n")[:3]
        assert first + b"\n\n" == chunk(r.decode[0].seen[0], "a")
        assert b'"code": 504' in last
        assert b"silent for 0.05 s" in last
        assert done + b"\n\n" == DONE
        await soon(r.decode[0].seen[0].gone.wait())
        await r.quiet()


async def test_a_client_that_takes_nothing_any_more_has_left() -> None:
    async def flood(seen: Seen) -> web.StreamResponse:
        response = await begin(seen)
        while True:
            await response.write(b"data: " + b"x" * 2**20 + b"\n\n")

    async with rig(stall_timeout=0.2) as r:
        r.decode[0].script, r.prefill[0].script = flood, hang
        async with r.session.post(r.url + "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            assert response.status == 200
            await both_gone(r)
        assert r.metric("kvloom_proxy_requests_total", route="completions", outcome="client left") == 1


async def test_an_answer_that_opens_as_its_attempt_is_given_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r:
        r.prefill[0].script, r.decode[0].script = hang, streaming

        async def too_late(asking: asyncio.Task[Opened], computing: asyncio.Task[None] | None) -> Opened:
            await asyncio.wait((asking,))
            raise Failed("prefill", r.proxy.prefill.members[0], "in the same moment", status=500, again=False)

        monkeypatch.setattr(dispatch, "_first", too_late)
        got = await r.post(prompt="hi", stream=True)
        assert (got.status, got.json["error"]["message"]) == (500, "The prefill server failed: in the same moment.")
        await both_gone(r)


async def test_a_hundred_clients_that_leave_at_random_leave_nothing() -> None:
    async with rig(prefill=2, decode=2) as r:
        for fake in (*r.prefill, *r.decode):
            fake.script = in_turn(hang, streaming, says(500), streaming, hang)
        tasks = [r.post(prompt=f"{n} hi", stream=bool(n % 2)) for n in range(100)]
        await until(lambda: sum(len(fake.seen) for fake in r.decode) >= 100)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await r.quiet()
        for fake in (*r.prefill, *r.decode):
            for seen in fake.seen:
                await soon(seen.ended.wait())
