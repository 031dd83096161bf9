"""What goes wrong around the workers of `headrace gateway --workers`: Redis, signals, pauses, starts that hang."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
import pytest_asyncio

from gateway.http.fair_share import shared_memory
from gateway.listening import bind
from headrace.workers import slot
from headrace.workers.channel import Start
from router.spec.documents import file_documents
from tests.fault.worker_command import WORKERS, clients_of, command, streams
from tests.harness import DONE, ONE, STREAM, HeldEngine, ScriptedEngine, one_pool, streaming
from tests.valkey import ValkeyProcess, servers_here


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[HeldEngine]:
    async with HeldEngine() as engine:
        yield engine


answers = streaming(ONE, DONE)


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


async def test_a_service_manager_that_tells_every_process_to_stop_cuts_no_stream(
    engine: HeldEngine, tmp_path: Path
) -> None:
    async with command(tmp_path, one_pool(engine.endpoint())) as running:
        await running.until_ready()
        async with streams(running.url, 8) as clients:
            for worker in running.workers:
                worker.send_signal(signal.SIGTERM)
            running.process.send_signal(signal.SIGTERM)
            await running.until(lambda state: state["status"] == "not_ready")
            engine.let_go()
            await asyncio.wait([client.ended for client in clients], timeout=5)
            assert all(client.complete for client in clients)
        assert await running.ends() == 0


async def test_a_start_that_hangs_ends_when_told_to_stop(engine: HeldEngine, tmp_path: Path) -> None:
    async with command(tmp_path, one_pool(engine.endpoint())) as running:
        async with asyncio.timeout(20):
            while len(running.workers) < WORKERS:  # noqa: ASYNC110 - processes are no events here
                await asyncio.sleep(0.02)
        running.workers[0].suspend()
        running.process.send_signal(signal.SIGTERM)
        assert await running.ends() == 0
    assert "Traceback" not in running.log.read_text()
    assert "never retrieved" not in running.log.read_text()


async def test_a_worker_that_dies_while_it_drains_is_told_of(engine: HeldEngine, tmp_path: Path) -> None:
    async with command(tmp_path, one_pool(engine.endpoint())) as running:
        await running.until_ready()
        async with streams(running.url, 8) as clients:
            killed = next(worker for worker in running.workers if clients_of(worker, running.addresses.http))
            running.process.send_signal(signal.SIGTERM)
            await running.until(lambda state: state["status"] == "not_ready")
            killed.kill()
            engine.let_go()
            assert await running.ends() == 0
            await asyncio.wait([client.ended for client in clients], timeout=5)
    told = [line for line in running.log.read_text().splitlines() if "it had not drained" in line]
    assert len(told) == 1
    assert f"(process {killed.pid}) was ended by SIGKILL; it had not drained" in told[0]


@contextlib.asynccontextmanager
async def kept_slot(engine: ScriptedEngine) -> AsyncIterator[slot.Slot]:
    """A worker's place in this process, where the worker serves."""
    with contextlib.ExitStack() as sockets:
        http = [sockets.enter_context(one).fileno() for one in bind("http", "127.0.0.1:0")]
        counts = shared_memory(1)
        sockets.callback(os.close, counts)
        spec = one_pool(engine.endpoint())
        start = Start(
            workers=1,
            number=1,
            spec=spec,
            documents=msgspec.json.encode(file_documents(spec, content_hash="h")),
            http=http,
            counts=counts,
            place=0,
            log_level="error",
            log_format="text",
            log_levels={},
        )
        place = slot.Slot(1, lambda: start, lambda _: None)
        keeping = asyncio.create_task(place.keep())
        try:
            async with asyncio.timeout(30):
                while not place.serving:  # noqa: ASYNC110 - what a process says is no event here
                    await asyncio.sleep(0.05)
            yield place
            place.stop()
            async with asyncio.timeout(30):
                await keeping
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])


async def test_a_worker_that_says_nothing_is_replaced(engine: HeldEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "SILENT_S", 2.0)
    async with kept_slot(engine) as place, asyncio.timeout(30):
        assert place.pid is not None
        hung = psutil.Process(place.pid)
        hung.suspend()
        while not (place.restarts and place.serving):  # noqa: ASYNC110 - what a process says is no event here
            await asyncio.sleep(0.05)
        assert not hung.is_running()


async def test_a_worker_is_not_killed_because_its_supervisor_stood_still(
    engine: HeldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot, "SILENT_S", 2.0)
    async with kept_slot(engine) as place:
        pid = place.pid
        time.sleep(2 * slot.SILENT_S)  # noqa: ASYNC251 - nothing of this process runs, as if it were stopped
        async with asyncio.timeout(5):
            while not place.serving:  # noqa: ASYNC110 - what a process says is no event here
                await asyncio.sleep(0.05)
        await asyncio.sleep(slot.SILENT_S)
        assert (place.pid, place.restarts) == (pid, 0)
