"""What Triton does not tell of its health, found out through a running gateway: a model's process killed under its
streams, a model unloaded, a server that shuts down, a full queue."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from router.spec.documents import file_documents
from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, ProbeSpec, RouteSpec, TimeoutSpec, Transport
from router.spec.gateway import GatewaySpec, RetrySpec
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.fleet import metric
from tests.harness import RunningGateway, running_gateway

STREAMS = 20
BOTH_TRANSPORTS = pytest.mark.parametrize(("model", "transport"), [("ensemble", "grpc"), ("llmapi", "http")])
IDLE_S = 6


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[TritonModels]:
    """The one that gets into trouble. It gives its streams time to finish when it is told to end."""
    async with triton_models("ensemble", "ensemble_whole", "llmapi", options=("--exit-timeout-secs=20",)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def other() -> AsyncIterator[TritonModels]:
    """One that does not."""
    async with triton_models("ensemble", "ensemble_whole", "llmapi") as running:
        yield running


def fleet(
    model: str, *servers: TritonModels, probe: ProbeSpec | None = None, transport: Transport = "grpc"
) -> FleetSpec:
    """One pool behind the route `m`, an endpoint for each server: `e0`, `e1`. Probes as by default; with transport
    `http`, endpoints have no gRPC address. Every request may be retried."""
    endpoints = [
        EndpointSpec(id=f"e{index}", grpc=server.grpc)
        if transport == "grpc"
        else EndpointSpec(id=f"e{index}", http=server.http)
        for index, server in enumerate(servers)
    ]
    pool = PoolSpec(
        protocol="triton",
        model=model,
        transport=transport,
        endpoints=endpoints,
        timeouts=TimeoutSpec(idle=f"{IDLE_S}s"),
        probe=probe or ProbeSpec(),
    )
    gateway = GatewaySpec(retry=RetrySpec(budget="off"))
    return FleetSpec(fleet="test", pools={"p": pool}, routes={"m": RouteSpec(pool="p")}, gateway=gateway)


@dataclass
class Seen:
    """What one client saw of its answer, and when it ended."""

    status: int = 0
    endpoint: str = ""
    body: bytes = b""
    retry_after: str | None = None
    ended: float = 0.0

    @property
    def finished(self) -> bool:
        return self.status == 200 and self.body.endswith(b"data: [DONE]\n\n")

    @property
    def broke_off(self) -> bool:
        """The last event is an error, and nothing says that the answer was complete."""
        last = self.body.rstrip().rpartition(b"\n\n")[2]
        return last.startswith(b'data: {"error":') and b"[DONE]" not in self.body


async def ask(
    client: aiohttp.ClientSession, running: RunningGateway, seen: Seen, script: dict[str, Any], *, stream: bool = True
) -> None:
    body = {"model": "m", "prompt": json.dumps(script), "max_tokens": 10_000, "stream": stream}
    async with client.post(f"{running.url}/v1/completions", json=body) as response:
        seen.status, seen.endpoint = response.status, response.headers["x-headrace-endpoint"]
        seen.retry_after = response.headers.get("retry-after")
        async for piece in response.content.iter_any():
            seen.body += piece
    seen.ended = time.monotonic()


@contextlib.asynccontextmanager
async def streams(
    client: aiohttp.ClientSession, running: RunningGateway, count: int, script: dict[str, Any]
) -> AsyncIterator[list[Seen]]:
    """That many streams that have all begun. On leaving, all have ended."""
    seen = [Seen() for _ in range(count)]
    tasks = [
        asyncio.create_task(ask(client, running, each, {**script, "number": number}))
        for number, each in enumerate(seen)
    ]
    try:
        await running.until(lambda: all(each.body for each in seen), "every stream has begun", 20)
        yield seen
        async with asyncio.timeout(IDLE_S + 10):
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def answered(client: aiohttp.ClientSession, running: RunningGateway, count: int, mark: str) -> list[Seen]:
    """Short answers to that many different conversations."""
    seen = [Seen() for _ in range(count)]
    scripts = [{"text": "ok", "mark": f"{mark} {number}"} for number in range(count)]
    await asyncio.gather(*(ask(client, running, each, script) for each, script in zip(seen, scripts, strict=True)))
    return seen


@contextlib.asynccontextmanager
async def repository(server: TritonModels) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


SLOW = {"text": "x" * 20, "cut": 1, "delay": 0.4, "deaf": True}
"""8 s of an answer."""


@pytest.mark.parametrize(("model", "transport"), [("ensemble", "grpc"), ("llmapi", "grpc"), ("llmapi", "http")])
async def test_streams_of_a_killed_model_end_in_errors_and_new_work_goes_elsewhere(
    server: TritonModels, other: TritonModels, client: aiohttp.ClientSession, model: str, transport: Transport
) -> None:
    async with running_gateway(fleet(model, server, transport=transport)) as running:
        async with streams(client, running, STREAMS, SLOW) as seen:
            running.apply(file_documents(fleet(model, server, other, transport=transport), content_hash="other"))
            await running.until_phase("e1", "ready")
            killed = time.monotonic()
            server.kill_model(model)
            await running.until_phase("e0", "unhealthy", IDLE_S)
            avoided = time.monotonic()
            after = await answered(client, running, 12, "after")
            assert {(each.endpoint, each.finished) for each in after} == {("e1", True)}
        assert [each.broke_off for each in seen] == [True] * STREAMS
        assert max(each.ended for each in seen) - killed < IDLE_S
        assert avoided - min(each.ended for each in seen) < 1
        await server.reload(model)
        await running.until_phase("e0", "ready", 5)
        back = await answered(client, running, 12, "back")
        assert all(each.finished for each in back)
        assert "e0" in {each.endpoint for each in back}


async def test_a_request_told_of_the_death_goes_elsewhere_and_ends_what_hangs_and_nothing_else(
    server: TritonModels, other: TritonModels, client: aiohttp.ClientSession
) -> None:
    async with running_gateway(fleet("ensemble", server, other, probe=ProbeSpec(interval="60s"))) as running:
        async with streams(client, running, STREAMS, SLOW) as seen:
            server.kill_model("ensemble")
            first = await answered(client, running, 12, "first")
            assert {(each.endpoint, each.finished) for each in first} == {("e1", True)}
            assert running.gateway.fleet.endpoints["e0"].phase == "unhealthy"
            hit = [each for each in seen if each.endpoint == "e0"]
            assert 0 < len(hit) < STREAMS
            await running.until(lambda: all(each.ended for each in hit), "what hangs has ended", IDLE_S)
            assert all(each.broke_off for each in hit)
        assert all(each.finished for each in seen if each not in hit)
    await server.reload("ensemble")


@BOTH_TRANSPORTS
async def test_an_unloaded_model_is_avoided_until_it_is_loaded_again(
    server: TritonModels, other: TritonModels, client: aiohttp.ClientSession, model: str, transport: Transport
) -> None:
    async with running_gateway(fleet(model, server, other, transport=transport)) as running, repository(server) as stub:
        async with streams(client, running, 8, {**SLOW, "delay": 0.1}) as seen:
            await stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name=model))
            unloaded = await answered(client, running, 12, "unloaded")
            assert {(each.endpoint, each.finished) for each in unloaded} == {("e1", True)}
            assert running.gateway.fleet.endpoints["e0"].phase == "unhealthy"
        assert {each.endpoint for each in seen} == {"e0", "e1"}
        assert all(each.finished for each in seen)
        await stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name=model))
        await running.until_phase("e0", "ready")
        loaded = await answered(client, running, 12, "loaded")
        assert "e0" in {each.endpoint for each in loaded}
        assert all(each.finished for each in loaded)


async def test_a_full_queue_goes_elsewhere_or_to_the_client_and_never_against_the_endpoint(
    server: TritonModels, other: TritonModels, client: aiohttp.ClientSession
) -> None:
    """The model works on one request and queues one."""
    script = {"text": "ok", "first_delay": 2.0}
    async with running_gateway(fleet("ensemble_whole", server)) as running:
        alone = [Seen() for _ in range(8)]
        asked = [asyncio.create_task(ask(client, running, each, script, stream=False)) for each in alone]
        await running.until(lambda: sum(each.status == 429 for each in alone) >= 6, "the queue is full")
        assert {each.retry_after for each in alone if each.status == 429} == {"1"}
        assert running.gateway.fleet.endpoints["e0"].phase == "ready"
        assert running.gateway.fleet.endpoints["e0"].state.failed_probes == 0
        running.apply(file_documents(fleet("ensemble_whole", server, other), content_hash="other"))
        await running.until_phase("e1", "ready")
        refused = metric(running, "headrace_upstream_failures_total", {"endpoint": "e0", "failure": "busy"})
        later = [Seen() for _ in range(4)]
        for number, each in enumerate(later):
            await ask(client, running, each, {"text": "ok", "number": number}, stream=False)
        assert metric(running, "headrace_upstream_failures_total", {"endpoint": "e0", "failure": "busy"}) > refused >= 6
        assert {each.status for each in later} == {200}
        await asyncio.gather(*asked)
        assert {each.status for each in alone} == {200, 429}
        assert running.gateway.fleet.endpoints["e0"].phase == "ready"


@BOTH_TRANSPORTS
async def test_a_server_that_shuts_down_is_avoided_at_once_and_finishes_its_streams(
    server: TritonModels, other: TritonModels, client: aiohttp.ClientSession, model: str, transport: Transport
) -> None:
    async with running_gateway(fleet(model, server, other, transport=transport)) as running:
        async with streams(client, running, STREAMS, {**SLOW, "delay": 0.1}) as seen:
            os.kill(server.pid, signal.SIGTERM)
            async with asyncio.timeout(8):
                where = {"e0", "e1"}
                while where != {"e1"}:  # what reaches the server before it begins to stop is answered there
                    after = await answered(client, running, 12, "after")
                    assert all(each.finished for each in after)
                    where = {each.endpoint for each in after}
            await running.until_phase("e0", "unhealthy", 8)
        assert {each.endpoint for each in seen} == {"e0", "e1"}
        assert all(each.finished for each in seen)
        await server.kill()
        await server.start()
        await running.until_phase("e0", "ready")
        back = await answered(client, running, 12, "back")
        assert "e0" in {each.endpoint for each in back}
        assert all(each.finished for each in back)
