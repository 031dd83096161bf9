"""Signs of life, deadlines of a request's own, and what a client is told of where it went. The engine is scripted."""

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest

from router.spec.fleet import FleetSpec, TimeoutLimitSpec, TimeoutSpec
from router.spec.gateway import GatewaySpec
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
    streaming,
)
from tests.harness import running_gateway as running

PING = b": ping\n\n"
PINGED: dict[str, Any] = {"ping": "50ms"}


async def ask(
    client: aiohttp.ClientSession, gateway: RunningGateway, body: dict[str, Any] = STREAM, **headers: str
) -> tuple[int, bytes, Any]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=sent) as response:
        return response.status, await response.read(), response.headers


def without_pings(body: bytes) -> bytes:
    return body.replace(PING, b"")


async def slow(connection: EngineConnection) -> None:
    await asyncio.sleep(0.3)
    await connection.events(ONE)
    await connection.chunk(TWO[:20])
    await asyncio.sleep(0.3)
    await connection.chunk(TWO[20:])
    await connection.chunk(DONE)
    await connection.end()


async def test_pings_come_before_the_first_token_and_in_gaps_and_only_between_events(
    client: aiohttp.ClientSession,
) -> None:
    async with ScriptedEngine(slow) as engine, running(one_pool(engine.endpoint(), **PINGED)) as gateway:
        status, body, headers = await ask(client, gateway)
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-headrace-endpoint"] == "engine"
        assert without_pings(body) == ONE + TWO + DONE
        before, _, after = body.partition(ONE)
        assert before.count(PING) >= 2
        assert after.startswith(PING)
        assert after.endswith(TWO + DONE)


@pytest.mark.parametrize(("options", "body"), [({"ping": "off"}, STREAM), (PINGED, CHAT)], ids=["off", "no stream"])
async def test_nobody_else_is_pinged(
    client: aiohttp.ClientSession, options: dict[str, Any], body: dict[str, Any]
) -> None:
    async def answer(connection: EngineConnection) -> None:
        await asyncio.sleep(0.2)
        await connection.head("content-length: 2")
        await connection.send(b"{}")

    async with ScriptedEngine(answer) as engine, running(one_pool(engine.endpoint(), **options)) as gateway:
        assert (await ask(client, gateway, body))[:2] == (200, b"{}")


async def refuses(connection: EngineConnection) -> None:
    await asyncio.sleep(0.2)
    body = b'{"error":{"message":"too long",\n"code":400}}'
    await connection.head(f"content-length: {len(body)}", "content-type: application/json", status="400 Bad Request")
    await connection.send(body)


async def answers_html(connection: EngineConnection) -> None:
    await asyncio.sleep(0.2)
    await connection.head("content-length: 4", "content-type: text/html", status="500 Oh")
    await connection.send(b"<hr>")


async def dies(connection: EngineConnection) -> None:
    await asyncio.sleep(0.2)
    connection.reset()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (refuses, "too long"),
        (answers_html, "Engine engine answered 500 instead of a stream."),
        (dies, "Engine engine closed the connection without an answer."),
    ],
)
async def test_after_a_ping_an_error_is_an_event(client: aiohttp.ClientSession, script: Any, message: str) -> None:
    async with ScriptedEngine(script) as engine, running(one_pool(engine.endpoint(), **PINGED)) as gateway:
        status, body, _ = await ask(client, gateway)
        assert status == 200
        event = without_pings(body)
        assert event.endswith(b"\n\n")
        data = b"".join(line.removeprefix(b"data: ") for line in event.splitlines())
        assert json.loads(data)["error"]["message"] == message
        assert DONE not in body


async def test_after_a_ping_another_endpoint_may_still_answer(client: aiohttp.ClientSession) -> None:
    tried = []

    async def first_dies(connection: EngineConnection) -> None:
        tried.append(1)
        await asyncio.sleep(0.2)
        if len(tried) == 1:
            connection.reset()
        else:
            await connection.stream(ONE, DONE)

    async with ScriptedEngine(first_dies) as a, ScriptedEngine(first_dies) as b:
        async with running(one_pool(a.endpoint("a"), b.endpoint("b"), **PINGED)) as gateway:
            status, body, _ = await ask(client, gateway)
    assert status == 200
    assert body.startswith(PING)
    assert without_pings(body) == ONE + DONE
    assert len(tried) == 2


async def never(connection: EngineConnection) -> None:
    await connection.client_gone()


async def test_a_request_may_ask_for_shorter_deadlines(client: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(never) as engine, running(one_pool(engine.endpoint())) as gateway:
        async with asyncio.timeout(5):
            status, body, headers = await ask(client, gateway, CHAT, x_headrace_timeouts="first_byte=100ms")
        assert status == 504
        assert json.loads(body)["error"]["code"] == "first_byte_timeout"
        assert headers["x-headrace-endpoint"] == "engine"


async def test_a_request_may_not_ask_for_longer_deadlines_than_its_pool_allows(client: aiohttp.ClientSession) -> None:
    timeouts = TimeoutSpec(first_byte="100ms")
    bounded: dict[str, Any] = {"timeout_limits": TimeoutLimitSpec(first_byte="300ms")}
    async with (
        ScriptedEngine(never) as engine,
        running(one_pool(engine.endpoint(), timeouts=timeouts, **bounded)) as gw,
    ):
        async with asyncio.timeout(5):
            _, body, _ = await ask(client, gw, CHAT, x_headrace_timeouts="first_byte=1h")
        assert "the first_byte timeout of 0.3 s" in json.loads(body)["error"]["message"]


async def test_a_malformed_timeouts_header_is_a_400(client: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(never) as engine, running(one_pool(engine.endpoint())) as gateway:
        status, body, _ = await ask(client, gateway, CHAT, x_headrace_timeouts="soon")
        assert status == 400
        assert json.loads(body)["error"]["code"] == "invalid_header"
        assert engine.requests == []


whole = streaming(ONE, DONE)


def hidden(spec: FleetSpec) -> FleetSpec:
    return msgspec.structs.replace(spec, gateway=GatewaySpec(expose_routing=False))


@pytest.mark.parametrize("exposed", [True, False])
async def test_a_client_is_told_where_its_request_went_unless_that_is_off(
    client: aiohttp.ClientSession, exposed: bool
) -> None:
    async with ScriptedEngine(whole) as engine:
        spec = one_pool(engine.endpoint())
        async with running(spec if exposed else hidden(spec)) as gateway:
            for body, status in ((STREAM, 200), ({}, 400)):
                answered, _, headers = await ask(client, gateway, body)
                assert answered == status
                told = {name.lower(): value for name, value in headers.items() if name.lower().startswith("x-headrace")}
                if not exposed:
                    assert told == {}
                elif status == 200:
                    assert float(told.pop("x-headrace-queue-ms")) >= 0
                    assert told == {
                        "x-headrace-endpoint": "engine",
                        "x-headrace-route": "m",
                        "x-headrace-reason": "affinity",
                        "x-headrace-attempts": "1",
                    }
                else:
                    assert told == {"x-headrace-endpoint": "-", "x-headrace-route": "-"}
