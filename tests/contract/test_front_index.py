"""The repository index, which both fronts give."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest_asyncio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, RouteSpec
from router.spec.gateway import GatewaySpec
from tests.contract.http_front import ask
from tests.contract.triton_models_server import triton_models
from tests.harness import FAST_PROBES, RunningGateway, running_gateway

NOBODY = "127.0.0.1:1"
"""Where nothing listens."""


def pool(*endpoints: EndpointSpec, protocol: Any = "triton") -> PoolSpec:
    return PoolSpec(protocol=protocol, model="ensemble", endpoints=list(endpoints), probe=FAST_PROBES)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running() -> AsyncIterator[RunningGateway]:
    """A gateway whose routes, named after their pools, are of every kind."""
    async with triton_models("ensemble") as triton:
        pools = {
            "serves": pool(EndpointSpec(id="up", grpc=triton.grpc, http=triton.http)),
            "down": pool(EndpointSpec(id="gone", grpc=NOBODY, http=f"http://{NOBODY}")),
            "empty": pool(),
            "no-http": pool(EndpointSpec(id="half", grpc=triton.grpc)),
            "no-triton": pool(EndpointSpec(id="other", http=f"http://{NOBODY}"), protocol="openai"),
        }
        routes = {name: RouteSpec(pool=name) for name in pools}
        spec = FleetSpec(fleet="test", pools=pools, routes=routes, gateway=GatewaySpec(grpc=":8001"))
        async with running_gateway(spec, wait_ready=False) as running:
            for id_ in ("up", "half"):
                await running.until_phase(id_, "ready", 10)
            yield running


async def over_http(running: RunningGateway, *, ready: bool) -> list[tuple[str, str, str, str]]:
    body = json.dumps({"ready": ready}).encode()
    status, _, said = await ask(running.url, "/v2/repository/index", data=body)
    assert status == 200
    return [(model["name"], model["version"], model["state"], model.get("reason", "")) for model in json.loads(said)]


async def over_grpc(running: RunningGateway, *, ready: bool) -> list[tuple[str, str, str, str]]:
    async with grpc.aio.insecure_channel(running.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        said = await stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=ready), timeout=10)
    return [(model.name, model.version, model.state, model.reason) for model in said.models]


SERVES = ("serves", "1", "READY", "")
UNAVAILABLE = [
    ("down", "1", "UNAVAILABLE", "gone starting"),
    ("empty", "1", "UNAVAILABLE", "it has no endpoint"),
]


async def test_both_fronts_list_the_same_routes_with_the_same_reasons(running: RunningGateway) -> None:
    http, grpc = await over_http(running, ready=False), await over_grpc(running, ready=False)
    assert [model[0] for model in http] == [model[0] for model in grpc] == ["down", "empty", "no-http", "serves"]
    assert [model for model in http if model[0] != "no-http"] == [*UNAVAILABLE, SERVES]
    assert [model for model in grpc if model[0] != "no-http"] == [*UNAVAILABLE, SERVES]


async def test_a_route_is_ready_in_the_front_whose_requests_it_can_serve(running: RunningGateway) -> None:
    assert ("no-http", "1", "UNAVAILABLE", "half has no http address") in await over_http(running, ready=False)
    assert await over_http(running, ready=True) == [SERVES]
    assert await over_grpc(running, ready=True) == [("no-http", "1", "READY", ""), SERVES]
