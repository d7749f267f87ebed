"""The client's side: bytes as they come, no faster than they are read, and errors in the form that fits the moment. With the
real openai client."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from .fakes import DONE, USAGE, Seen, answer, begin, chunk, error, hang, rig, says, soon, stream_of, torn

pytestmark = pytest.mark.asyncio
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Was ist ein Webstuhl? 🧵"}]}


async def test_openai_completion_and_chat() -> None:
    async with rig() as r:
        completion = await r.openai.completions.create(model="m", prompt="hi", max_tokens=2)
        assert completion.choices[0].text == "Hello wörld 🧵"
        chat = await r.openai.chat.completions.create(**CHAT)
        assert chat.choices[0].message.content == "Hello wörld 🧵"
        for usage in (completion.usage, chat.usage):
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (7, 6)


@pytest.mark.parametrize("usage", [True, False])
async def test_openai_streams_with_usage_only_where_it_was_asked_for(usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    async with rig() as r:
        parts = [part async for part in await r.openai.chat.completions.create(**CHAT, stream=True, **options)]
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "Hello wörld 🧵"
        assert [part.usage.model_dump(exclude_none=True) for part in parts if part.usage] == ([USAGE] if usage else [])
        words = [part async for part in await r.openai.completions.create(model="m", prompt="hi", stream=True, **options)]
        assert "".join(part.choices[0].text for part in words if part.choices) == "Hello wörld 🧵"
        assert "stream_options" not in r.prefill[0].seen[0].body
        assert (r.decode[0].seen[0].body.get("stream_options") is not None) == usage


async def test_openai_lists_models() -> None:
    async def models(seen: Seen) -> web.StreamResponse:
        assert (seen.request.method, seen.path) == ("GET", "/v1/models")
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "vllm"}]})

    async with rig() as r:
        r.decode[0].script = models
        assert [model.id async for model in r.openai.models.list()] == ["m"]


async def test_openai_understands_errors_before_and_inside_of_a_stream() -> None:
    async with rig() as r:
        r.decode[0].script = says(400, "max_tokens is too large")
        with pytest.raises(openai.BadRequestError, match="max_tokens is too large"):
            await r.openai.completions.create(model="m", prompt="hi")
        r.decode[0].script = torn
        stream = await r.openai.completions.create(model="m", prompt="hi", stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="The decode server failed"):  # noqa: PT012  (a loop is what a client writes)
            async for part in stream:
                texts.append(part.choices[0].text)
        assert texts == ["a"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_stream_is_byte_exact_however_it_is_cut(size: int) -> None:
    async def cut(seen: Seen) -> web.StreamResponse:
        whole = b"".join(stream_of(seen)) + b": the end\r\n\r\nno blank line after this \xf0\x9f"
        response = await begin(seen)
        for start in range(0, len(whole), size):
            await response.write(whole[start : start + size])
        return response

    async with rig() as r:
        r.decode[0].script = cut
        got = await r.post("/v1/chat/completions", **CHAT, stream=True)
        assert got.raw == b"".join(stream_of(r.decode[0].seen[0])) + b": the end\r\n\r\nno blank line after this \xf0\x9f"
        assert got.headers["Content-Type"] == "text/event-stream; charset=utf-8"


async def test_each_event_goes_out_when_it_comes() -> None:
    go = asyncio.Semaphore(0)

    async def stepwise(seen: Seen) -> web.StreamResponse:
        response = await begin(seen)
        for n in range(5):
            await go.acquire()
            await response.write(chunk(seen, str(n)))
        await response.write(DONE)
        return response

    async with rig() as r:
        r.decode[0].script = stepwise
        go.release()
        async with r.session.post(r.url + "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            for n in range(5):
                event = await soon(response.content.readuntil(b"\n\n"))  # the next one is not written before this one was read
                assert json.loads(event[5:])["choices"][0]["text"] == str(n)
                go.release()
            assert await response.read() == DONE


async def test_a_stream_torn_in_an_event_ends_with_whole_events_and_an_error() -> None:
    async with rig() as r:
        r.decode[0].script = torn
        got = await r.post(prompt="hi", stream=True)
        first = chunk(r.decode[0].seen[0], "a")
        assert got.raw.startswith(first + b'data: {"error":')
        assert got.raw.endswith(b"\n\n" + DONE)
        assert b"half" not in got.raw


async def test_an_answer_in_one_piece_that_is_torn_reaches_the_client_torn() -> None:
    async def torn(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await response.prepare(seen.request)
        await response.write(b'{"id":')
        assert seen.request.transport is not None
        seen.request.transport.close()
        return response

    async with rig() as r:
        r.decode[0].script = torn
        with pytest.raises(aiohttp.ClientPayloadError):
            await r.post(prompt="hi")
        await r.quiet()
        assert r.metric("kvloom_proxy_requests_total", route="completions", outcome="failed") == 1


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_errors_of_a_server_pass_as_they_are(status: int) -> None:
    async with rig() as r:
        r.decode[0].script = says(status, "as it is", **{"Retry-After": "3"})
        r.prefill[0].script = hang
        got = await r.post(prompt="hi")
        assert (got.status, got.json) == (status, error(status, "as it is"))
        assert got.headers["Retry-After"] == "3"
        assert len(r.decode[0].seen) == 1
        await soon(r.prefill[0].seen[0].gone.wait())


async def test_a_redirect_is_not_followed() -> None:
    async with rig() as r:
        r.decode[0].script = says(307, "there", Location="http://127.0.0.1:1/")
        assert (await r.post(prompt="hi")).status == 502


async def test_a_client_that_does_not_read_holds_the_server_back() -> None:
    written, blocked, going = 0, asyncio.Event(), asyncio.Event()
    block = b"data: " + b"x" * 65_528 + b"\n\n"
    total = 64 * 2**20 // len(block)  # far more than sockets and buffers of both connections hold

    async def flood(seen: Seen) -> web.StreamResponse:
        nonlocal written
        response = await begin(seen)
        while written < total:
            write = asyncio.ensure_future(response.write(block))
            await asyncio.wait((write,), timeout=0.25)
            if not write.done():
                blocked.set()
                going.set()
            await write
            written += 1
        return response

    async with rig() as r:
        r.decode[0].script = flood
        async with r.session.post(r.url + "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            await soon(blocked.wait())
            assert written < total // 2
            assert len(await response.read()) == total * len(block)


async def test_connections_are_kept_on_both_ends() -> None:
    ports = []

    async def remember(seen: Seen) -> web.StreamResponse:
        assert seen.request.transport is not None
        ports.append(seen.request.transport.get_extra_info("peername")[1])
        return await answer(seen)

    async with rig(prefill=0) as r:
        r.decode[0].script = remember
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            for stream in (False, True, False):
                async with session.post(r.url + "/v1/completions", json={"prompt": "hi", "stream": stream}) as response:
                    connection = response.connection
                    await response.read()
                    assert connection is None or connection.transport is not None
        assert len(set(ports)) == 1


async def test_a_prompt_of_a_megabyte_of_any_script() -> None:
    text = "0123456789 äöü 织机 🧵" * 40_000
    async with rig() as r:
        got = await r.post(model="m", prompt=text)
        assert got.status == 200
        assert r.decode[0].seen[0].body["prompt"] == r.prefill[0].seen[0].body["prompt"] == text
