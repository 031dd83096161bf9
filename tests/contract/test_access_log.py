"""The access log of a running gateway: one line for each request, whichever way it ends.

The engine is scripted: no real one can be told to die in the middle of its answer.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.telemetry import access_log
from router.spec.fleet import FleetSpec, KeySpec, TenantSpec
from router.tenants import digest_of
from tests.harness import (
    CHAT,
    DONE,
    ONE,
    STREAM,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    one_pool,
    running_gateway,
)

USED = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
USAGE = b"data: %b\n\n" % msgspec.json.encode({"choices": [], "usage": USED})
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SECRET = "a key that nobody may read"

Line = dict[str, Any]


async def answers(connection: EngineConnection) -> None:
    if b"die" in connection.body:
        await connection.events(ONE)
        connection.reset()
    elif b"wait" in connection.body:
        await connection.events(ONE)
        await connection.client_gone()
    else:
        await connection.stream(ONE, STOP, USAGE, DONE)


def logging_to(fleet: FleetSpec, where: str | Path) -> FleetSpec:
    gateway = msgspec.structs.replace(fleet.gateway, access_log=str(where))
    return msgspec.structs.replace(fleet, gateway=gateway)


@pytest.fixture
async def logged(tmp_path: Path) -> AsyncIterator[tuple[RunningGateway, Callable[[int], Any]]]:
    """A gateway, and what gives as many lines as it has written, when it has."""
    path = tmp_path / "access.log"

    async def lines(count: int) -> list[Line]:
        async with asyncio.timeout(5):
            while not path.exists() or path.read_bytes().count(b"\n") < count:  # noqa: ASYNC110 - a file is no event
                await asyncio.sleep(0.02)
        return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]

    async with ScriptedEngine(answers) as engine:
        async with running_gateway(logging_to(one_pool(engine.endpoint()), path)) as running:
            yield running, lines


async def test_a_stream_is_one_line_that_says_where_it_went_and_what_it_was(logged: Any) -> None:
    running, lines = logged
    headers = {"x-request-id": "mine", "user-agent": "a-client/1.0", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-00"}
    async with aiohttp.ClientSession() as session:
        url = f"{running.url}/v1/chat/completions?key={SECRET}"
        async with session.post(url, json=STREAM, headers=headers) as response:
            body = await response.read()
    (line,) = await lines(1)
    times = {name: line.pop(name) for name in ("time", "queue_ms", "ttft_ms", "duration_ms")}
    assert line == {
        "request_id": "mine",
        "client": "127.0.0.1",
        "user_agent": "a-client/1.0",
        "method": "POST",
        "path": "/v1/chat/completions",
        "api": "chat.completions",
        "tenant": None,
        "route": "m",
        "endpoint": "engine",
        "reason": "affinity",
        "attempts": 1,
        "status": 200,
        "code": None,
        "stream": True,
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "completion_tokens": 3,
        "bytes": line["bytes"],
        "finish_reason": "stop",
        "trace_id": TRACE,
    }
    assert line["bytes"] >= len(body)
    assert 0 <= times["queue_ms"] <= times["ttft_ms"] <= times["duration_ms"]
    assert times["time"].endswith("Z")


async def test_every_way_a_request_can_end_is_a_line(logged: Any) -> None:
    running, lines = logged
    chat = f"{running.url}/v1/chat/completions"

    async def post(session: aiohttp.ClientSession, content: str, **more: Any) -> None:
        body = {**STREAM, "messages": [{"role": "user", "content": content}], **more}
        async with session.post(chat, json=body) as response:
            await response.read()

    async with aiohttp.ClientSession() as session:
        await post(session, "die")
        await post(session, "hi", model="nobody's")
        async with session.get(f"{running.url}/v1/models") as response:
            assert response.status == 200
        async with session.get(f"{running.url}/nowhere") as response:
            assert response.status == 404
        async with session.get(f"{running.url}/v2/health/live") as response:
            assert response.status == 200
        async with asyncio.timeout(5), session.post(chat, json={**STREAM, "user": "wait"}) as response:
            await response.content.readany()
            response.close()
    found = await lines(5)
    told = [(line["path"], line["status"], line["code"], line["endpoint"]) for line in found]
    assert told == [
        ("/v1/chat/completions", 200, "engine_died", "engine"),
        ("/v1/chat/completions", 404, "model_not_found", None),
        ("/v1/models", 200, None, None),
        ("/nowhere", 404, None, None),
        ("/v1/chat/completions", 499, None, "engine"),
    ]
    assert [line["route"] for line in found] == ["m", None, None, None, "m"]


async def test_a_line_names_the_tenant_and_neither_its_key_nor_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    prompt = "what nobody else may know"
    async with ScriptedEngine(answers) as engine:
        fleet = logging_to(one_pool(engine.endpoint()), path)
        key = KeySpec(sha256=digest_of(SECRET).hex())
        fleet = msgspec.structs.replace(fleet, tenants={"search": TenantSpec(keys=[key])})
        async with running_gateway(fleet) as running, aiohttp.ClientSession() as session:
            for headers in ({"x-api-key": SECRET}, {"authorization": f"Bearer {SECRET}!"}):
                body = {**CHAT, "stream": True, "messages": [{"role": "user", "content": prompt}]}
                url = f"{running.url}/v1/chat/completions"
                async with session.post(url, json=body, headers=headers) as response:
                    await response.read()
    text = path.read_text()
    lines = [msgspec.json.decode(line) for line in text.splitlines()]
    assert [(line["tenant"], line["status"]) for line in lines] == [("search", 200), (None, 401)]
    assert SECRET not in text and prompt not in text and "one" not in text


async def test_who_does_not_read_the_log_costs_lines_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "HELD_BYTES", 16 * 1024)
    monkeypatch.setattr(access_log, "_EVERY_S", 0.01)
    monkeypatch.setattr(access_log, "_LAST_LINES_S", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with ScriptedEngine(answers) as engine:
            async with running_gateway(logging_to(one_pool(engine.endpoint()), path)) as running:
                async with aiohttp.ClientSession() as session:
                    for _ in range(400):
                        async with session.get(f"{running.url}/v1/models") as response:
                            assert response.status == 200
                lost = running.gateway.registry.get_sample_value("headrace_access_log_dropped_total")
                assert lost is not None and lost > 0
                read = os.read(reader, 1024 * 1024)  # what was written are whole lines
                assert read and all(msgspec.json.decode(line) for line in read.splitlines())
    finally:
        os.close(reader)
