"""What is tried again, with a new key, and what is not: until the first content, and never after."""

import asyncio
import json

import pytest
from aiohttp import web

from .fakes import DONE, Script, Seen, answer, begin, chunk, die, error, hang, in_turn, rig, role_chunk, says, soon, stream_of

pytestmark = pytest.mark.asyncio


def event(document: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


@pytest.mark.parametrize("failure", [says(500), says(503), says(429), die], ids=["500", "503", "429", "dies"])
async def test_a_failed_prefill_is_computed_elsewhere_with_a_new_key(failure: Script) -> None:
    async with rig(prefill=2) as r:
        turns = in_turn(failure, answer)
        for fake in r.prefill:
            fake.script = turns
        r.decode[0].script = in_turn(hang, answer)  # the first waits for KV that never comes
        assert (await r.post(prompt="hi")).status == 200
        first, second = r.decode[0].seen
        await soon(first.gone.wait())
        asked = {fake.seen[0].key: f"tcp://127.0.0.1:{5555 + n}" for n, fake in enumerate(r.prefill)}  # each was asked once
        assert first.key != second.key
        assert {seen.key: seen.kvloom["prefill"][0] for seen in (first, second)} == asked
        assert first.headers["X-Request-Id"] != second.headers["X-Request-Id"]
        assert r.metric("kvloom_proxy_retries_total", role="prefill") == 1
        await r.quiet()


async def test_a_prefill_that_nobody_listens_for_is_down_at_once() -> None:
    async with rig(prefill=2) as r:
        await r.prefill[0].stop()
        for n in range(16):
            assert (await r.post(prompt=f"hi {n}")).status == 200
        assert [member.up for member in r.proxy.prefill.members] == [False, True]
        assert len(r.prefill[1].seen) == 16
        assert r.metric("kvloom_proxy_retries_total", role="prefill") <= 1
        await r.prefill[0].start()


async def test_a_prefill_that_does_not_answer_in_time_is_given_up() -> None:
    async with rig(prefill=2, prefill_timeout=0.05, prefill_attempts=1) as r:
        for fake in r.prefill:
            fake.script = hang
        r.decode[0].script = in_turn(hang, answer)
        assert (await r.post(prompt="hi")).status == 200
        assert "kv_transfer_params" not in r.decode[0].seen[1].body  # one attempt: then alone
        assert r.metric("kvloom_proxy_decode_alone_total", reason="prefill failed") == 1
        for fake in r.prefill:
            for seen in fake.seen:
                await soon(seen.gone.wait())


async def test_when_no_prefill_works_decode_computes_alone_or_the_failure_is_the_answer() -> None:
    async with rig(prefill=2) as r:
        for fake in r.prefill:
            fake.script = says(500, "out of memory")
        r.decode[0].script = in_turn(hang, hang, hang, answer)
        assert (await r.post(prompt="hi")).status == 200
        assert len({seen.key for seen in r.decode[0].seen[:3]}) == 3
        assert "kv_transfer_params" not in r.decode[0].seen[3].body
    async with rig(prefill=2, without_prefill="fail") as r:
        for fake in r.prefill:
            fake.script = says(500, "out of memory")
        r.decode[0].script = hang
        got = await r.post(prompt="hi")
        assert (got.status, got.json) == (500, error(500, "out of memory"))
        for seen in r.decode[0].seen:
            await soon(seen.gone.wait())


async def test_a_4xx_of_prefill_is_the_answer_and_decode_is_closed() -> None:
    async with rig() as r:
        r.prefill[0].script = says(400, "too long")
        r.decode[0].script = hang
        got = await r.post(prompt="hi")
        assert (got.status, got.json) == (400, error(400, "too long"))
        for seen in r.decode[0].seen:
            await soon(seen.gone.wait())
        assert r.metric("kvloom_proxy_retries_total", role="prefill") == 0


async def test_a_prefill_that_fails_after_the_first_token_changes_nothing() -> None:
    fail = asyncio.Event()

    async def late(seen: Seen) -> web.StreamResponse:
        await fail.wait()
        return await says(500)(seen)

    async def stream(seen: Seen) -> web.StreamResponse:
        response = await begin(seen, chunk(seen, "a"))
        prefill = await r.prefill[0].arrival()
        await soon(prefill.ended.wait())
        await response.write(chunk(seen, "b") + DONE)
        return response

    async with rig() as r:
        r.prefill[0].script, r.decode[0].script = late, stream
        async with r.session.post(r.url + "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            seen = await r.decode[0].arrival()
            assert await response.content.readuntil(b"\n\n") == chunk(seen, "a")
            fail.set()
            assert await response.read() == chunk(seen, "b") + DONE
        assert len(r.decode[0].seen) == 1


async def silent_death(seen: Seen) -> web.StreamResponse:
    """Headers of a stream, and no token: what vLLM sends before the KV is there."""
    response = await begin(seen)
    assert seen.request.transport is not None
    seen.request.transport.abort()
    return response


async def error_in_stream(seen: Seen) -> web.StreamResponse:
    """A transfer that failed under kv_load_failure_policy=fail, as vLLM reports it."""
    return await begin(
        seen, *([role_chunk(seen)] if "chat" in seen.path else []), event(error(500, "Internal server error")), DONE
    )


@pytest.mark.parametrize(
    "failure", [die, silent_death, error_in_stream, says(500)], ids=["dies", "dies silently", "error event", "500"]
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_decode_that_fails_before_its_first_token_is_replaced_and_nobody_sees(failure: Script, path: str) -> None:
    async with rig(decode=2) as r:
        turns = in_turn(failure, answer)
        for fake in r.decode:
            fake.script = turns
        body = {"prompt": "hi"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
        got = await r.post("/v1/" + path, stream=True, **body)
        assert got.status == 200
        one, two = (fake.seen[0] for fake in r.decode)  # each was asked once
        assert got.raw == b"".join(stream_of(one))
        assert one.key != two.key
        assert {seen.key for seen in r.prefill[0].seen} == {one.key, two.key}
        assert r.metric("kvloom_proxy_retries_total", role="decode") == 1


async def test_an_error_event_with_4xx_is_the_answer_with_its_status() -> None:
    async def script(seen: Seen) -> web.StreamResponse:
        return await begin(seen, event(error(400, "bad grammar")), DONE)

    async with rig(decode=2) as r:
        for fake in r.decode:
            fake.script = script
        got = await r.post(prompt="hi", stream=True)
        assert (got.status, got.json) == (400, error(400, "bad grammar"))
        assert sum(len(fake.seen) for fake in r.decode) == 1


async def test_a_poisonous_request_does_not_go_through_all_decode_servers() -> None:
    async with rig(decode=4) as r:
        for fake in r.decode:
            fake.script = die
        got = await r.post(prompt="hi")
        assert got.status == 502
        assert got.json["error"]["message"] == "The decode server failed: it can't be reached."  # no address
        assert sum(len(fake.seen) for fake in r.decode) == 2


async def test_the_only_decode_server_is_asked_again() -> None:
    async with rig() as r:
        r.decode[0].script = in_turn(says(503), answer)
        assert (await r.post(prompt="hi")).status == 200


async def test_after_a_transfer_that_failed_neither_side_is_taken_again() -> None:
    async with rig(prefill=2, decode=2) as r:
        turns = in_turn(says(500), answer)
        for fake in r.decode:
            fake.script = turns
        assert (await r.post(prompt="hi")).status == 200
        assert [len(fake.seen) for fake in (*r.prefill, *r.decode)] == [1, 1, 1, 1]


async def test_comments_reach_the_client_before_the_first_token_and_a_retry_stays_possible() -> None:
    failed = asyncio.Event()

    async def commenting(seen: Seen) -> web.StreamResponse:
        await begin(seen, b": keep-alive\n\n", role_chunk(seen))
        return await hang(seen)

    async def failing(seen: Seen) -> web.StreamResponse:
        await failed.wait()
        return await says(500)(seen)

    async with rig() as r:
        r.decode[0].script = in_turn(commenting, answer)
        r.prefill[0].script = in_turn(failing, answer)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with r.session.post(r.url + "/v1/chat/completions", json=body) as response:
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            failed.set()
            assert await response.read() == b"".join(stream_of(r.decode[0].seen[1]))


async def test_after_comments_an_error_is_an_event() -> None:
    async def commenting(seen: Seen) -> web.StreamResponse:
        response = await begin(seen, b": keep-alive\n\n")
        await response.write(event(error(500, "lost")))
        return response

    async with rig() as r:
        r.decode[0].script = commenting
        got = await r.post(prompt="hi", stream=True)
        assert got.status == 200
        assert got.raw == b": keep-alive\n\n: keep-alive\n\n" + event(error(500, "lost")) + DONE
