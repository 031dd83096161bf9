"""A gateway that trusts issuers of tokens, and how tests ask it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from router.spec.gateway import AuthSpec, JwtSpec
from tests.contract import keyed_gateway
from tests.harness import CHAT, RunningGateway, ScriptedEngine
from tests.issuer import AUDIENCE, LocalIssuer


@contextlib.asynccontextmanager
async def trusting(engine: ScriptedEngine, *trusted: JwtSpec) -> AsyncIterator[RunningGateway]:
    async with keyed_gateway.running(keyed_gateway.fleet(engine, AuthSpec(jwt=list(trusted)))) as gateway:
        yield gateway


def trust(issuer: LocalIssuer, **changed: Any) -> JwtSpec:
    return msgspec.convert({"issuer": issuer.url, "audience": AUDIENCE, **changed}, JwtSpec)


async def ask(gateway: RunningGateway, token: str, path: str = "/v1/chat/completions") -> tuple[int, Any, Any]:
    """Status, headers and content of the answer to whoever has `token`."""
    body = CHAT if path.startswith("/v1/chat") else None
    return await keyed_gateway.ask(gateway, path, body, authorization=f"Bearer {token}")


async def status(gateway: RunningGateway, token: str) -> int:
    return (await ask(gateway, token))[0]


async def readyz(gateway: RunningGateway) -> Any:
    async with aiohttp.ClientSession() as client, client.get(f"{gateway.admin_url}/readyz") as response:
        return await response.json()


def checked(gateway: RunningGateway, outcome: str) -> float:
    return gateway.gateway.registry.get_sample_value("headrace_jwt_checks_total", {"outcome": outcome}) or 0.0


def fetches(gateway: RunningGateway, issuer: LocalIssuer, outcome: str) -> float:
    labels = {"issuer": issuer.url, "outcome": outcome}
    return gateway.gateway.registry.get_sample_value("headrace_jwks_fetches_total", labels) or 0.0
