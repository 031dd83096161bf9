"""`headrace gateway --workers`: real processes, killed, stopped and told to stop while streams run."""

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import msgspec
import psutil
import pytest
import pytest_asyncio

from gateway.upstream.triton.raw import SERVICE
from headrace.workers.channel import REPORT_EVERY_S
from router.spec.documents import file_documents
from router.spec.fleet import EndpointSpec, RouteSpec, TenantSpec
from router.spec.gateway import AuthSpec, GatewaySpec, JwtSpec
from router.state.store import DocumentStore, Mark
from tests.fault.worker_command import WORKERS, Command, clients_of, command, connects_forever, streams
from tests.harness import DONE, STREAM, HeldEngine, free_port, one_pool
from tests.issuer import AUDIENCE, LocalIssuer
from tests.valkey import ValkeyProcess, servers_here

STREAMS = 100


@pytest_asyncio.fixture(scope="module")
async def engine() -> AsyncIterator[HeldEngine]:
    async with HeldEngine() as engine:
        yield engine


@pytest_asyncio.fixture(scope="module")
async def running(engine: HeldEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Command]:
    """A gateway whose workers tests may kill."""
    async with command(tmp_path_factory.mktemp("workers"), one_pool(engine.endpoint(), max_in_flight="off")) as running:
        yield running


async def test_a_killed_worker_takes_only_its_own_streams_and_the_port_never_refuses(
    engine: HeldEngine, running: Command
) -> None:
    await running.until_ready()
    await asyncio.sleep(2 * REPORT_EVERY_S)
    at_first = await running.samples()
    connecting = asyncio.create_task(connects_forever(running.addresses.http))
    async with streams(running.url, STREAMS) as clients:
        killed, kept = running.workers
        lost = clients_of(killed, running.addresses.http)
        ours = [client for client in clients if client.port in lost]
        others = [client for client in clients if client.port not in lost]
        assert ours and others, "both workers have streams"
        await asyncio.sleep(2 * REPORT_EVERY_S)
        before = await running.samples()
        assert before["headrace_live_requests",] == STREAMS
        killed.kill()
        await asyncio.wait([client.ended for client in ours], timeout=5)
        assert not any(client.complete for client in ours)
        during = await running.samples()
        async with aiohttp.ClientSession() as session, session.get(f"{running.url}/v1/models") as response:
            assert response.status == 200
        await running.until_ready()
        assert {worker.pid for worker in running.workers} > {kept.pid}
        engine.let_go()
        await asyncio.wait([client.ended for client in others], timeout=5)
        assert all(client.complete for client in others)
    await asyncio.sleep(2 * REPORT_EVERY_S)
    after = await running.samples()
    assert not connecting.done(), "a connection was refused"
    connecting.cancel()
    for earlier, later in ((before, during), (during, after)):
        counted = {key for key in earlier if key[0].endswith(("_total", "_bucket", "_sum", "_count"))}
        assert counted
        assert not {key for key in counted if later.get(key, 0) < earlier[key]}
    attempts = [sum(v for key, v in one.items() if key[0] == "headrace_attempts_total") for one in (at_first, after)]
    assert attempts[1] - attempts[0] == STREAMS
    assert after["headrace_live_requests",] == 0
    assert after["headrace_endpoint_in_flight_requests", "endpoint=engine", "pool=p"] == 0
    assert after["headrace_worker_restarts_total",] - at_first["headrace_worker_restarts_total",] == 1
    log = running.log.read_text()
    assert f"(process {killed.pid}) was ended by SIGKILL; another one is started in" in log


async def test_requests_of_all_workers_are_listed_and_cancelled_over_the_one_admin_port(
    engine: HeldEngine, running: Command
) -> None:
    await running.until_ready()
    url = f"http://{running.addresses.admin}/admin/v1/requests"
    async with streams(running.url, STREAMS) as clients, aiohttp.ClientSession() as session:
        async with session.get(url, params={"limit": "1000"}) as response:
            listed = await response.json()
        rows = listed["requests"]
        assert (len(rows), listed["matching"], listed["problems"]) == (STREAMS, STREAMS, [])
        assert len({row["id"].partition("-")[0] for row in rows}) == WORKERS, "both have some"
        assert len({row["id"] for row in rows}) == STREAMS
        assert sorted((row["age_s"] for row in rows), reverse=True) == [row["age_s"] for row in rows]
        async with session.get(url, params={"limit": "3"}) as response:
            assert [len((await response.json())["requests"]), listed["matching"]] == [3, STREAMS]
        for row in (rows[0], next(row for row in rows if row["id"][:8] != rows[0]["id"][:8])):
            async with session.delete(f"{url}/{row['id']}") as response:
                assert response.status == 200
            async with session.delete(f"{url}/{row['id']}") as response:
                assert response.status == 404
        async with asyncio.timeout(10):
            while sum(client.ended.done() for client in clients) < 2:  # noqa: ASYNC110 - whichever two these are
                await asyncio.sleep(0.01)
        ended = [client for client in clients if client.ended.done()]
        assert [b'"code":"request_cancelled"' in client.received for client in ended] == [True, True]
        engine.let_go()
        await asyncio.wait([client.ended for client in clients], timeout=10)
        assert sum(client.complete for client in clients) == STREAMS - 2
    await asyncio.sleep(2 * REPORT_EVERY_S)
    assert (await running.samples())["headrace_live_requests",] == 0


async def test_who_cancels_is_not_told_that_a_request_has_ended_while_its_worker_says_nothing(
    engine: HeldEngine, running: Command
) -> None:
    await running.until_ready()
    url = f"http://{running.addresses.admin}/admin/v1/requests"
    async with streams(running.url, 2 * WORKERS) as clients, aiohttp.ClientSession() as session:
        async with session.get(url) as response:
            rows = (await response.json())["requests"]
        for worker in running.workers:
            worker.suspend()
        try:
            async with session.delete(f"{url}/{rows[0]['id']}") as response:
                assert (response.status, (await response.json())["error"]["code"]) == (503, "worker_silent")
        finally:
            for worker in running.workers:
                worker.resume()
        await asyncio.wait([client.ended for client in clients], timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert [b'"code":"request_cancelled"' in one.received for one in clients if one.ended.done()] == [True]
        engine.let_go()
        await asyncio.wait([client.ended for client in clients], timeout=10)
        assert sum(client.complete for client in clients) == len(clients) - 1


async def test_a_log_level_is_set_in_every_worker_and_in_those_that_come_later(
    engine: HeldEngine, running: Command
) -> None:
    async def who_tells_of_phases() -> set[str]:
        """The workers whose log tells that the engine goes and comes back."""
        before = len(running.log.read_text())
        engine.healthy = False
        await running.until(lambda state: state["status"] == "not_ready")
        await asyncio.sleep(2 * REPORT_EVERY_S)
        engine.healthy = True
        await running.until_ready()
        await asyncio.sleep(2 * REPORT_EVERY_S)
        lines = [line for line in running.log.read_text()[before:].splitlines() if " gateway.fleet: " in line]
        return {line.partition("[worker ")[2].partition("]")[0] for line in lines}

    await running.until_ready()
    url = f"http://{running.addresses.admin}/admin/v1/log-levels/gateway.fleet"
    async with aiohttp.ClientSession() as session:
        async with session.put(url, json={"level": "error"}) as response:
            assert response.status == 200
        running.workers[0].kill()
        await running.until(lambda state: state["detail"]["workers"]["serving"] < WORKERS)
        await running.until_ready()
        assert await who_tells_of_phases() == set()
        async with session.delete(url) as response:
            assert response.status == 200
    assert len(await who_tells_of_phases()) == WORKERS


async def test_only_grpc_connections_of_the_killed_worker_break(running: Command) -> None:
    await running.until_ready()
    alone = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(running.addresses.grpc, options=alone) for _ in range(16)]
    try:
        live = [one.unary_unary(f"/{SERVICE}/ServerLive") for one in channels]
        assert await asyncio.gather(*(call(b"", timeout=10) for call in live)) == [b"\x08\x01"] * len(live)
        killed, kept = running.workers
        lost, spared = (clients_of(worker, running.addresses.grpc) for worker in (killed, kept))
        assert lost and spared and len(lost | spared) == len(channels)
        killed.kill()
        answers = await asyncio.gather(*(call(b"", timeout=10) for call in live), return_exceptions=True)
        assert sum(answer != b"\x08\x01" for answer in answers) <= len(lost)
        again = [call(b"", timeout=10, wait_for_ready=True) for call in live]
        assert await asyncio.gather(*again) == [b"\x08\x01"] * len(live)
        assert clients_of(kept, running.addresses.grpc) >= spared
    finally:
        await asyncio.gather(*(one.close() for one in channels))


async def test_a_worker_that_hangs_holds_up_no_scrape_and_shows_in_readiness(running: Command) -> None:
    await running.until_ready()
    hung = running.workers[0]
    hung.suspend()
    try:
        async with asyncio.timeout(10):  # it hangs until it is resumed
            assert (await running.samples())["headrace_workers",] == WORKERS
        await running.until_ready(WORKERS - 1)
        assert (await running.readiness())["degraded"] == ["workers: 1 of 2 serve; the log says why."]
        async with aiohttp.ClientSession() as session, session.get(f"{running.url}/v1/models") as response:
            assert response.status == 200
    finally:
        hung.resume()
    await running.until_ready()


async def test_a_supervisor_that_is_killed_leaves_no_process_and_no_stream_that_looks_whole(
    engine: HeldEngine, tmp_path: Path
) -> None:
    async with command(tmp_path, one_pool(engine.endpoint())) as running:
        await running.until_ready()
        async with streams(running.url, 8) as clients:
            workers = running.workers
            running.process.kill()
            await running.process.wait()
            _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 10)
            assert not alive
            await asyncio.wait([client.ended for client in clients], timeout=5)
            assert all(b'"code":"gateway_stopping"' in client.received for client in clients)
            assert not any(DONE in client.received for client in clients)


async def test_told_to_stop_it_refuses_connections_and_lets_streams_finish_until_told_again(
    engine: HeldEngine, tmp_path: Path
) -> None:
    async with command(tmp_path, one_pool(engine.endpoint())) as running:
        await running.until_ready()
        engine.held.clear()
        async with streams(running.url, 8) as clients:
            workers = running.workers
            running.process.send_signal(signal.SIGTERM)
            await running.until(lambda state: state["status"] == "not_ready")
            assert (await running.readiness())["reasons"][0].startswith("The gateway is draining")
            with pytest.raises(OSError):
                await asyncio.wait_for(connects_forever(running.addresses.http), 5)
            assert not any(client.ended.done() for client in clients)
            engine.let_go(5)
            async with asyncio.timeout(5):
                while sum(client.complete for client in clients) < 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert running.process.returncode is None
            running.process.send_signal(signal.SIGTERM)
            assert await running.ends() == 0
            await asyncio.wait([client.ended for client in clients], timeout=5)
            cut = [client for client in clients if not client.complete]
            assert len(cut) == 3
            assert all(b'"code":"gateway_stopping"' in client.received for client in cut)
            assert not psutil.wait_procs(workers, 0)[1]


async def test_workers_that_cannot_listen_end_the_command_with_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as other:  # binds like the supervisor, and listens before its workers do
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        http = f"127.0.0.1:{other.getsockname()[1]}"
        addresses = GatewaySpec(http=http, admin=f"127.0.0.1:{free_port()}")
        spec = one_pool(EndpointSpec(id="e", http="http://127.0.0.1:1"))
        async with command(tmp_path, spec, addresses) as running:
            await running.until(lambda state: state["status"] == "not_ready")
            other.listen()
            assert await running.ends() == 1
            assert running.log.read_text().splitlines()[-1] == (
                f"Cannot listen on {http} (gateway.http): it is in use by another program. "
                "Choose another address in the fleet file or with HEADRACE_HTTP."
            )
            assert "Traceback" not in running.log.read_text()


async def test_the_shared_state_reaches_every_worker_and_a_replaced_one_publishes_no_file(
    engine: HeldEngine, tmp_path: Path
) -> None:
    async with ValkeyProcess(servers_here()[0], tmp_path) as valkey:
        spec = one_pool(engine.endpoint(), redis=valkey.url)
        newer = msgspec.structs.replace(spec, routes={**spec.routes, "new": RouteSpec(pool="p")})
        async with command(tmp_path, spec) as running:
            await running.until_ready()
            store = DocumentStore(valkey.url, spec.fleet)
            mark = Mark(time.time_ns() // 1_000_000, "newer")
            assert (await running.samples())["headrace_file_differs",] == 0
            await store.replace_source("file", file_documents(newer, content_hash="newer"), mark)
            await running.until(lambda state: bool(state["detail"]["file_differs"]))
            assert (await running.samples())["headrace_file_differs",] == 1
            running.workers[0].kill()
            await running.until_ready(WORKERS - 1)
            await running.until_ready()
            assert ("routes", "file", "new") in (await store.load()).documents
            await store.close()

            async with aiohttp.ClientSession() as session:
                drain = f"http://{running.addresses.admin}/admin/v1/endpoints/engine/drain"
                async with session.post(drain) as response:
                    assert response.status == 200
            async with asyncio.timeout(5):
                while '"drain":"drained"' not in await running.get("/admin/v1/endpoints"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            for _ in range(8):  # a new connection each, so that both workers are asked
                async with aiohttp.ClientSession() as session:
                    async with session.post(f"{running.url}/v1/chat/completions", json=STREAM) as response:
                        assert response.status == 503


async def test_what_is_wrong_with_an_issuer_shows_whichever_worker_finds_it(engine: HeldEngine, tmp_path: Path) -> None:
    issuer = LocalIssuer()
    issuer.port = free_port()
    auth = AuthSpec(jwt=[JwtSpec(issuer=issuer.url, audience=AUDIENCE)])
    spec = msgspec.structs.replace(one_pool(engine.endpoint()), tenants={"search": TenantSpec()})
    async with command(tmp_path, spec, auth=auth) as running:
        await running.until(lambda state: [said[:4] for said in state["degraded"]] == ["jwt:"])
        async with issuer:
            await running.until(lambda state: state["degraded"] == [])
            headers = {"authorization": f"Bearer {issuer.token()}"}
            for _ in range(8):  # new connections, of both workers
                async with aiohttp.ClientSession() as client:
                    async with client.get(f"{running.url}/v1/models", headers=headers) as response:
                        assert response.status == 200
