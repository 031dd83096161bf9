"""Streams of Triton's clients through the gateway: the order of their answers, many requests on one, very large ones,
and a model's process that dies under them."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from router.spec.documents import file_documents
from tests.contract.both_fronts import Fronts, both_fronts, fronts_spec, ticks
from tests.contract.grpc_front import channel, infer, patient, scripted, stream
from tests.harness import RunningGateway, running_gateway

MODELS = ("ensemble", "ensemble_whole", "patient", "ticker", "typed_identity")
STATUSES = (("triton_grpc_error", "true"),)
IDLE_S = 2


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fronts() -> AsyncIterator[Fronts]:
    async with both_fronts(*MODELS) as started:
        yield started


def identity(id_: str, version: str = "", content: bytes = b"\x07") -> Any:
    request = service_pb2.ModelInferRequest(model_name="typed_identity", model_version=version, id=id_)
    request.inputs.add(name="UINT8_IN", datatype="UINT8").shape.extend([1, len(content)])
    request.raw_input_contents.append(content)
    return request


def slow() -> Any:
    return patient("patient", 0.3, "slow")


IN_ORDER = {
    "models that answer once": [slow(), identity("1"), scripted("ensemble_whole", "x", "2"), identity("3")],
    "two slow ones": [slow(), scripted("ensemble_whole", {"text": "x", "first_delay": 0.3}, "1"), identity("2")],
    "a failure": [slow(), scripted("ensemble_whole", {"fail": "no"}, "1"), identity("2")],
    "a wrong version": [slow(), identity("1", "9"), identity("2")],
    "no inputs": [slow(), service_pb2.ModelInferRequest(model_name="ensemble_whole", id="1"), identity("2")],
}
CRASHING = "a failure"
"""What Triton 2.51 was seen to crash on when it was to report it as a status."""


@pytest.mark.parametrize("metadata", [(), STATUSES], ids=["messages", "statuses"])
@pytest.mark.parametrize("what", IN_ORDER)
async def test_models_that_answer_once_are_answered_in_the_order_of_the_requests(
    fronts: Fronts, what: str, metadata: Any
) -> None:
    if what == CRASHING and metadata:
        pytest.skip("Triton 2.51 may crash")
    answers = []
    for address in (fronts.running.grpc_address, fronts.a.grpc):
        async with channel(address) as opened:
            answer = await stream(opened, IN_ORDER[what], metadata)
        answers.append((answer.code, answer.details, answer.messages))
    assert answers[0] == answers[1]
    ids = [message.infer_response.id for message in answers[0][2]]
    assert ids == [request.id for request in IN_ORDER[what]]


async def test_an_unknown_route_is_refused_in_its_turn(fronts: Fronts) -> None:
    unknown = service_pb2.ModelInferRequest(model_name="nope", id="1")
    async with channel(fronts.running.grpc_address) as opened:
        answer = await stream(opened, [slow(), unknown, identity("2")])
    assert [message.infer_response.id for message in answer.messages] == ["slow", "1", "2"]


async def test_decoupled_models_neither_wait_nor_are_waited_for(fronts: Fronts) -> None:
    requests = [
        patient("patient", 0.5, "slow"),
        identity("1"),
        ticks("ticker", 3, 0.05, "decoupled"),
        service_pb2.ModelInferRequest(model_name="ticker", id="refused"),
        ticks("ticker", 1, 1, "late"),
    ]
    for address in (fronts.running.grpc_address, fronts.a.grpc):
        async with channel(address) as opened:
            answer = await stream(opened, requests)
        ids = [message.infer_response.id for message in answer.messages]
        assert set(ids[:4]) == {"decoupled", "refused"}
        assert ids[4:] == ["slow", "1", "late"]


async def test_a_stream_takes_more_requests_than_may_be_open_and_keeps_nobody_else_waiting(fronts: Fronts) -> None:
    """More than the 1024 that the gateway works on at once; what is over is read when others have ended."""
    count = 1300
    async with channel(fronts.running.grpc_address) as opened, channel(fronts.running.grpc_address) as other:
        many = asyncio.create_task(stream(opened, [ticks("ticker", 1, 3, str(number)) for number in range(count)]))
        await fronts.running.until(lambda: sum(fronts.running.in_flight.values()) >= 1024, "the stream is full", 20)
        beside = await stream(other, [ticks("ticker", 2, 0.01, "beside")])
        assert (await infer(other, identity("beside"))).code is grpc.StatusCode.OK
        assert len(beside.of("beside")) == 2
        assert sum(fronts.running.in_flight.values()) > 512, "most of the full stream had ended before"
        answer = await many
    assert answer.code is grpc.StatusCode.OK
    assert sorted(int(message.infer_response.id) for message in answer.messages) == list(range(count))
    assert not any(message.error_message for message in answer.messages)


@pytest.mark.parametrize("streamed", [False, True], ids=["ModelInfer", "ModelStreamInfer"])
async def test_100_megabytes_come_back_as_they_were_sent(fronts: Fronts, streamed: bool) -> None:
    content = os.urandom(1_000_000) * 100
    async with channel(fronts.running.grpc_address) as opened:
        request = identity("large", content=content)
        if streamed:
            (message,) = (await stream(opened, [request])).messages
            assert not message.error_message
            response = message.infer_response
        else:
            response = (await infer(opened, request)).response
    assert response.raw_output_contents[0] == content


async def test_a_stream_that_begins_with_an_error_goes_on_as_tritons_does(fronts: Fronts) -> None:
    """Its status is the error's, and its events come as the model sends them."""
    body = {"COUNT": 1, "SECONDS": 1.0, "FAIL_FIRST": True}
    heads = []
    async with aiohttp.ClientSession() as http:
        for url in (fronts.running.url, fronts.a.http):
            async with http.post(f"{url}/v2/models/ticker/generate_stream", json=body) as response:
                first = await response.content.readuntil(b"\n\n")
                busy = sum(fronts.running.in_flight.values())
                heads.append((response.status, response.content_type, first, await response.content.read()))
                assert busy == (1 if url == fronts.running.url else 0), "the error came before the model went on"
    assert heads[0] == heads[1]
    assert heads[0][:3] == (400, "text/event-stream", b'data: {"error":"not yet"}\n\n')
    assert fronts.phases("ticker") == ["ready", "ready"]


async def hanging(running: RunningGateway, opened: grpc.aio.Channel, count: int) -> list[asyncio.Task[Any]]:
    """Streams that have begun."""
    requests = [ticks("ticker", 1000, 0.2, str(number)) for number in range(count)]
    tasks = [asyncio.create_task(stream(opened, [request])) for request in requests]
    await running.until(lambda: running.in_flight["ticker-a"] == count, "the streams run")
    await asyncio.sleep(0.5)
    return tasks


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Every stream ends with an error within the idle timeout, and a little."""
    async with asyncio.timeout(IDLE_S + 2):
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert len(answer.messages) > 1
        assert [bool(message.error_message) for message in answer.messages].index(True) == len(answer.messages) - 1


async def test_a_dead_process_of_a_model_that_fits_no_contract_is_found_out_and_avoided(fronts: Fronts) -> None:
    models = ("ticker",)
    spec = fronts_spec(models, f"{IDLE_S}s", a=fronts.a)
    async with running_gateway(spec) as running, channel(running.grpc_address) as opened:
        tasks = await hanging(running, opened, 5)
        both = fronts_spec(models, f"{IDLE_S}s", a=fronts.a, b=fronts.b)
        running.apply(file_documents(both, content_hash="both"))
        await running.until_phase("ticker-b", "ready")
        fronts.a.kill_model("ticker")
        answers = await asyncio.gather(*(stream(opened, [ticks("ticker", 2, 0.01, "new")]) for _ in range(12)))
        assert [len(answer.of("new")) for answer in answers] == [2] * 12
        assert running.gateway.fleet.endpoints["ticker-a"].phase == "unhealthy"
        await asyncio.wait(tasks, timeout=1)  # they need not wait for the idle timeout
        assert all(task.done() for task in tasks)
        await ended(tasks)
        await asyncio.sleep(0.3)
        assert running.gateway.fleet.endpoints["ticker-a"].phase == "unhealthy", "probes do not fall for it"
        assert "has died" in running.gateway.fleet.endpoints["ticker-a"].state.detail
        await fronts.a.reload("ticker")
        await running.until_phase("ticker-a", "ready")
        answers = await asyncio.gather(*(stream(opened, [ticks("ticker", 2, 0.01)]) for _ in range(12)))
        assert {answer.metadata["x-headrace-endpoint"] for answer in answers} == {"ticker-a", "ticker-b"}
        assert [len(answer.messages) for answer in answers] == [2] * 12


async def test_streams_of_a_dead_process_that_nobody_asks_end_with_the_idle_timeout(fronts: Fronts) -> None:
    async with running_gateway(fronts_spec(("ticker",), f"{IDLE_S}s", a=fronts.a)) as running:
        async with channel(running.grpc_address) as opened:
            tasks = await hanging(running, opened, 5)
            fronts.a.kill_model("ticker")
            await ended(tasks)
    await fronts.a.reload("ticker")
