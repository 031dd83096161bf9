"""An ensemble of three steps on a real Triton: its text comes through all of them."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.contract.triton_adapter import Adapt
from tests.contract.triton_models_server import TritonModels, triton_models

STEPS = ("steps_tokenize", "raw_step", "steps_detokenize", "steps")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[TritonModels]:
    async with triton_models(*STEPS) as running:
        yield running


async def test_an_ensemble_streams_through_its_steps(adapt: Adapt) -> None:
    engine = await adapt("steps")
    assert (await engine.probe()).detail == "steps: ensemble contract, text deltas"
    assert (await engine.events("some text", max_tokens=100)).text == "some text"
