"""`headrace gateway` that reads its fleet file again while streams run: a new generation of workers takes the place of
the old one, and a single process takes over what it can.

STREAMS=1000 in the environment runs the change of generations under that many streams.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import yaml
from typer.testing import CliRunner

from gateway.grpc import stream
from headrace.cli.main import app
from router.spec.fleet import FleetSpec, ProbeSpec, RouteSpec
from router.spec.gateway import DrainSpec, GatewaySpec
from tests.fault.generation_clients import ALL_OF_IT, SHORT, Engine, Traffic, calls
from tests.fault.held_triton import HeldTriton
from tests.fault.worker_command import WORKERS, Command, command, streams
from tests.harness import free_port, one_pool, running_gateway

STREAMS = int(os.environ.get("STREAMS", "100"))
GENERATIONS = 5
MOST_FAILED = 0.01
PATIENT_PROBES = ProbeSpec(interval="250ms", timeout="20s")


def both_apis(engine: Engine, triton: HeldTriton) -> FleetSpec:
    """The route `m` to the one, and routes of the bench's models to the other. What a starved machine would change is
    off: signs of life in silent streams, and probes that give an engine up for being slow."""
    spec = one_pool(engine.endpoint(), probe=PATIENT_PROBES, ping="off", max_in_flight="off")
    pools = triton.pools(probe=PATIENT_PROBES, max_in_flight="off")
    routes = {route: RouteSpec(pool=route) for route in pools}
    return msgspec.structs.replace(spec, pools={**spec.pools, **pools}, routes={**spec.routes, **routes})


def addresses(settle: str) -> GatewaySpec:
    http, admin, grpc_ = (f"127.0.0.1:{free_port()}" for _ in range(3))
    return GatewaySpec(http=http, admin=admin, grpc=grpc_, drain=DrainSpec(settle=settle))


def workers_are(serving: int, draining: int) -> Callable[[Any], bool]:
    expected = {"configured": WORKERS, "serving": serving, "draining": draining}
    return lambda state: state["status"] == "ready" and state["detail"]["workers"] == expected


def rewrite(running: Command, change: Callable[[dict[str, Any]], None]) -> None:
    file = running.log.with_name("fleet.yaml")
    content = yaml.safe_load(file.read_text())
    change(content)
    file.write_text(yaml.safe_dump(content))


async def reload(running: Command) -> tuple[int, Any]:
    url = f"http://{running.addresses.admin}/admin/v1/reload"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        return response.status, await response.json()


async def until_logged(running: Command, text: str) -> None:
    async with asyncio.timeout(20):
        while text not in running.log.read_text():  # noqa: ASYNC110 - a file is no event
            await asyncio.sleep(0.05)


async def routes_of(running: Command) -> set[str]:
    async with aiohttp.ClientSession() as session, session.get(f"{running.url}/v1/models") as response:
        return {model["id"] for model in (await response.json())["data"]}


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine() as engine:
        yield engine


async def test_generations_change_under_streams_and_none_is_lost(engine: Engine, tmp_path: Path) -> None:
    async with HeldTriton() as triton, command(tmp_path, both_apis(engine, triton), addresses("1s")) as running:
        running.patience_s += STREAMS / 20
        await running.until(workers_are(WORKERS, 0))
        traffic = Traffic(running)
        async with traffic.flowing():
            for _ in range(GENERATIONS):
                old = {worker.pid for worker in running.workers}
                async with (
                    streams(running.url, STREAMS // 2) as http,
                    calls(running.addresses.grpc, STREAMS // 2) as rpcs,
                ):
                    running.process.send_signal(signal.SIGHUP)
                    await running.until(workers_are(WORKERS, WORKERS))
                    assert {worker.pid for worker in running.workers} > old
                    await asyncio.sleep(2)  # the old ones serve on for a second, then take nothing new
                    ends = [*(stream.ended for stream in http), *(call.ended for call in rpcs)]
                    assert not any(end.done() for end in ends)
                    engine.let_go()
                    triton.let_go()
                    await asyncio.wait(ends, timeout=30 + STREAMS / 10)
                    assert all(one.complete for one in http)
                    assert {(one.messages, one.code, one.details) for one in rpcs} == {(*ALL_OF_IT, "")}
                await running.until(workers_are(WORKERS, 0))
                assert not old & {worker.pid for worker in running.workers}
        print(f"{GENERATIONS * STREAMS} streams were held. HTTP: {dict(traffic.http)}; gRPC: {dict(traffic.grpc)}")
        assert set(traffic.http) == {"whole"}
        failed = traffic.grpc.total() - traffic.grpc["whole"]
        assert failed <= MOST_FAILED * traffic.grpc.total()
        assert (await running.samples())["headrace_worker_restarts_total",] == 0
        running.process.send_signal(signal.SIGTERM)
        assert await running.ends() == 0
        assert "Traceback" not in running.log.read_text()


async def test_while_a_gateway_drains_a_status_follows_when_the_last_message_has_been_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LAST_STATUS_S", 3600.0)
    async with HeldTriton() as triton:
        spec = msgspec.structs.replace(both_apis(engine, triton), gateway=GatewaySpec(grpc=":8001"))
        async with running_gateway(spec) as running:
            async with calls(running.grpc_address, 1) as (call,):
                triton.let_go()
                await asyncio.wait_for(call.ended, 10)
                assert call.complete
            async with calls(running.grpc_address, 1) as (call,):
                running.gateway.begin_drain()
                triton.let_go()
                await running.until(lambda: call.messages == ALL_OF_IT[0], "it has all messages")
                await running.until_idle()
                await asyncio.sleep(0.1)
                assert not call.ended.done()


async def test_new_workers_serve_what_the_file_says_now(engine: Engine, tmp_path: Path) -> None:
    async with command(tmp_path, one_pool(engine.endpoint()), addresses("0s")) as running:
        await running.until(workers_are(WORKERS, 0))

        def change(file: dict[str, Any]) -> None:
            file["routes"]["new"] = {"pool": "p"}
            file["gateway"].update(expose_routing=False, admin=f"127.0.0.1:{free_port()}")

        rewrite(running, change)
        assert await reload(running) == (200, {"needs_restart": ["gateway.admin"]})
        await running.until(workers_are(WORKERS, 0))
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{running.url}/v1/chat/completions", json={**SHORT, "model": "new"}) as response:
                assert response.status == 200
                assert not [name for name in response.headers if name.lower().startswith("x-headrace")]
        await until_logged(running, "gateway.admin: what the file says now is in force only after a restart")
        running.workers[0].kill()  # the one that takes its place serves the same
        await running.until(workers_are(WORKERS - 1, 0))
        await running.until(workers_are(WORKERS, 0))
        for _ in range(8):
            assert await routes_of(running) == {"m", "new"}


@pytest.mark.parametrize("workers", [1, WORKERS])
async def test_a_file_with_mistakes_changes_nothing_and_the_log_names_them(
    engine: Engine, tmp_path: Path, workers: int
) -> None:
    async with command(tmp_path, one_pool(engine.endpoint()), addresses("0s"), workers) as running:
        await running.until(lambda state: state["status"] == "ready")
        before = {worker.pid for worker in running.workers}
        rewrite(running, lambda file: file["pools"]["p"].pop("model"))
        running.process.send_signal(signal.SIGHUP)
        await until_logged(
            running, "not reloaded: The fleet file is refused, and what was read before stays in force: "
        )
        status, answer = await reload(running)
        assert (status, answer["error"]["code"]) == (409, "not_reloaded")
        assert f"{running.log.with_name('fleet.yaml')}:" in answer["error"]["message"]
        assert {worker.pid for worker in running.workers} == before
        assert await routes_of(running) == {"m"}

        def change(file: dict[str, Any]) -> None:
            file["fleet"] = "other"
            file["pools"]["p"]["model"] = "engine-model"

        rewrite(running, change)
        status, answer = await reload(running)
        assert status == 409 and "the fleet other" in answer["error"]["message"]


async def test_a_generation_that_does_not_come_to_serve_leaves_the_old_one_as_it_is(
    engine: Engine, tmp_path: Path
) -> None:
    async with command(tmp_path, one_pool(engine.endpoint()), addresses("0s")) as running:
        await running.until(workers_are(WORKERS, 0))
        old = {*running.workers}
        async with streams(running.url, 8) as clients:
            reloading = asyncio.create_task(reload(running))
            async with asyncio.timeout(20):
                while not (new := {*running.workers} - old):  # noqa: ASYNC110 - processes are no events here
                    await asyncio.sleep(0.005)
            killed = new.pop()
            killed.kill()
            status, answer = await reloading
            assert status == 409
            assert f"(process {killed.pid}) was ended by SIGKILL before it served" in answer["error"]["message"]
            await running.until(workers_are(WORKERS, 0))
            assert {*running.workers} >= old
            engine.let_go()
            await asyncio.wait([client.ended for client in clients], timeout=5)
            assert all(client.complete for client in clients)
        async with asyncio.timeout(10):
            while {*running.workers} != old:  # noqa: ASYNC110 - processes are no events here
                await asyncio.sleep(0.02)
        assert (await reload(running))[0] == 200


async def test_told_to_stop_during_a_change_it_stops_both_generations(engine: Engine, tmp_path: Path) -> None:
    async with command(tmp_path, one_pool(engine.endpoint()), addresses("0s")) as running:
        await running.until(workers_are(WORKERS, 0))
        async with streams(running.url, 8) as clients:
            running.process.send_signal(signal.SIGHUP)
            await running.until(lambda state: state["detail"]["workers"]["draining"] > 0)
            known = {*running.workers}
            running.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(20):
                while {*running.workers} <= known:  # noqa: ASYNC110 - processes are no events here
                    await asyncio.sleep(0.02)
            running.process.send_signal(signal.SIGTERM)
            await running.until(lambda state: state["status"] == "not_ready")
            assert not any(client.ended.done() for client in clients)
            engine.let_go()
            await asyncio.wait([client.ended for client in clients], timeout=5)
            assert all(client.complete for client in clients)
        assert await running.ends() == 0
        log = running.log.read_text()
        assert "not reloaded: The gateway has been told to stop" in log
        assert "Traceback" not in log and "never retrieved" not in log


async def test_a_single_process_takes_over_documents_and_names_what_needs_a_restart(
    engine: Engine, tmp_path: Path
) -> None:
    async with command(tmp_path, one_pool(engine.endpoint()), addresses("0s"), workers=1) as running:
        await running.until(lambda state: state["status"] == "ready")
        async with streams(running.url, 2) as clients:

            def change(file: dict[str, Any]) -> None:
                file["routes"]["new"] = {"pool": "p"}
                file["gateway"].update(expose_routing=False, body_limit="1MiB")

            rewrite(running, change)
            environment = {"HEADRACE_ADMIN": f"http://{running.addresses.admin}"}
            result = await asyncio.to_thread(CliRunner().invoke, app, ["reload"], env=environment)
            assert result.exit_code == 0
            assert result.stdout == "The fleet file was read again and is in force.\n"
            assert [line.partition(":")[0] for line in result.stderr.splitlines()] == [
                "gateway.body_limit",
                "gateway.expose_routing",
            ]
            assert await routes_of(running) == {"m", "new"}
            rewrite(running, lambda file: file["routes"].pop("new"))
            running.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(10):
                while await routes_of(running) != {"m"}:  # noqa: ASYNC110 - an API is no event
                    await asyncio.sleep(0.05)
            engine.let_go()
            await asyncio.wait([client.ended for client in clients], timeout=5)
            assert all(client.complete for client in clients)
