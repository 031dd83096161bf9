"""Connections of clients, one request after another: what a client may count on, spoken to over a plain socket."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
import uvloop

from gateway.http import connection as connections
from gateway.http import request_body, server
from tests.harness import EngineConnection, RunningGateway, ScriptedEngine, answering, one_pool, running_gateway

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'


async def test_tests_run_on_the_loop_gateways_run_on() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


answer = answering()


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


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[tuple[RunningGateway, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A gateway before an engine that answers at once, and a connection to it."""
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        try:
            yield running, reader, writer
        finally:
            writer.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of connections in fractions of a second."""
    monkeypatch.setattr(server, "_CHECK_EVERY_S", 0.05)
    for name in ("KEEP_ALIVE_S", "HEAD_S", "LINGER_S", "TAIL_S"):
        monkeypatch.setattr(connections, name, 0.3)
    monkeypatch.setattr(request_body, "BODY_IDLE_S", 0.3)


async def refusal(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """Status and code of an error that the connection ends with."""
    received = await asyncio.wait_for(reader.read(), 5)
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return head.split(b" ")[1], json.loads(body)["error"]["code"]


async def test_a_head_that_comes_byte_by_byte_is_read() -> None:
    async with gateway() as (_, reader, writer):
        for byte in b"\r\n" + post(BODY):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await read_response(reader))[1] == b"{}"


async def test_a_body_that_comes_in_chunks_is_read_and_the_next_request_after_it() -> None:
    async with gateway() as (_, reader, writer):
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        chunks = b"".join(b"%x\r\n%b\r\n" % (1, BODY[at : at + 1]) for at in range(len(BODY))) + b"0\r\n\r\n"
        writer.write(head + chunks + post(BODY))
        assert [(await read_response(reader))[1] for _ in range(2)] == [b"{}", b"{}"]


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET / HTTP/1.1\nhost: x\n\n", b"400", "bad_http_request"),
        (b"GET / HTTP/1.1\r\nhost: x\nx: y", b"400", "bad_http_request"),
        (post(BODY, extra=b"transfer-encoding: chunked\r\n"), b"400", "bad_http_request"),
        (post(BODY, extra=b"content-length: 1\r\n"), b"400", "bad_http_request"),
        (b"GET / HTTP/1.1\r\nx: y\r\n\r\n", b"400", "bad_http_request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505", "bad_http_request"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000, b"431", "headers_too_large"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 500 + b"\r\n", b"431", "headers_too_large"),
    ],
)
async def test_what_could_be_smuggled_ends_the_connection(sent: bytes, status: bytes, code: str) -> None:
    async with gateway() as (_, reader, writer):
        writer.write(sent + post(BODY))
        assert await refusal(reader) == (status, code)


async def test_a_client_that_is_refused_while_it_sends_gets_the_refusal_all_the_same() -> None:
    async with ScriptedEngine(answer) as engine:
        spec = one_pool(engine.endpoint(), body_limit="1KiB")
        async with running_gateway(spec) as running:
            for head in (b"content-length: 9000000\r\n", b"transfer-encoding: chunked\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
                writer.write(b"895440\r\n" + bytes(9_000_000))
                assert await refusal(reader) == (b"413", "request_too_large")
                writer.close()


@pytest.mark.usefixtures("hasty")
async def test_a_connection_that_nobody_uses_is_closed() -> None:
    async with gateway() as (_, reader, writer):
        assert await asyncio.wait_for(reader.read(), 5) == b""
        del writer
    async with gateway() as (_, reader, writer):
        writer.write(post(BODY))
        await read_response(reader)
        assert await asyncio.wait_for(reader.read(), 5) == b""


@pytest.mark.usefixtures("hasty")
async def test_a_head_or_a_body_that_does_not_come_is_408() -> None:
    for sent in (b"GET / HT", post(BODY)[:-1], post(BODY, extra=b"expect: 100-continue\r\n")[: -len(BODY)]):
        async with gateway() as (_, reader, writer):
            writer.write(sent)
            if b"expect" in sent:
                await reader.readuntil(b"\r\n\r\n")
            assert await refusal(reader) == (b"408", "request_timeout")


@pytest.mark.usefixtures("hasty")
async def test_a_client_that_goes_on_sending_after_its_answer_is_cut() -> None:
    async with gateway() as (running, reader, writer):
        writer.write(b"GET / HTTP/9.9\r\n\r\n")
        assert (await refusal(reader))[0] == b"505"
        with pytest.raises(ConnectionError):
            while True:
                writer.write(bytes(1000))
                await writer.drain()
                await asyncio.sleep(0.01)
        clients = running.gateway._clients
        assert clients is not None
        assert not clients.connections


async def test_what_is_pipelined_without_end_ends_the_connection() -> None:
    held = asyncio.Event()

    async def waits(connection: EngineConnection) -> None:
        await held.wait()
        await answer(connection)

    async with ScriptedEngine(waits) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        writer.write(post(BODY) + bytes(connections.PIPELINED_BYTES + 1))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        held.set()


async def test_a_connection_made_just_before_the_stop_gets_its_first_answer() -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(running.gateway.stop())
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", running.http_port)
        writer.write(post(BODY))
        head, body = await read_response(reader)
        assert (b"connection: close" in head.lower(), body) == (True, b"{}")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        await asyncio.wait_for(stopping, 5)
        writer.close()


async def test_a_gateway_that_stops_says_so_to_clients_that_keep_their_connections() -> None:
    held = asyncio.Event()

    async def waits(connection: EngineConnection) -> None:
        await held.wait()
        await answer(connection)

    async with ScriptedEngine(waits) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        writer.write(post(BODY))
        await running.until(lambda: bool(engine.requests), "the engine has the request")
        stopping = asyncio.create_task(running.gateway.stop())
        assert await asyncio.wait_for(idle_reader.read(), 5) == b""
        held.set()
        head, body = await read_response(reader)
        assert (b"connection: close" in head.lower(), body) == (True, b"{}")
        await asyncio.wait_for(stopping, 5)
        idle_writer.close()
        writer.close()
