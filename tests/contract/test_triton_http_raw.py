"""The raw engine contract over HTTP (`transport: http`), against a real Triton: the same answers as over gRPC."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from router.spec.fleet import TokenizerSpec
from tests.contract.triton_adapter import Adapt, Adapter
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.tokenizer import SAMPLE, byte_level

MODELS = ("raw", "raw_whole", "raw_old")

RawAdapt = Callable[..., Awaitable[Adapter]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[TritonModels]:
    async with triton_models(*MODELS) as running:
        yield running


@pytest.fixture
def raw(adapt: Adapt, tmp_path: Path) -> RawAdapt:
    path = tmp_path / "tokenizer.json"
    byte_level(path)

    async def make(model: str = "raw", transport: str = "http", **options: Any) -> Adapter:
        tokenizer = TokenizerSpec(file=str(path), eos="</s>")
        return await adapt(model, tokenizer=tokenizer, transport=transport, kv_block_tokens=4, **options)

    return make


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("script", ["<cut1>", "<cut2>", "<cut7>", ""])
async def test_the_answer_is_the_one_over_grpc_byte_for_byte(raw: RawAdapt, model: str, script: str) -> None:
    over_grpc, over_http = await raw(model, "grpc"), await raw(model)
    for api in ("completions", "chat.completions"):
        events = await over_http.events(script + SAMPLE, api=api)
        assert (events.text, events.finish, events.done) == (SAMPLE, "stop", True)
        assert events.usage == (await over_grpc.events(script + SAMPLE, api=api)).usage
        whole = await over_http.whole(script + SAMPLE, api=api)
        expected = await over_grpc.whole(script + SAMPLE, api=api)
        assert (whole["choices"], whole["usage"]) == (expected["choices"], expected["usage"])


async def test_the_engine_gets_the_same_tensors_as_over_grpc(raw: RawAdapt) -> None:
    got = []
    for transport in ("grpc", "http"):
        engine = await raw(transport=transport)
        body = {"seed": 7, "temperature": 0.5, "stop": ["<END>", "never"], "top_k": 3, "min_tokens": 2}
        got.append(json.loads((await engine.events("<inputs>x", **body)).text))
        got[-1].pop("id", None)
        got[-1].pop("asked", None)
    assert got[0] == got[1]
    assert got[0]["stop_words_list"]


async def test_log_probabilities_are_the_ones_over_grpc(raw: RawAdapt) -> None:
    body = {"api": "chat.completions", "logprobs": True}
    whole, expected = [await (await raw(transport=each)).whole("<cut2>" + SAMPLE, **body) for each in ("http", "grpc")]
    assert whole["choices"] == expected["choices"]
    assert whole["choices"][0]["logprobs"]["content"]
