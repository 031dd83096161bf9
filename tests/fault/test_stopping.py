"""`headrace gateway` as a process that is told to stop while streams run, of one process and of several."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from gateway.limits import Limiter
from gateway.upstream.triton.raw import SERVICE
from router.spec.gateway import DrainSpec, GatewaySpec
from tests.fault.worker_command import Command, command, connects_forever, streams
from tests.harness import DONE, HeldEngine, free_port, one_pool, running_gateway

PROCESSES = pytest.mark.parametrize("workers", [1, 2])
LONG = "60s"
"""Longer than any test waits."""


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[HeldEngine]:
    async with HeldEngine() as engine:
        yield engine


def addresses(settle: str, grace: str = LONG) -> GatewaySpec:
    http, admin, grpc_ = (f"127.0.0.1:{free_port()}" for _ in range(3))
    return GatewaySpec(http=http, admin=admin, grpc=grpc_, drain=DrainSpec(settle=settle, grace=grace))


def all_serve(state: Any) -> bool:
    workers = state["detail"].get("workers")
    return state["status"] == "ready" and (workers is None or workers["serving"] == workers["configured"])


async def told_to_stop(running: Command, number: signal.Signals = signal.SIGTERM) -> None:
    running.process.send_signal(number)
    await running.until(lambda state: state["status"] == "not_ready")


@PROCESSES
async def test_readiness_fails_first_and_whoever_has_not_noticed_is_served(
    engine: HeldEngine, tmp_path: Path, workers: int
) -> None:
    async with command(tmp_path, one_pool(engine.endpoint()), addresses("3s"), workers) as running:
        await running.until(all_serve)
        async with streams(running.url, 4) as before:
            await told_to_stop(running)
            async with streams(running.url, 4) as after:
                async with aiohttp.ClientSession() as session, session.get(f"{running.url}/v1/models") as response:
                    assert (response.status, response.headers.get("connection")) == (200, "close")
                async with grpc.aio.insecure_channel(running.addresses.grpc) as channel:
                    ask = {"ServerLive": SERVICE, "Check": "grpc.health.v1.Health"}
                    calls = [channel.unary_unary(f"/{service}/{method}") for method, service in ask.items()]
                    assert await asyncio.gather(*(call(b"", timeout=5) for call in calls)) == [b"\x08\x01", b"\x08\x02"]
                with pytest.raises(OSError):
                    await asyncio.wait_for(connects_forever(running.addresses.http), 10)
                assert running.process.returncode is None
                assert not any(client.ended.done() for client in (*before, *after))
                engine.let_go()
                await asyncio.wait([client.ended for client in (*before, *after)], timeout=5)
                assert all(client.complete for client in (*before, *after))
        assert await running.ends() == 0
        last = running.log.read_text().splitlines()[-1]
        assert "stopped in " in last and last.endswith("0 streams were cut")


@PROCESSES
async def test_a_second_signal_waits_neither_for_being_noticed_nor_for_streams(
    engine: HeldEngine, tmp_path: Path, workers: int
) -> None:
    async with command(tmp_path, one_pool(engine.endpoint()), addresses(LONG), workers) as running:
        await running.until(all_serve)
        async with streams(running.url, 3) as clients:
            await told_to_stop(running)
            running.process.send_signal(signal.SIGTERM)
            assert await running.ends() == 0
            await asyncio.wait([client.ended for client in clients], timeout=5)
            assert all(b'"code":"gateway_stopping"' in client.received for client in clients)
        assert running.log.read_text().splitlines()[-1].endswith("3 streams were cut")


@PROCESSES
async def test_ctrl_c_does_not_wait_for_being_noticed(engine: HeldEngine, tmp_path: Path, workers: int) -> None:
    async with command(tmp_path, one_pool(engine.endpoint()), addresses(LONG), workers) as running:
        await running.until(all_serve)
        running.process.send_signal(signal.SIGINT)
        assert await running.ends() == 0


@PROCESSES
async def test_streams_that_outlast_the_grace_end_with_an_error(
    engine: HeldEngine, tmp_path: Path, workers: int
) -> None:
    async with command(tmp_path, one_pool(engine.endpoint()), addresses("0s", "500ms"), workers) as running:
        await running.until(all_serve)
        async with streams(running.url, 3) as clients:
            running.process.send_signal(signal.SIGTERM)
            assert await running.ends() == 0
            await asyncio.wait([client.ended for client in clients], timeout=5)
            assert all(b'"code":"gateway_stopping"' in client.received for client in clients)
            assert not any(DONE in client.received for client in clients)
        assert running.log.read_text().splitlines()[-1].endswith("3 streams were cut")


async def test_what_swallows_that_it_is_to_end_does_not_keep_a_gateway(
    engine: HeldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some libraries do now and then, when a deadline of theirs passes in the same moment."""
    ended = []

    async def stubborn(_: Limiter) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(Limiter, "run", stubborn)
    async with asyncio.timeout(30):
        async with running_gateway(one_pool(engine.endpoint())):
            pass
    assert ended
