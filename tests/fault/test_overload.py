"""A gateway short of something says so, spares what it can, and comes back by itself."""

import asyncio
import os
import resource

import aiohttp
import msgspec
import pytest

from gateway import overload
from router import overload as decisions
from router.spec.fleet import FleetSpec
from router.spec.gateway import OverloadSpec
from tests.harness import CHAT, RunningGateway, ScriptedEngine, answering, one_pool, running_gateway


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "_EVERY_S", 0.05)
    monkeypatch.setattr(decisions, "CALM_S", 0.2)


answer = answering()


def spec_of(engine: ScriptedEngine, **limits: str) -> FleetSpec:
    spec = one_pool(engine.endpoint())
    gateway = msgspec.structs.replace(spec.gateway, overload=msgspec.convert(limits, OverloadSpec))
    return msgspec.structs.replace(spec, gateway=gateway)


def seconds_of(running: RunningGateway, measure: str) -> float:
    return running.gateway.registry.get_sample_value("headrace_overload_seconds_total", {"measure": measure}) or 0.0


async def status(client: aiohttp.ClientSession, running: RunningGateway) -> tuple[int, str | None, bool]:
    async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
        body = await response.json()
        kept = response.headers.get("Connection") != "close"
        return response.status, body.get("error", {}).get("code"), kept


def test_open_files_are_counted() -> None:
    before = overload._files_used()
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(200)]
    try:
        assert overload._files_used() >= before + 190 / resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        for one in taken:
            os.close(one)


async def test_a_gateway_that_is_short_of_memory_refuses_until_it_is_not(client: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(answer) as engine, running_gateway(spec_of(engine)) as running:
        assert await status(client, running) == (200, None, True)
        watch = running.gateway._overload
        watch._memory_share = 1e-6
        await running.until(lambda: seconds_of(running, "refuse") > 0, "refusing")
        assert await status(client, running) == (503, "overloaded", False)
        async with client.get(f"{running.url}/v2/health/live") as response:
            assert response.status == 200
        watch._memory_share = 1.0
        await running.until(lambda: watch.keeps_connections, "back to normal")
        assert await status(client, running) == (200, None, True)


async def test_a_gateway_nearly_short_of_memory_has_idle_connections_closed(client: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(answer) as engine:
        async with running_gateway(spec_of(engine)) as running:
            loop = asyncio.get_running_loop()
            used_reader, used = await asyncio.open_connection("127.0.0.1", running.http_port)
            used.write(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            await used_reader.readuntil(b"\r\n\r\n")
            reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
            running.gateway._overload._overload.update({"memory": 0.85}, loop.time())
            assert (await status(client, running))[2] is False
            clients = running.gateway._clients
            assert clients is not None

            def check(later: float) -> None:
                running.gateway._overload._overload.update({"memory": 0.85}, loop.time())
                for connection in tuple(clients.connections):
                    connection.check(loop.time() + later)

            check(0.0)
            assert await asyncio.wait_for(used_reader.read(), 5) == b""
            assert not reader.at_eof(), "a connection that has just been made may still bring its first request"
            check(1.1)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            for one in (used, writer):
                one.close()
            labels = {"reason": "overload"}
            assert running.gateway.registry.get_sample_value("headrace_clients_refused_total", labels) == 1
