"""What the gateway uses of aiohttp's inside, held against the version that is installed.

`gateway/http/client_response.py` writes to the transport of aiohttp's server connection by itself. A new minor version
of aiohttp may change any of this; then this file says so before a client does.
"""

import asyncio
import importlib.metadata
import json

import uvloop
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_server import Server

from gateway.http.client_response import ClientProtocol
from tests.harness import EngineConnection, ScriptedEngine, one_pool, running_gateway

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'


def test_the_version_is_the_one_this_was_written_for() -> None:
    assert importlib.metadata.version("aiohttp").startswith("3.14.")


def test_the_names_that_are_used_are_there() -> None:
    for name in ("pause_writing", "resume_writing", "writing_paused", "_drain_helper", "handle_error", "close"):
        assert hasattr(RequestHandler, name), name
    assert callable(Server.__call__)


async def test_tests_run_on_the_loop_gateways_run_on() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


async def answer(connection: EngineConnection) -> None:
    await connection.head("content-type: application/json", "content-length: 2")
    await connection.send(b"{}")


async def read_response(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head, await asyncio.wait_for(reader.readexactly(int(length.split(b":")[1])), 5)


def post(body: bytes, version: bytes = b"1.1", extra: bytes = b"") -> bytes:
    return b"POST /v1/chat/completions HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (
        version,
        extra,
        len(body),
        body,
    )


async def test_a_connection_carries_one_answer_after_another_also_after_a_refusal() -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        for body, status in [(BODY, b"200"), (b"{", b"400"), (BODY, b"200"), (b"[]", b"400"), (BODY, b"200")]:
            writer.write(post(body))
            head, _ = await read_response(reader)
            assert head.startswith(b"HTTP/1.1 " + status)
            assert b"connection: close" not in head.lower()
        writer.write(post(BODY) + post(BODY))
        assert [(await read_response(reader))[1] for _ in range(2)] == [b"{}", b"{}"]
        writer.close()


async def test_a_client_that_asks_for_it_gets_the_end_of_the_connection() -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        for request in (post(BODY, extra=b"connection: close\r\n"), post(BODY, version=b"1.0")):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
            writer.write(request)
            head, body = await read_response(reader)
            assert (b"connection: close" in head.lower(), body) == (True, b"{}")
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()


async def test_what_is_not_http_is_refused_in_the_apis_shape() -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        for garbage in (b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
            writer.write(garbage)
            head, body = await read_response(reader)
            assert b" 400 " in head.split(b"\r\n")[0]
            assert b"x-request-id:" in head.lower()
            assert json.loads(body)["error"]["code"] == "bad_http_request"
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()


async def test_a_client_is_asked_for_the_body_it_waits_to_send() -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        head, _, body = post(BODY, extra=b"expect: 100-continue\r\n").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await read_response(reader))[1] == b"{}"
        writer.close()


async def test_connections_are_ours() -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        writer.write(post(BODY))
        await read_response(reader)
        runner = running.gateway._client_runner
        assert runner is not None and runner.server is not None
        assert [type(connection) for connection in runner.server.connections] == [ClientProtocol]
        writer.close()
