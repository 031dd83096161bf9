"""The real engines, and the gateway in front of them, for every tier that asks for them."""

import asyncio
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest_asyncio
import uvloop

from tests.engines import (  # noqa: F401 - fixtures
    Llama,
    Triton,
    Valkey,
    llama,
    start_triton,
    triton_a,
    triton_b,
    valkey,
    workshop,
)
from tests.fleet import Fleet, fleet_spec
from tests.harness import running_gateway


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test runs on the loop that gateways run on: what a relay promises rests on its transports."""
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client with as many connections as a test likes."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(triton_a: Triton, triton_b: Triton, llama: Llama, valkey: Valkey) -> AsyncIterator[Fleet]:  # noqa: F811
    async with running_gateway(fleet_spec(triton_a, triton_b, llama, valkey)) as running:
        yield Fleet(running, triton_a, triton_b, llama, valkey)
