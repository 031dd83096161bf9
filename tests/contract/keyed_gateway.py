"""A gateway with tenants and their keys, before a scripted engine and a Triton that is not there."""

import contextlib
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import aiohttp
import msgspec
import pytest
from tritonclient.utils import InferenceServerException

from router.spec.fleet import EndpointSpec, FleetSpec, KeySpec, PoolSpec, ProbeSpec, RouteSpec, TenantSpec
from router.spec.gateway import AuthSpec, GatewaySpec
from tests.harness import RunningGateway, ScriptedEngine, answering, free_port, one_pool, running_gateway

KEY, NEXT_KEY, OTHER_KEY, EXPIRED = "hr-search-key", "hr-search-next-key", "hr-other-key", "hr-expired-key"
ANSWER = b'{"choices":[{"message":{"content":"hello"}}]}'


def hashed(key: str, expires: str | None = None) -> KeySpec:
    return KeySpec(sha256=sha256(key.encode()).hexdigest(), expires=expires)


TENANTS = {
    "search": TenantSpec(keys=[hashed(KEY), hashed(NEXT_KEY), hashed(EXPIRED, "2020-01-01")], routes=["m", "triton"]),
    "other": TenantSpec(keys=[hashed(OTHER_KEY)], isolated=False),
}

answer = answering(body=ANSWER)


def fleet(
    engine: ScriptedEngine, auth: AuthSpec | None = None, tenants: dict[str, TenantSpec] | None = None
) -> FleetSpec:
    """The route `m` to a scripted engine; `hidden`, which only `other` may call; and `triton`, where nobody is."""
    spec = one_pool(engine.endpoint())
    nobody = EndpointSpec(id="nobody", grpc=f"127.0.0.1:{free_port()}", http=f"http://127.0.0.1:{free_port()}")
    triton = PoolSpec(protocol="triton", model="m", endpoints=[nobody], probe=ProbeSpec(interval="60s"))
    return msgspec.structs.replace(
        spec,
        pools={**spec.pools, "t": triton},
        routes={name: RouteSpec(pool="p") for name in ("m", "hidden")}
        | {name: RouteSpec(pool="t") for name in ("triton", "hidden-triton")},
        tenants=TENANTS if tenants is None else tenants,
        gateway=GatewaySpec(grpc=":8001", auth=auth or AuthSpec()),
    )


@contextlib.asynccontextmanager
async def running(spec: FleetSpec) -> AsyncIterator[RunningGateway]:
    async with running_gateway(spec, wait_ready=False) as gateway:
        await gateway.until_phase("engine", "ready")
        yield gateway


async def ask(gateway: RunningGateway, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and content of an answer; a GET without a body."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as client,
        client.request("POST" if body is not None else "GET", gateway.url + path, json=body, headers=given) as response,
    ):
        content = await response.read()
        return response.status, response.headers, msgspec.json.decode(content) if content else None


async def status_of(call: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        await call
    return caught.value.status(), caught.value.message()
