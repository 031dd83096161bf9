"""The real engines, and the gateway in front of them, for every tier that asks for them."""

from collections.abc import AsyncIterator

import pytest_asyncio

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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(triton_a: Triton, triton_b: Triton, llama: Llama, valkey: Valkey) -> AsyncIterator[Fleet]:  # noqa: F811
    async with running_gateway(fleet_spec(triton_a, triton_b, llama, valkey)) as running:
        yield Fleet(running, triton_a, triton_b, llama, valkey)
