"""Triton's HTTP API through the gateway, to a real Triton: a tritonclient must not notice the gateway."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest_asyncio

from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, RouteSpec
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.harness import FAST_PROBES, RunningGateway, running_gateway

MODELS = ("ensemble", "ensemble_whole", "typed_identity")


@dataclass(frozen=True)
class Front:
    """A gateway whose routes have their models' names, and the Triton behind it."""

    running: RunningGateway
    triton: TritonModels


def fleet_of(triton: TritonModels, *, http: bool = True) -> FleetSpec:
    """A fleet with one pool and one route for each of `MODELS`, and a route with another name than its model."""
    pools = {
        model: PoolSpec(
            protocol="triton",
            model=model,
            endpoints=[EndpointSpec(id=model, grpc=triton.grpc, http=triton.http if http else None)],
            probe=FAST_PROBES,
        )
        for model in MODELS
    }
    routes = {model: RouteSpec(pool=model) for model in MODELS} | {"renamed": RouteSpec(pool="ensemble")}
    return FleetSpec(fleet="test", pools=pools, routes=routes)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def front() -> AsyncIterator[Front]:
    async with triton_models(*MODELS) as triton, running_gateway(fleet_of(triton)) as running:
        yield Front(running, triton)


async def ask(base: str, path: str, method: str = "POST", **options: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request, nothing decoded."""
    async with aiohttp.ClientSession(auto_decompress=False) as http:
        async with http.request(method, base + path, **options) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, headers, await response.read()


async def test_generate_is_answered_under_the_routes_name_with_the_engines_bytes(front: Front) -> None:
    body = b'{ "text_input": "hello", "max_tokens": 5 }'
    through = await ask(front.running.url, "/v2/models/renamed/generate", data=body)
    direct = await ask(front.triton.http, "/v2/models/ensemble/generate", data=body)
    assert (through[0], through[2]) == (direct[0], direct[2])
    assert through[1]["x-headrace-route"] == "renamed"
    assert b'"text_output":"hello"' in through[2]
