"""The frame: what is refused before anybody is asked, the routes, metrics, drain."""

import asyncio
import json
import re
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

import kvloom.vllm.proxy
from kvloom.vllm.proxy.server import FORWARDED
from kvloom.vllm.proxy.wire import DROPPED

from .fakes import DONE, PATIENCE, Seen, answer, begin, chunk, die, hang, held, in_turn, rig, soon

pytestmark = pytest.mark.asyncio
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"prompt": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[" * 200_000, "not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"prompt": "x", "kv_transfer_params": {"kvloom": {}}}', "kv_transfer_params is set by the proxy"),
        (b'{"prompt": "x", "kv_transfer\\u005fparams": {}}', "kv_transfer_params is set by the proxy"),
        (b'{"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}', "kv_transfer_params is set by the proxy"),
        (b'{"prompt": "x", "ec_transfer_params": {}}', "ec_transfer_params is set by the proxy"),
    ],
)
async def test_a_bad_body_is_400_with_the_reason_and_nobody_is_asked(raw: bytes, words: str) -> None:
    async with rig() as r:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            async with r.session.post(r.url + path, data=raw, headers=JSON) as response:
                assert response.status == 400
                error = (await response.json())["error"]
                assert words in error["message"]
                assert (error["type"], error["code"]) == ("invalid_request_error", 400)
        assert not r.decode[0].seen
        assert not r.prefill[0].seen


async def test_another_content_type_is_415() -> None:
    async with rig() as r, r.session.post(r.url + "/v1/completions", data=b"prompt=x") as response:
        assert response.status == 415


async def raw_request(port: int, data: bytes) -> bytes:
    """The status line that comes for bytes that never end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await soon(reader.readline())
    finally:
        writer.close()


async def test_a_huge_body_is_refused_before_it_is_read() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with rig(max_body=1000) as r:
        assert b"413" in await raw_request(r.proxy.port, head + b"Content-Length: 1000000000000\r\n\r\n")
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"7d0\r\n" + b"x" * 2000 + b"\r\n"
        assert b"413" in await raw_request(r.proxy.port, chunked)
        assert not r.decode[0].seen


async def test_a_body_that_does_not_come_is_408() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
    async with rig(body_timeout=0.05) as r:
        assert b"408" in await raw_request(r.proxy.port, head)


async def test_more_than_max_open_requests_are_503() -> None:
    async with rig(max_open=1) as r:
        r.decode[0].script = r.prefill[0].script = in_turn(hang, answer)
        first = r.post(prompt="hi")
        await r.decode[0].arrival()
        got = await r.post(prompt="hi")
        assert (got.status, got.json["error"]["message"]) == (503, "Too many open requests.")
        first.cancel()
        await r.quiet()
        assert (await r.post(prompt="hi")).status == 200


async def test_more_than_max_held_bytes_are_503_until_requests_end() -> None:
    async with rig(max_held=1000) as r:
        r.decode[0].script = r.prefill[0].script = in_turn(hang, answer)
        first = r.post(prompt="x" * 600)
        await r.decode[0].arrival()
        got = await r.post(prompt="x" * 600)
        assert (got.status, got.json["error"]["message"]) == (503, "Too many bytes of requests are open.")
        assert (await r.post(prompt="x" * 200)).status == 200
        first.cancel()
        await r.quiet()
        assert (await r.post(prompt="x" * 600)).status == 200


async def test_deep_nesting_is_never_an_error_of_the_proxy() -> None:
    async with rig() as r:
        for depth in range(50, 1100, 25):
            for field in ("prompt", "x"):
                raw = b'{"prompt": "hi", "' + field.encode() + b'": ' + b"[" * depth + b"]" * depth + b"}"
                async with r.session.post(r.url + "/v1/completions", data=raw, headers=JSON) as response:
                    assert response.status in (200, 400)
        await r.quiet()


@pytest.mark.parametrize("path", [path for path, method in FORWARDED.items() if method == "POST"])
async def test_other_routes_go_to_a_decode_server_as_they_are(path: str) -> None:
    async with rig(decode=2) as r:
        for fake in r.decode:
            fake.script = in_turn(die, answer)
        got = await r.post(path, model="m", input="hi", stream=True)
        assert got.status in (200, 502)
        seen = [seen for fake in r.decode for seen in fake.seen]
        assert len(seen) == 2
        assert all(one.body == {"model": "m", "input": "hi", "stream": True} for one in seen)
        assert not r.prefill[0].seen


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/sleep", "/reset_prefix_cache", "/v1/models/../../metrics", "/inference/v1/generate"]
)
async def test_what_changes_a_server_is_not_served(path: str) -> None:
    async with rig() as r:
        assert (await r.post(path, x=1)).status in (404, 405)
        assert not r.decode[0].seen


async def test_the_wrong_method_is_405() -> None:
    async with rig() as r, r.session.get(r.url + "/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_health_says_who_is_up() -> None:
    async with rig() as r:
        for prefill, decode, status in ((True, True, 200), (False, True, 200), (True, False, 503)):
            r.proxy.prefill.members[0].up, r.proxy.decode.members[0].up = prefill, decode
            async with r.session.get(r.url + "/health") as response:
                assert response.status == status
                said = await response.json()
                assert said["prefill"] == {r.prefill[0].name: prefill}
                assert said["decode"] == {r.decode[0].name: decode}


async def test_metrics_are_those_of_the_docs() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "proxy.md").read_text("utf-8")
    async with rig() as r:
        await r.post(prompt="x" * 1024)
        await r.post(prompt="x" * 1024)
        await r.quiet()
        async with r.session.get(r.url + "/metrics") as response:
            text = await response.text()
        served = set(re.findall(r"^# TYPE (kvloom_proxy_\w+)", text, re.M))
        assert {name for name in served if not name.endswith("_created")} == set(re.findall(r"`(kvloom_proxy_\w+)", docs))
        assert r.metric("kvloom_proxy_matched_tokens_total", role="prefill") == 256
        assert r.metric("kvloom_proxy_prompt_tokens_total", role="decode") == 512
        assert r.metric("kvloom_proxy_requests_total", route="completions", outcome="ok") == 2
        assert r.metric("kvloom_proxy_instance_up", role="decode", instance=r.decode[0].name) == 1


async def test_the_docs_name_every_field_and_route() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "proxy.md").read_text("utf-8")
    assert all(f"`{field}`" in docs for field in DROPPED)
    assert all(re.search(rf"[` ]{path}`", docs) for path in FORWARDED)


async def test_a_drain_lets_open_requests_end_and_refuses_new_ones() -> None:
    finish = asyncio.Event()
    async with rig() as r:
        r.decode[0].script = held(finish)
        async with r.session.post(r.url + "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            drain = asyncio.create_task(r.proxy.drain())
            await asyncio.sleep(0)
            async with r.session.get(r.url + "/health") as health:
                assert (health.status, (await health.json())["status"]) == (503, "draining")
            got = await r.post(prompt="hi")
            assert (got.status, got.headers["Connection"], got.headers["Retry-After"]) == (503, "close", "1")
            assert not drain.done()
            finish.set()
            assert await response.read() == DONE
            assert await soon(drain) == 0


@pytest.mark.parametrize("begun", [True, False])
async def test_a_drain_out_of_time_cuts_with_a_word(begun: bool) -> None:
    async def stuck(seen: Seen) -> web.StreamResponse:
        if begun:
            await begin(seen, chunk(seen, "a"))
        return await hang(seen)

    async with rig(drain_timeout=0.05) as r:
        r.decode[0].script, r.prefill[0].script = stuck, hang
        task = r.post(prompt="hi", stream=True)
        await r.decode[0].arrival()
        await r.prefill[0].arrival()
        assert await soon(r.proxy.drain()) == 1
        got = await task
        assert b"The proxy shuts down." in got.raw
        assert got.status == (200 if begun else 503)
        for seen in (r.decode[0].seen[0], r.prefill[0].seen[0]):
            await soon(seen.gone.wait())


async def test_a_second_signal_cuts_at_once() -> None:
    async with rig(drain_timeout=1000.0) as r:
        r.decode[0].script = r.prefill[0].script = hang
        task = r.post(prompt="hi")
        await r.decode[0].arrival()
        drain = asyncio.create_task(r.proxy.drain())
        await asyncio.sleep(0)
        r.proxy.cut()
        assert await soon(drain) == 1
        assert (await task).status == 503


async def test_a_real_process_drains_on_sigterm(tmp_path: Path) -> None:
    finish = asyncio.Event()
    async with rig() as r:
        r.decode[0].script = held(finish)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = tmp_path / "proxy.json"
        config.write_text(
            json.dumps({"prefill": [r.prefill[0].url], "decode": [{"url": r.decode[0].url}], "port": port, "alone_below": 0})
        )
        root = str(Path(kvloom.vllm.proxy.__path__[0]).parents[2])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvloom.vllm.proxy", "--config", str(config), "--drain-timeout", "30",
            stderr=asyncio.subprocess.PIPE, env={"PYTHONPATH": root},
        )  # fmt: skip
        try:
            assert process.stderr is not None
            async with asyncio.timeout(4 * PATIENCE):  # an interpreter starts on a busy machine
                assert json.loads(await process.stderr.readline())["event"] == "instance up"
                while (line := json.loads(await process.stderr.readline()))["event"] != "listening":
                    pass
            assert line["port"] == port
            url = f"http://127.0.0.1:{port}"
            async with r.session.post(url + "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
                await response.content.readuntil(b"\n\n")
                process.send_signal(signal.SIGTERM)
                while json.loads(await soon(process.stderr.readline()))["event"] != "draining":
                    pass
                async with r.session.get(url + "/health") as health:
                    assert health.status == 503
                finish.set()
                assert await response.read() == DONE
            assert await soon(process.wait()) == 0
            story = [json.loads(line) for line in (await process.stderr.read()).splitlines()]
            request = next(line for line in story if line["event"] == "request")
            assert (request["outcome"], request["status"], request["decode"]) == ("ok", 200, [r.decode[0].name])
            with pytest.raises(aiohttp.ClientConnectionError):
                await r.session.get(url + "/health")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
