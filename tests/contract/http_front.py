"""A gateway in front of a real Triton, for the tests of Triton's HTTP API."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

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


@contextlib.asynccontextmanager
async def http_front() -> AsyncIterator[Front]:
    """A started Triton and a gateway in front of it."""
    async with triton_models(*MODELS) as triton, running_gateway(fleet_of(triton)) as running:
        yield Front(running, triton)


async def ask(base: str, path: str, method: str = "POST", **options: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request, nothing decoded."""
    asked = {"accept-encoding": "identity"}
    async with aiohttp.ClientSession(auto_decompress=False, headers=asked) as http:
        async with http.request(method, base + path, **options) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, headers, await response.read()
