"""Both sides of a request: at the same time, with one key, and the answer is decode's."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from kvloom.vllm.proxy.config import make_instance

from .fakes import USAGE, Seen, answer, rig, soon

pytestmark = pytest.mark.asyncio


async def test_prefill_and_decode_are_in_flight_at_the_same_time() -> None:
    meeting = asyncio.Barrier(2)  # a proxy that waits for one before it asks the other never gets past it

    async def meet(seen: Seen) -> web.StreamResponse:
        await soon(meeting.wait())
        return await answer(seen)

    async with rig() as r:
        r.prefill[0].script = r.decode[0].script = meet
        got = await r.post(model="m", prompt="What is a loom?", max_tokens=5)
        assert got.status == 200
        assert got.json["usage"] == USAGE
        await r.quiet()
        assert r.metric("kvloom_proxy_attempts_total", role="prefill", instance=r.prefill[0].name, outcome="ok") == 1


async def test_decode_first_asks_prefill_only_when_decode_has_the_whole_request() -> None:
    reading = asyncio.Event()
    connected = asyncio.Event()

    async def slow_reader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"POST"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            connected.set()
            await reading.wait()
            size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(size)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(slow_reader, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    decode = (make_instance("decode", {"url": f"http://127.0.0.1:{port}"}),)
    async with server, rig(decode=0, decode_=decode, order="decode-first") as r:
        task = r.post(model="m", prompt="x" * 2**24)  # more than sockets hold
        await soon(connected.wait())
        for _ in range(5):
            async with r.session.get(r.url + "/v1/models") as response:  # rounds of the loop, with I/O
                await response.read()
        assert not r.prefill[0].seen
        reading.set()
        await r.prefill[0].arrival()
        assert (await task).raw == b"{}"


async def test_both_get_the_same_key_and_decode_the_control_address() -> None:
    async with rig() as r:
        await r.post(model="m", prompt="one")
        await r.post(model="m", prompt="two")
        first, second = r.decode[0].seen
        keys = [seen.key for seen in (first, second)]
        assert [seen.key for seen in r.prefill[0].seen] == keys
        assert keys[0] != keys[1]
        assert all(len(key) == 32 and int(key, 16) for key in keys)
        assert first.kvloom == {"role": "decode", "transfer": keys[0], "seconds": 300.0, "prefill": ["tcp://127.0.0.1:5555"]}
        assert r.prefill[0].seen[0].kvloom == {"role": "prefill", "transfer": keys[0], "seconds": 300.0}


async def test_decode_gets_what_the_client_wrote_byte_for_byte_and_prefill_the_same_prompt() -> None:
    raw = b' {"model":"m",  "prompt":"caf\xc3\xa9 \\ud83e\\uddf5", "temperature":0.70, "max_tokens":9, "min_tokens":5'
    raw += b', "stop":["x"] , "logprobs":2}\n'
    async with rig() as r:
        async with r.session.post(r.url + "/v1/completions", data=raw, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 200
        decode, prefill = r.decode[0].seen[0], r.prefill[0].seen[0]
        said = json.dumps(decode.body["kv_transfer_params"]).encode()
        assert decode.raw == b' {"kv_transfer_params":' + said + b"," + raw[2:]
        body = dict(prefill.body)
        body.pop("kv_transfer_params")
        assert body == {
            "model": "m", "prompt": "café 🧵", "temperature": 0.7, "max_tokens": 1, "n": 1, "stream": False, "ignore_eos": True,
        }  # fmt: skip


async def test_headers_go_to_both_and_the_request_id_comes_back() -> None:
    async with rig() as r:
        headers = {
            "Authorization": "Bearer secret",
            "X-Request-Id": "abc-1",
            "traceparent": "00-1-2-3",
            "X-data-parallel-rank": "7",
        }
        async with r.session.post(r.url + "/v1/completions", json={"prompt": "hi"}, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "abc-1"
        for seen, name in ((r.decode[0].seen[0], "abc-1"), (r.prefill[0].seen[0], "abc-1-p")):
            assert seen.headers["X-Request-Id"] == name
            assert seen.headers["Authorization"] == "Bearer secret"
            assert seen.headers["traceparent"] == "00-1-2-3"
            assert "X-data-parallel-rank" not in seen.headers  # a client doesn't choose the rank
        async with r.session.post(r.url + "/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": "a b"}) as response:
            assert len(response.headers["X-Request-Id"]) == 32


async def test_a_data_parallel_rank_is_asked_by_its_header() -> None:
    async with rig() as first:
        decode = (make_instance("decode", {"url": first.decode[0].url, "dp_rank": 1}),)
        async with rig(decode=0, decode_=decode) as r:
            assert (await r.post(prompt="hi")).status == 200
            assert first.decode[0].seen[0].headers["X-data-parallel-rank"] == "1"


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("completions", {"prompt": "x", "n": 2}, "n is not 1"),
        ("completions", {"prompt": "x", "best_of": 3}, "best_of is not 1"),
        ("completions", {"prompt": ["x", "y"]}, "several prompts"),
        ("completions", {"prompt": [[1, 2], [3]]}, "several prompts"),
        ("completions", {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ("completions", {"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ("completions", {"prompt": "x", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ("completions", {"prompt": "x", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("completions", {"prompt": ""}, "no prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo"),
        ("chat/completions", {}, "no messages"),
    ],
)
async def test_what_one_transfer_cannot_serve_goes_to_decode_alone_or_is_refused(
    path: str, body: dict[str, Any], reason: str
) -> None:
    async with rig() as r:
        assert (await r.post("/v1/" + path, **body)).status == 200
        assert not r.prefill[0].seen
        assert r.decode[0].seen[0].body == body
        assert r.metric("kvloom_proxy_decode_alone_total", reason="unshared") == 1
    async with rig(unshared="refuse") as r:
        got = await r.post("/v1/" + path, **body)
        assert got.status == 400
        assert reason in got.json["error"]["message"]
        assert not r.decode[0].seen


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2, 3]]},
        {"prompt": ["one"]},
        {"prompt": "x", "n": 1, "best_of": 1, "echo": True, "logprobs": None, "truncate_prompt_tokens": 5},
        {"prompt": "x", "kv_transfer_params": None},
    ],
)
async def test_what_is_one_prompt_is_transferred(body: dict[str, Any]) -> None:
    async with rig() as r:
        assert (await r.post(**body)).status == 200
        assert r.decode[0].seen[0].key == r.prefill[0].seen[0].key
        assert r.decode[0].seen[0].body == body | {"kv_transfer_params": {"kvloom": r.decode[0].seen[0].kvloom}}


async def test_tools_media_and_templates_reach_prefill_as_they_are() -> None:
    shaping = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]}
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"thinking": True},
        "cache_salt": "s",
        "model": "m",
    }
    output = {
        "max_completion_tokens": 9,
        "top_logprobs": 2,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with rig() as r:
        await r.post("/v1/chat/completions", **shaping, **output)
        body = dict(r.prefill[0].seen[0].body)
        body.pop("kv_transfer_params")
        ours = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False, "ignore_eos": True}
        assert body == shaping | ours


async def test_short_prompts_are_computed_by_decode() -> None:
    async with rig(alone_below=32) as r:
        await r.post(prompt="x" * 4 * 31)
        assert not r.prefill[0].seen
        await r.post(prompt="x" * 4 * 32)
        assert len(r.prefill[0].seen) == 1
        assert r.metric("kvloom_proxy_decode_alone_total", reason="short") == 1


async def test_without_prefill_decode_computes_or_the_request_fails() -> None:
    async with rig() as r:
        r.proxy.prefill.members[0].up = False
        assert (await r.post(prompt="hi")).status == 200
        assert "kv_transfer_params" not in r.decode[0].seen[0].body
    async with rig(without_prefill="fail") as r:
        r.proxy.prefill.members[0].up = False
        got = await r.post(prompt="hi")
        assert got.status == 503
        assert got.headers["Retry-After"] == "1"
        await r.quiet()
    async with rig(prefill=0, without_prefill="fail") as r:  # nothing configured: meant so
        assert (await r.post(prompt="hi")).status == 200


async def test_without_decode_there_is_no_answer() -> None:
    async with rig() as r:
        r.proxy.decode.members[0].up = False
        got = await r.post(prompt="hi")
        assert got.status == 503
        assert "No decode server is up" in got.json["error"]["message"]
        assert not r.prefill[0].seen
