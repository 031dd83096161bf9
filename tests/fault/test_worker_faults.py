"""What goes wrong around the workers of `headrace gateway --workers`: Redis, signals, pauses, starts that hang."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest_asyncio

from tests.fault.worker_command import HeldEngine, command
from tests.harness import DONE, ONE, STREAM, EngineConnection, ScriptedEngine, one_pool
from tests.valkey import ValkeyProcess, servers_here


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[HeldEngine]:
    engine = HeldEngine()
    async with engine:
        yield engine


async def answers(connection: EngineConnection) -> None:
    await connection.events(ONE, DONE)
    await connection.end()


async def test_workers_that_are_replaced_while_redis_is_away_know_what_the_gateway_knows(tmp_path: Path) -> None:
    async with (
        ValkeyProcess(servers_here()[0], tmp_path) as valkey,
        ScriptedEngine(answers) as one,
        ScriptedEngine(answers) as other,
        command(tmp_path, one_pool(one.endpoint("a"), other.endpoint("b"), redis=valkey.url)) as running,
        aiohttp.ClientSession() as session,
    ):
        await running.until_ready()
        admin = f"http://{running.addresses.admin}/admin/v1"
        async with session.put(f"{admin}/routes/new", json={"pool": "p"}) as response:
            assert response.status < 300, await response.text()
        async with session.post(f"{admin}/endpoints/a/drain") as response:
            assert response.status < 300, await response.text()
        valkey.kill()
        await running.until(lambda state: state["detail"]["redis"]["connected"] is False)
        first = running.workers
        for worker in first:
            worker.kill()
        async with asyncio.timeout(30):
            while {*first} & {*running.workers}:  # noqa: ASYNC110 - processes are no events here
                await asyncio.sleep(0.02)
        await running.until_ready()
        for number in range(8):
            headers = {"x-session-id": str(number), "connection": "close"}
            asked = STREAM | {"model": "new"}
            async with session.post(f"{running.url}/v1/chat/completions", json=asked, headers=headers) as response:
                assert (response.status, response.headers["x-headrace-endpoint"]) == (200, "b")
