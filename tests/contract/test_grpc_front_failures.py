"""Clients that leave, engines that die and gateways that stop, at the gRPC front before real Triton servers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from gateway.app import Gateway
from gateway.listening import ListenError
from router.spec.fleet import FleetSpec
from router.spec.gateway import GatewaySpec
from tests.contract.grpc_front import (
    GrpcFront,
    channel,
    front_spec,
    grpc_front,
    infer,
    patient,
    scripted,
    stream,
    stub,
    text_output,
)
from tests.contract.triton_models_server import triton_models
from tests.harness import RunningGateway, free_port, running_gateway

STATUSES = (("triton_grpc_error", "true"),)
LATE = {"text": "late", "first_delay": 30}
LONG = {"text": "x" * 1000, "cut": 1, "delay": 0.05}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def front() -> AsyncIterator[GrpcFront]:
    async with grpc_front() as started:
        yield started


async def until_sent(running: RunningGateway, count: int = 1) -> None:
    """Wait until that many requests are at engines."""
    await running.until(lambda: sum(running.in_flight.values()) >= count, "the request is at an engine")
    await asyncio.sleep(0.2)


async def test_a_unary_clients_deadline_cancels_at_the_model(front: GrpcFront) -> None:
    before = await front.cancelled("patient")
    async with channel(front.running.grpc_address) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(opened).ModelInfer(patient("r-patient", 30), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await front.until_cancelled("patient", before + 1)


async def test_a_client_that_vanishes_cancels_at_the_model(front: GrpcFront) -> None:
    before = await front.cancelled("ensemble")
    async with channel(front.running.grpc_address) as opened:
        call = stub(opened).ModelStreamInfer()
        await call.write(scripted("r-ensemble", LONG, "1"))
        await call.read()
    await front.until_cancelled("ensemble", before + 1)


async def test_a_queued_request_whose_client_left_is_cancelled_when_its_turn_comes(front: GrpcFront) -> None:
    """Without dynamic batching Triton itself looks at no queued request: the model sees the cancel when it gets it."""
    before = await front.cancelled("patient")
    async with channel(front.running.grpc_address) as opened:
        blocking = [stub(opened).ModelInfer(patient("r-patient", 1.5)) for _ in range(2)]
        await until_sent(front.running, 2)
        queued = [stub(opened).ModelInfer(patient("r-patient", 20)) for _ in range(4)]
        await until_sent(front.running, 6)
        for call in queued:
            call.cancel()
        await asyncio.gather(*blocking)
        await front.until_cancelled("patient", before + 4)


@pytest.mark.parametrize(("script", "answers"), [(LATE, 0), (LONG, 3)], ids=["before the first token", "decode"])
@pytest.mark.parametrize("metadata", [(), STATUSES], ids=["messages", "statuses"])
async def test_a_streams_client_that_leaves_cancels_every_request_at_the_model(
    front: GrpcFront, script: dict[str, Any], answers: int, metadata: Any
) -> None:
    before = await front.cancelled("ensemble")
    async with channel(front.running.grpc_address) as opened:
        call = stub(opened).ModelStreamInfer(metadata=metadata)
        for i in range(3):
            await call.write(scripted("r-ensemble", script, str(i)))
        for _ in range(answers):
            await call.read()
        await until_sent(front.running, 3)
        call.cancel()
        await front.until_cancelled("ensemble", before + 3)


@pytest.mark.parametrize("metadata", [(), STATUSES], ids=["messages", "statuses"])
async def test_a_streams_client_that_leaves_cancels_at_a_model_that_answers_once(
    front: GrpcFront, metadata: Any
) -> None:
    before = await front.cancelled("patient")
    async with channel(front.running.grpc_address) as opened:
        call = stub(opened).ModelStreamInfer(metadata=metadata)
        await call.write(patient("r-patient", 0.1))
        await call.read()
        await call.write(patient("r-patient", 30))
        await until_sent(front.running)
        call.cancel()
        await front.until_cancelled("patient", before + 1)


async def test_clients_that_all_leave_at_once_bring_no_server_down(front: GrpcFront) -> None:
    async with channel(front.running.grpc_address) as opened:
        for _ in range(3):
            before = await front.cancelled("ensemble")
            calls = []
            for i in range(6):
                call = stub(opened).ModelStreamInfer()
                for j in range(3):
                    await call.write(scripted("r-ensemble", {**LATE, "i": [i, j]}))
                calls.append(call)
            await until_sent(front.running, 18)
            for call in calls:
                call.cancel()
            await front.until_cancelled("ensemble", before + 18)


async def test_an_idle_engine_is_given_up(front: GrpcFront) -> None:
    async with running_gateway(front_spec(front.a, models=("ensemble",), idle="300ms")) as running:
        before = await front.cancelled("ensemble")
        async with channel(running.grpc_address) as opened:
            answer = await stream(opened, [scripted("r-ensemble", {"text": "ab", "cut": 1, "delay": 30}, "1")])
            assert "idle timeout" in answer.messages[-1].error_message
            assert answer.messages[-1].infer_response.id == "1"
            assert answer.code is grpc.StatusCode.OK
            await front.until_cancelled("ensemble", before + 1)
            answer = await stream(opened, [scripted("r-ensemble", {"text": "ab", "cut": 1, "delay": 30})], STATUSES)
            assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_large_tensors_pass_through(front: GrpcFront) -> None:
    values = np.arange(5_000_000, dtype=np.float64).reshape(1, -1)
    request = service_pb2.ModelInferRequest(model_name="r-typed_identity")
    request.inputs.add(name="FP64_IN", datatype="FP64").shape.extend(values.shape)
    request.raw_input_contents.append(values.tobytes())
    async with channel(front.running.grpc_address) as opened:
        answer = await infer(opened, request)
    assert answer.code is grpc.StatusCode.OK, answer.details
    assert answer.response.raw_output_contents[0] == values.tobytes()


async def test_a_client_that_does_not_read_holds_its_engine_back(front: GrpcFront) -> None:
    """Messages of 64 KiB, far more than all buffers on the way take."""
    size, count = 65536, 400
    async with channel(front.running.grpc_address) as opened:
        call = stub(opened).ModelStreamInfer()
        await call.write(scripted("r-ensemble", {"text": "x" * (size * count), "cut": size}, "1"))
        await call.done_writing()
        await until_sent(front.running)
        await asyncio.sleep(1)
        grown = psutil.Process().memory_info().rss
        received = 0
        async for message in call:
            received += len(text_output(message.infer_response))
        assert received == size * count
    assert psutil.Process().memory_info().rss < grown + 20 * 1024 * 1024


async def test_a_stream_survives_a_stop_that_waits(front: GrpcFront) -> None:
    async with running_gateway(front_spec(front.a, models=("ensemble",))) as running:
        async with channel(running.grpc_address) as opened:
            request = scripted("r-ensemble", {"text": "abcdefgh", "cut": 1, "delay": 0.1}, "1")
            answering = asyncio.create_task(stream(opened, [request]))
            await until_sent(running)
            await running.gateway.stop()
            assert (await answering).text("1") == b"abcdefgh"


async def test_a_port_in_use_is_named(front: GrpcFront) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        addresses = GatewaySpec(http=f"127.0.0.1:{free_port()}", admin=f"127.0.0.1:{free_port()}", grpc=address)
        gateway = Gateway(FleetSpec(fleet="t", gateway=addresses), "hash", None)
        try:
            with pytest.raises(ListenError, match=r"gateway\.grpc\): it is in use by another program") as caught:
                await gateway.start()
            assert caught.value.what == "grpc"
        finally:
            await gateway.stop()


async def test_a_killed_server_ends_its_requests_and_gets_no_more() -> None:
    async with triton_models("ensemble", "patient") as a, triton_models("ensemble", "patient") as b:
        async with running_gateway(front_spec(a, b, models=("ensemble", "patient"))) as running:
            async with channel(running.grpc_address) as opened:
                streamed = [
                    asyncio.create_task(stream(opened, [scripted("r-ensemble", {**LONG, "i": i}, str(i))], metadata))
                    for i in range(12)
                    for metadata in ((), STATUSES)
                ]
                await until_sent(running, 24)
                at_a = running.in_flight["ensemble-0"]
                assert 0 < at_a < 24
                await a.kill()
                await running.until_phase("ensemble-0", "unhealthy")
                again = [await infer(opened, patient("r-patient", 0)) for _ in range(8)]
                assert {(answer.code, answer.metadata["x-headrace-endpoint"]) for answer in again} == {
                    (grpc.StatusCode.OK, "patient-1")
                }
                await running.until(lambda: sum(task.done() for task in streamed) == at_a, "streams of the dead end")
                for task in streamed:
                    if not task.done():
                        task.cancel()
                        continue
                    answer = await task
                    if answer.code is grpc.StatusCode.OK:
                        assert "broke off" in answer.messages[-1].error_message
                    else:
                        assert (answer.code, "broke off" in answer.details) == (grpc.StatusCode.UNAVAILABLE, True)
                    assert len(answer.messages) > 1
                await asyncio.gather(*streamed, return_exceptions=True)


async def test_a_killed_server_ends_what_waits_for_its_only_answer() -> None:
    async with triton_models("patient") as server:
        async with running_gateway(front_spec(server, models=("patient",))) as running:
            async with channel(running.grpc_address) as opened:
                unary = asyncio.create_task(infer(opened, patient("r-patient", 20)))
                requests = [patient("r-patient", 20, "first"), patient("r-patient", 20, "second")]
                streamed = asyncio.create_task(stream(opened, requests))
                statuses = asyncio.create_task(stream(opened, [patient("r-patient", 20)], STATUSES))
                await until_sent(running, 3)
                await server.kill()
                assert (await unary).code is grpc.StatusCode.UNAVAILABLE
                assert "was lost before it answered" in (await unary).details
                messages = (await streamed).messages
                assert {message.infer_response.id for message in messages if message.error_message} == {
                    "first",
                    "second",
                }
                assert (await streamed).code is grpc.StatusCode.OK
                assert (await statuses).code is grpc.StatusCode.UNAVAILABLE
                await running.until_phase("patient-0", "unhealthy")
                refused = await infer(opened, patient("r-patient", 0))
                assert (refused.code, "is ready to take" in refused.details) == (grpc.StatusCode.UNAVAILABLE, True)
                await server.start()
                await running.until_phase("patient-0", "ready")
                assert (await infer(opened, patient("r-patient", 0))).code is grpc.StatusCode.OK
