"""Clients that leave, lie, flood or dawdle: each gets a clear answer or the end of its connection, and costs nobody
else."""

import asyncio
import gzip
import json
import socket
from typing import Any

import aiohttp
import pytest

from gateway.http import connection as http_connection
from router.spec.fleet import TimeoutSpec
from tests.harness import (
    CHAT,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    answering,
    one_pool,
    running_gateway,
    streaming,
)

answer = answering()


async def silent(connection: EngineConnection) -> None:
    await connection.client_gone()


def request(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST /v1/chat/completions HTTP/" + version, b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def raw(running: RunningGateway, data: bytes) -> bytes:
    """Everything the gateway says to `data` until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


def error(response: bytes) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(response.rpartition(b"\r\n\r\n")[2])["error"]
    return body


async def test_an_encoded_body_is_refused_without_being_decoded(client: aiohttp.ClientSession) -> None:
    bomb = gzip.compress(bytes(64 * 1024 * 1024))
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        for coding in ("gzip", "br", "deflate", "nonsense"):
            headers = {"content-encoding": coding}
            async with client.post(f"{running.url}/v1/chat/completions", data=bomb, headers=headers) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (415, "unsupported_encoding")
    assert not engine.requests


async def test_an_answer_to_head_has_no_body() -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        head = b"HEAD /foo HTTP/1.1\r\nhost: x\r\n\r\n"
        last = b"GET /foo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        received = await raw(running, head + last)
    assert [part.split(b"\r\n")[0] for part in received.split(b"\r\n\r\n")[:2]] == [b"HTTP/1.1 404 Not Found"] * 2
    assert error(received)["code"] == "unknown_url"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"min_p":1e999}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":1e999}}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"tool_choice":"\xff"}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"user2":"\xff"}',
        b'{"model":"m","messages":[{"role":"user","content":"x","name":"\xed\xa0\x80"}]}',
    ],
)
async def test_odd_values_are_refused_and_never_reach_an_engine(client: aiohttp.ClientSession, body: bytes) -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        async with client.post(f"{running.url}/v1/chat/completions", data=body) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (400, "invalid_request_error")
    assert not engine.requests


async def test_malformed_chunks_are_refused_at_once_wherever_they_come() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        for pieces in ([head + b"3\r\nabc\r\nZZ\r\n"], [head + b"3\r\nabc\r\n", b"ZZ\r\n"], [head, b"ZZ\r\n"]):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.05)
            received = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
            assert received.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
            writer.close()


@pytest.mark.parametrize("behind", [b"GET /foo HTTP/1.1\r\nhost: x\r\n\r\n" * 1000, request(b"x" * 3_000_000)])
async def test_a_client_that_leaves_is_noticed_behind_whatever_it_has_pipelined(behind: bytes) -> None:
    seen = asyncio.Event()

    async def waits(connection: EngineConnection) -> None:
        if await connection.client_gone():
            seen.set()

    async with ScriptedEngine(waits) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        writer.write(request(json.dumps(CHAT).encode()))
        await running.until(lambda: bool(engine.requests), "the engine has the request")
        writer.write(behind)
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await asyncio.wait_for(seen.wait(), 2)


async def test_a_stopping_gateway_sends_what_it_has_written_to_a_slow_client(client: aiohttp.ClientSession) -> None:
    size = 4_000_000

    large = answering(body=b"x" * size)

    async with ScriptedEngine(large) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", running.http_port))
        await loop.sock_sendall(slow, request(json.dumps(CHAT).encode()))
        received = len(await loop.sock_recv(slow, 65536))
        stopping = asyncio.create_task(running.gateway.stop())
        while piece := await loop.sock_recv(slow, 65536):
            received += len(piece)
            await asyncio.sleep(0.005)
        await asyncio.wait_for(stopping, 10)
        slow.close()
    assert received > size


async def test_a_slow_but_steady_reader_gets_everything(client: aiohttp.ClientSession) -> None:
    event = b"data: " + b"x" * 8000 + b"\n\n"
    count = 400

    flood = streaming(*([event] * count))

    async with ScriptedEngine(flood) as engine:
        spec = one_pool(engine.endpoint(), timeouts=TimeoutSpec(idle="500ms"))
        async with running_gateway(spec) as running:
            body = {**CHAT, "stream": True}
            async with client.post(f"{running.url}/v1/chat/completions", json=body) as response:
                received = 0
                async for piece in response.content.iter_chunked(65536):
                    received += len(piece)
                    await asyncio.sleep(0.03)
    assert received == count * len(event)


async def test_a_request_that_engines_die_of_is_tried_on_two_and_no_more(client: aiohttp.ClientSession) -> None:
    async def dies(connection: EngineConnection) -> None:
        await asyncio.sleep(0.1)
        connection.reset()

    async with ScriptedEngine(dies) as engine:
        spec = one_pool(*(engine.endpoint(f"e{n}") for n in range(4)))
        async with running_gateway(spec) as running:
            async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_lost")
    assert len(engine.requests) == 2


async def test_a_head_that_is_too_large_is_431() -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        received = await raw(running, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b" 431 " in received.split(b"\r\n")[0]
    assert error(received)["code"] == "headers_too_large"


async def test_an_engines_strange_model_list_spoils_nobody_elses(client: aiohttp.ClientSession) -> None:
    lists = [
        b'{"data":[{"id":"engine-model","odd":"\xff"}]}',
        b'{"data":[{"id":"engine-model","odd":1e999},{"id":"other"}]}',
        b'{"data":[{"id":"engine-model","odd":' + b"9" * 5000 + b"}]}",
        b'{"data":[' + b"[" * 50_000 + b"]}",
        b'{"data":[3]}',
        b"nonsense",
    ]
    for models in lists:
        async with ScriptedEngine(answer, models=models) as engine:
            async with running_gateway(one_pool(engine.endpoint())) as running:
                async with client.get(f"{running.url}/v1/models") as response:
                    assert [model["id"] for model in (await response.json())["data"]] == ["m"]


async def test_an_engines_strange_heads_are_protocol_errors(client: aiohttp.ClientSession) -> None:
    heads = [
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: a\x01b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    ]
    for head in heads:

        async def script(connection: EngineConnection, head: bytes = head) -> None:
            await connection.send(head)
            await connection.client_gone()

        async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as running:
            async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_protocol_error")


async def test_what_follows_the_end_mark_on_a_connection_that_closes_costs_nothing(
    client: aiohttp.ClientSession,
) -> None:
    for tail in (b"data: [DONE]\n\n: " + b"x" * 100 + b"\n\n", b"data: [DONE]\n"):

        async def script(connection: EngineConnection, tail: bytes = tail) -> None:
            await connection.head("content-type: text/event-stream")
            await connection.send(b"data: {}\n\n" + tail)
            connection.writer.close()

        async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as running:
            async with client.post(f"{running.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response:
                assert await response.read() == b"data: {}\n\n" + tail


async def test_what_is_refused_before_its_request_is_known_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {
        b"nonsense\r\n\r\n": (b"400", "bad_head"),
        b"GET / HTTP/2.0\r\nhost: x\r\n\r\n": (b"505", "bad_head"),
        b"GET / HTTP/1.1\r\nx: " + b"y" * 20_000: (b"431", "head_too_large"),
    }
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:

        def counted(reason: str) -> float:
            name, labels = "headrace_clients_refused_total", {"reason": reason}
            return running.gateway.registry.get_sample_value(name, labels) or 0.0

        for sent, (status, _) in refused.items():
            assert (await raw(running, sent)).split(b" ")[1] == status
        monkeypatch.setattr(http_connection, "HEAD_S", 0.05)
        assert (await raw(running, b"GET / HTTP/1.1\r\n")).split(b" ")[1] == b"408"
        assert await raw(running, b"") == b""
        clients = running.gateway._clients
        assert clients is not None
        monkeypatch.setattr(clients.files, "refuses", lambda _: True)
        assert await raw(running, b"") == b""
        assert {reason: counted(reason) for reason in ("bad_head", "head_too_large", "head_timeout", "files")} == {
            "bad_head": 2,
            "head_too_large": 1,
            "head_timeout": 2,
            "files": 1,
        }
