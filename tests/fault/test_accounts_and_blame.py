"""What is counted of answers, and whom failures speak against, when engines and clients behave oddly. The engines are
scripted."""

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.spec.documents import file_documents
from router.spec.fleet import EndpointSpec, OutlierSpec
from tests.harness import (
    CHAT,
    DONE,
    ONE,
    STREAM,
    TWO,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    one_pool,
    running_gateway,
    streaming,
)


async def ask(port: int, body: dict[str, Any], *headers: str, close: bool = True, seconds: float = 3.0) -> bytes:
    sent = msgspec.json.encode(body)
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"content-length: {len(sent)}", *headers]
    if close:
        lines.append("connection: close")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([*lines, "", ""]).encode() + sent)
    got = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while piece := await reader.read(65536):
                got += piece
    writer.close()
    return got


BODY = b'{"choices":[{"message":{"content":"hello"}}]}'


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream\r\ncontent-encoding: gzip"])
async def test_an_answer_that_is_no_readable_stream_is_not_pinged(kind: str) -> None:
    async def script(connection: EngineConnection) -> None:
        await connection.head(f"content-type: {kind}", f"content-length: {len(BODY)}")
        await connection.send(BODY[:20])
        await asyncio.sleep(0.5)
        await connection.send(BODY[20:])

    async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint(), ping="100ms")) as gateway:
        answer = await ask(gateway.http_port, STREAM)
        assert answer.partition(b"\r\n\r\n")[2] == BODY


async def test_an_absurd_usage_costs_no_second_answer_on_the_connection() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":%b}}\n\n' % (b"9" * 400)

    script = streaming(ONE, usage, DONE)

    async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as gateway:
        answer = await ask(gateway.http_port, STREAM, close=False, seconds=0.5)
        assert answer.count(b"HTTP/1.1 ") == 1, answer


async def test_a_finish_reason_is_counted_however_the_reads_fall() -> None:
    async def script(connection: EngineConnection) -> None:
        await connection.events(ONE)
        for event in (TWO, b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n', DONE):
            await asyncio.sleep(0.03)
            await connection.chunk(event)
        await asyncio.sleep(0.03)
        await connection.end()

    async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as gateway:
        await ask(gateway.http_port, STREAM)
        labels = {"api": "chat.completions", "route": "m", "reason": "stop"}
        assert gateway.gateway.registry.get_sample_value("headrace_finished_total", labels) == 1


async def test_an_error_event_with_usage_reaches_the_client() -> None:
    async def script(connection: EngineConnection) -> None:
        await connection.events(ONE)
        await connection.chunk(b'data: {"error":{"message":"boom"},"usage":{"prompt_tokens":7}}\n\n')
        await connection.end()

    async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as gateway:
        assert b"boom" in await ask(gateway.http_port, STREAM)


@pytest.mark.parametrize("deadline", ["first_byte=5ms", "idle=5ms"])
async def test_a_clients_own_impatience_does_not_speak_against_an_endpoint(deadline: str) -> None:
    async def script(connection: EngineConnection) -> None:
        if deadline.startswith("first"):
            await asyncio.sleep(0.1)
        await connection.events(ONE)
        await asyncio.sleep(0.1)
        await connection.chunk(DONE)
        await connection.end()

    async with ScriptedEngine(script) as one, ScriptedEngine(script) as two:
        async with running_gateway(one_pool(one.endpoint("a"), two.endpoint("b"))) as gateway:
            for _ in range(6):
                await ask(gateway.http_port, STREAM, f"x-headrace-timeouts: {deadline}", "x-session-id: s")
            phases = {id_: endpoint.phase for id_, endpoint in gateway.gateway.fleet.endpoints.items()}
            assert phases == {"a": "ready", "b": "ready"}


async def test_only_the_trial_itself_decides_on_a_trial() -> None:
    let_old_break, mode = asyncio.Event(), "fail"

    async def failing(connection: EngineConnection) -> None:
        if b'"old"' in connection.body:
            await connection.events(ONE)
            await let_old_break.wait()
            connection.reset()
        elif mode == "fail":
            await connection.head("content-length: 2", status="500 x")
            await connection.send(b"{}")
        else:
            await asyncio.sleep(0.8)
            await connection.stream(ONE, DONE)

    well = streaming(ONE, DONE)

    async with ScriptedEngine(failing) as one, ScriptedEngine(well) as two:
        spec = one_pool(one.endpoint("a"), two.endpoint("b"), outlier=OutlierSpec(base_ejection="1s"))
        async with running_gateway(spec) as gateway:
            for number in range(50):
                session = f"x-session-id: s{number}"
                if b"endpoint: a" in await ask(gateway.http_port, CHAT, session):
                    break
            old = asyncio.create_task(ask(gateway.http_port, {**STREAM, "user": "old"}, session, seconds=10))
            await asyncio.sleep(0.2)
            for _ in range(6):
                await ask(gateway.http_port, CHAT, session)
            record = gateway.gateway.fleet.endpoints["a"].state.outlier
            assert record.ejected
            await asyncio.sleep(1.2)
            assert record.on_trial
            mode = "well"
            trial = asyncio.create_task(ask(gateway.http_port, STREAM, session))
            await asyncio.sleep(0.3)
            let_old_break.set()
            assert b"DONE" in await trial
            await old
            assert not record.ejected, record.detail


async def test_series_of_an_endpoint_that_left_do_not_come_back() -> None:
    async def script(connection: EngineConnection) -> None:
        await connection.events(ONE)
        await asyncio.sleep(0.5)
        connection.reset()

    async with ScriptedEngine(script) as one, ScriptedEngine(script) as two:
        spec = one_pool(one.endpoint("gone"), two.endpoint("b"))
        async with running_gateway(spec) as gateway:
            asked = [asyncio.create_task(ask(gateway.http_port, STREAM, f"x-session-id: {n}")) for n in range(12)]
            await asyncio.sleep(0.3)
            assert gateway.in_flight["gone"]
            gateway.apply(file_documents(one_pool(two.endpoint("b")), content_hash="x"))
            await asyncio.gather(*asked)
            exposed = generate_latest(gateway.gateway.registry).decode().splitlines()
            left = [line for line in exposed if '"gone"' in line]
            assert not left


def requests_counted(gateway: RunningGateway) -> dict[tuple[str, str], float]:
    """Requests by route and status."""
    text = generate_latest(gateway.gateway.registry).decode()
    family = next(f for f in text_string_to_metric_families(text) if f.name == "headrace_requests")
    return {(sample.labels["route"], sample.labels["status"]): sample.value for sample in family.samples}


async def test_a_client_that_leaves_with_its_whole_answer_is_not_counted_as_gone() -> None:
    async def script(connection: EngineConnection) -> None:
        await connection.events(ONE, DONE)
        await asyncio.sleep(0.5)
        await connection.end()

    async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as gateway:
        sent = msgspec.json.encode(STREAM)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)
        await reader.readuntil(DONE)
        writer.close()
        await gateway.until(lambda: ("m", "200") in requests_counted(gateway), "the request is counted")
        assert requests_counted(gateway) == {("m", "200"): 1}


async def test_a_refusal_of_a_known_route_is_counted_and_told_under_its_name() -> None:
    spec = one_pool(EndpointSpec(id="down", http="http://127.0.0.1:1"))
    async with running_gateway(spec, wait_ready=False) as gateway:
        answer = await ask(gateway.http_port, CHAT)
        assert b"HTTP/1.1 503" in answer
        assert b"x-headrace-route: m\r\n" in answer
        assert b"x-headrace-route: -\r\n" in await ask(gateway.http_port, {**CHAT, "model": "made-up"})
        assert requests_counted(gateway) == {("m", "503"): 1, ("unknown", "404"): 1}
