"""An ensemble of three steps on a real Triton: a cancel reaches the engine inside it."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.contract.triton_adapter import Adapt
from tests.contract.triton_models_server import TritonModels, triton_models

STEPS = ("steps_tokenize", "raw_step", "steps_detokenize", "steps")
NEVER, SLOW = "7", "38"
"""What makes the engine never begin, and take its time over each of its many messages."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[TritonModels]:
    async with triton_models(*STEPS) as running:
        yield running


async def test_an_ensemble_streams_through_its_steps(adapt: Adapt) -> None:
    engine = await adapt("steps")
    assert (await engine.probe()).detail == "steps: ensemble contract, text deltas"
    assert (await engine.events("some text", max_tokens=100)).text == "some text"


@pytest.mark.parametrize("script", [NEVER + "x", SLOW + "some text " * 20])
async def test_the_engine_inside_an_ensemble_is_stopped_by_the_requests_id(
    server: TritonModels, adapt: Adapt, script: str
) -> None:
    engine = await adapt("steps")
    before = await server.stopped("raw_step")
    call = engine.call(script)
    opening = asyncio.create_task(call.open())
    await asyncio.sleep(0.3)
    closed = time.monotonic()
    call.close()
    await asyncio.gather(opening, return_exceptions=True)
    while (await server.stopped("raw_step")) == before:
        assert time.monotonic() < closed + 2
        await asyncio.sleep(0.05)
