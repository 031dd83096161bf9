"""Whichever API it comes by, a request waits while Triton has all it may have, and leaves the queue with its client."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import grpc
import msgspec
import pytest
import pytest_asyncio

from tests.contract.both_fronts import KSERVE, Ask, Side, by_completion, fronts_spec
from tests.contract.grpc_front import channel, infer, scripted, stream, stub
from tests.contract.triton_models_server import triton_models
from tests.harness import RunningGateway, running_gateway

MODELS = ("ensemble", "ensemble_whole")
EVERY_API: dict[str, Ask] = {**KSERVE, "completions": by_completion}
WORK = {"text": "at work", "first_delay": 0.4}
STATUSES = (("triton_grpc_error", "true"),)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running() -> AsyncIterator[RunningGateway]:
    """A gateway before one server, which may have one request for each model."""
    async with triton_models(*MODELS) as server:
        spec = fronts_spec(MODELS, a=server)
        pools = {name: msgspec.structs.replace(pool, max_in_flight=1) for name, pool in spec.pools.items()}
        async with running_gateway(msgspec.structs.replace(spec, pools=pools)) as started:
            yield started


@pytest_asyncio.fixture
async def side(running: RunningGateway) -> AsyncIterator[Side]:
    async with channel(running.grpc_address) as opened, aiohttp.ClientSession() as http:
        yield Side(running.url, opened, http)


def waiting(running: RunningGateway, model: str) -> int:
    return int(running.gateway.registry.get_sample_value("headrace_queue_requests", {"route": model}) or 0)


@pytest.mark.parametrize("model", MODELS)
async def test_requests_by_every_api_wait_and_are_answered(running: RunningGateway, side: Side, model: str) -> None:
    first = asyncio.ensure_future(by_completion(side, model, WORK))
    await running.until(lambda: running.in_flight[f"{model}-a"] == 1, "it is at work")
    apis = EVERY_API
    if model == "ensemble":  # which answers with many messages
        apis = {name: ask for name, ask in EVERY_API.items() if name not in ("ModelInfer", "infer", "generate")}
    asked = {name: asyncio.ensure_future(ask(side, model, {"text": "ok"})) for name, ask in apis.items()}
    await running.until(lambda: waiting(running, model) == len(apis), "all wait")
    assert running.in_flight[f"{model}-a"] == 1
    answers = {name: await one for name, one in asked.items()}
    assert {name: answer[0] for name, answer in answers.items()} == dict.fromkeys(apis, True), answers
    assert (await first)[0]
    await running.until_idle()


@pytest.mark.parametrize("api", EVERY_API)
async def test_a_client_that_leaves_while_it_waits_is_forgotten(running: RunningGateway, side: Side, api: str) -> None:
    model = "ensemble_whole"
    first = asyncio.ensure_future(by_completion(side, model, WORK))
    await running.until(lambda: running.in_flight[f"{model}-a"] == 1, "it is at work")
    gone = asyncio.ensure_future(EVERY_API[api](side, model, {"text": "gone"}))
    await running.until(lambda: waiting(running, model) == 1, "one waits")
    gone.cancel()
    await running.until(lambda: waiting(running, model) == 0, "nobody waits")
    assert not first.done()
    assert (await first)[0]
    await running.until_idle()


@pytest.mark.parametrize("metadata", [(), STATUSES], ids=["messages", "statuses"])
@pytest.mark.parametrize("model", MODELS)
async def test_many_requests_of_one_stream_pass_one_at_a_time(
    running: RunningGateway, side: Side, model: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    requests = [scripted(model, str(number), str(number)) for number in range(12)]
    answer = await stream(side.channel, requests, metadata)
    assert answer.code is grpc.StatusCode.OK
    assert not [message.error_message for message in answer.messages if message.error_message]
    answered = dict.fromkeys(message.infer_response.id for message in answer.messages)
    assert sorted(answered, key=int) == [str(number) for number in range(12)]
    await running.until_idle()


async def test_grpc_clients_are_told_as_others_are(running: RunningGateway, side: Side) -> None:
    model = "ensemble_whole"
    first = asyncio.ensure_future(by_completion(side, model, WORK))
    await running.until(lambda: running.in_flight[f"{model}-a"] == 1, "it is at work")
    told = await infer(side.channel, scripted(model, "x"), (("prefer", "if-available"),))
    assert (told.code, "Prefer: if-available" in told.details) == (grpc.StatusCode.UNAVAILABLE, True)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await stub(side.channel).ModelInfer(scripted(model, "x"), timeout=0.1)
    # Which it is depends on whether the gateway has an idea of how long the wait will be.
    assert late.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    waits = asyncio.create_task(infer(side.channel, scripted(model, "x"), (("x-headrace-priority", "batch"),)))
    assert (await first)[0]
    answer = await waits
    assert (answer.code, answer.metadata["x-headrace-queue-position"]) == (grpc.StatusCode.OK, "1")
    await running.until_idle()
