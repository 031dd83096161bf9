"""What the Triton adapter makes of failures, against a real Triton: none is hidden, and a cancel reaches the model."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.upstream.base import EngineCall, Failure, UpstreamError
from gateway.upstream.triton.engine import TritonEngine
from tests.contract.triton_adapter import Adapt, Adapter, Collected, Events
from tests.contract.triton_models_server import TritonModels, triton_models

DECOUPLED = ("ensemble", "tensorrt_llm_bls", "llmapi")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[TritonModels]:
    async with triton_models(*DECOUPLED, "ensemble_whole") as running:
        yield running


async def cancelled_within(server: TritonModels, model: str, count: int, seconds: float) -> bool:
    """Whether the model has counted `count` cancellations in time."""
    until = time.monotonic() + seconds
    while await server.cancelled(model) < count:
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.05)
    return True


async def relayed(call: EngineCall, sink: Collected, writes: int) -> asyncio.Task[None]:
    """A relay that has made that many writes."""
    relay = asyncio.create_task(call.relay(sink))
    async with asyncio.timeout(10):
        while len(sink.writes) < writes:  # noqa: ASYNC110  # a sink has no event to wait for
            await asyncio.sleep(0.01)
    return relay


async def test_a_call_may_be_closed_more_than_once(server: TritonModels, adapt: Adapt) -> None:
    before = await server.cancelled("ensemble")
    call = (await adapt("ensemble")).call({"text": "x" * 1000, "cut": 1, "delay": 0.05})
    await call.open()
    relay = await relayed(call, Collected(), 3)
    assert call.answering
    call.close()
    call.close()
    with pytest.raises(UpstreamError):
        await relay
    assert await cancelled_within(server, "ensemble", before + 1, 2)


async def test_a_cancelled_task_cancels_at_the_model(server: TritonModels, adapt: Adapt) -> None:
    before = await server.cancelled("ensemble")
    call = (await adapt("ensemble")).call({"text": "late", "first_delay": 30})
    opening = asyncio.create_task(call.open())
    await asyncio.sleep(0.2)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    call.close()
    assert await cancelled_within(server, "ensemble", before + 1, 2)


async def test_clients_that_all_leave_at_once_do_not_bring_the_server_down(server: TritonModels, adapt: Adapt) -> None:
    adapter = await adapt("ensemble")
    for _ in range(5):
        before = await server.cancelled("ensemble")
        calls = [adapter.call({"text": "late", "first_delay": 30}) for _ in range(12)]
        openings = [asyncio.create_task(call.open()) for call in calls]
        await asyncio.sleep(0.2)
        for opening, call in zip(openings, calls, strict=True):
            opening.cancel()
            call.close()
        await asyncio.gather(*openings, return_exceptions=True)
        assert await cancelled_within(server, "ensemble", before + 12, 2)


async def test_an_abort_raises_its_error_even_while_paused(server: TritonModels, adapt: Adapt) -> None:
    before = await server.cancelled("ensemble")
    call = (await adapt("ensemble")).call({"text": "x" * 1000, "cut": 1, "delay": 0.05})
    await call.open()
    sink = Collected()
    relay = await relayed(call, sink, 2)
    call.pause()
    await asyncio.sleep(0.2)
    writes = len(sink.writes)
    await asyncio.sleep(0.2)
    assert len(sink.writes) == writes
    call.abort(UpstreamError(Failure.TIMEOUT, "too slow", 504))
    with pytest.raises(UpstreamError, match="too slow"):
        await relay
    assert await cancelled_within(server, "ensemble", before + 1, 2)


async def test_a_paused_stream_goes_on_where_it_was(adapt: Adapt) -> None:
    call = (await adapt("ensemble")).call({"text": "abcdefgh", "cut": 1, "delay": 0.02})
    await call.open()
    sink = Collected()
    relay = await relayed(call, sink, 2)
    call.pause()
    await asyncio.sleep(0.2)
    call.resume()
    await relay
    call.close()
    assert Events.of(b"".join(sink.writes)).text == "abcdefgh"


async def test_an_aborted_call_sends_nothing(adapt: Adapt) -> None:
    call = (await adapt("ensemble")).call("text")
    call.abort(UpstreamError(Failure.TIMEOUT, "too late", 504))
    with pytest.raises(UpstreamError, match="too late"):
        await call.open()


@pytest.mark.parametrize("model", [*DECOUPLED, "ensemble_whole"])
@pytest.mark.parametrize(
    ("message", "failure", "status"),
    [
        ("the sampler is broken", Failure.ENGINE, 500),
        ("Exceeds maximum queue size", Failure.BUSY, 429),
        ("server is shutting down", Failure.CONNECT, 503),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    adapt: Adapt, model: str, message: str, failure: Failure, status: int
) -> None:
    engine = await adapt(model)
    for stream in (True, False):
        call = engine.call({"text": "x", "fail": message}, stream=stream)
        with pytest.raises(UpstreamError) as caught:
            await call.open()
        call.close()
        assert (caught.value.failure, caught.value.status) == (failure, status)
        if failure is Failure.ENGINE:
            assert message in caught.value.message
            assert not caught.value.endpoint_fault


@pytest.mark.parametrize("model", DECOUPLED)
async def test_an_error_in_mid_stream_is_no_end(adapt: Adapt, model: str) -> None:
    call = (await adapt(model)).call({"text": "abcdef", "cut": 1, "fail": "out of memory", "fail_after": 3})
    await call.open()
    sink = Collected()
    with pytest.raises(UpstreamError, match="out of memory") as caught:
        await call.relay(sink)
    call.close()
    assert caught.value.failure is Failure.ENGINE
    stream = b"".join(sink.writes)
    # Triton's error status may overtake a message that is still being written.
    assert Events.of(stream).text in ("a", "ab", "abc")
    assert b"[DONE]" not in stream
    assert Events.of(stream).finish is None


@pytest.mark.parametrize("model", [*DECOUPLED, "ensemble_whole"])
async def test_a_request_the_model_refuses_is_the_clients_error(adapt: Adapt, model: str) -> None:
    call = (await adapt(model)).call({"text": "x", "fail": "top_k is too large", "invalid": True})
    with pytest.raises(UpstreamError, match="top_k is too large") as caught:
        await call.open()
    call.close()
    assert (caught.value.failure, caught.value.status) == (Failure.ENGINE, 400)
    assert not caught.value.endpoint_fault


async def test_an_endpoint_that_was_never_probed_is_passed_over(adapt: Adapt) -> None:
    engine = await adapt("ensemble")
    unprobed = Adapter(TritonEngine(engine.endpoint, engine.pool), engine.endpoint, engine.pool)
    with pytest.raises(UpstreamError) as caught:
        await unprobed.call("text").open()
    assert caught.value.failure is Failure.BUSY
    await unprobed.engine.close()


async def test_closing_the_engine_ends_its_calls_with_an_error(adapt: Adapt) -> None:
    engine = await adapt("ensemble")
    call = engine.call({"text": "late", "first_delay": 30})
    opening = asyncio.create_task(call.open())
    await asyncio.sleep(0.1)
    await engine.engine.close()
    with pytest.raises(UpstreamError, match="left the fleet"):
        await opening
    with pytest.raises(UpstreamError, match="left the fleet"):
        await engine.call("text").open()
    with pytest.raises(UpstreamError):
        await engine.probe()


async def test_a_changed_cumulative_text_breaks_the_protocol(adapt: Adapt) -> None:
    call = (await adapt("llmapi")).call({"text": "abcdef", "cut": 2, "revise": True})
    await call.open()
    with pytest.raises(UpstreamError) as caught:
        await call.relay(Collected())
    call.close()
    assert caught.value.failure is Failure.PROTOCOL


async def test_a_stream_that_the_engine_ends_for_its_own_reasons_is_no_answer(adapt: Adapt) -> None:
    call = (await adapt("llmapi")).call({"text": "abcdef", "finish": "timeout"}, stream=False)
    with pytest.raises(UpstreamError, match="early"):
        await call.open()
    call.close()


async def test_a_full_queue_is_busy_and_may_be_tried_elsewhere(adapt: Adapt) -> None:
    engine = await adapt("ensemble_whole")
    calls = [engine.call({"text": "x", "first_delay": 0.5}, stream=False) for _ in range(8)]
    outcomes = await asyncio.gather(*(call.open() for call in calls), return_exceptions=True)
    for call in calls:
        call.close()
    refused = [outcome for outcome in outcomes if isinstance(outcome, UpstreamError)]
    assert refused
    assert len(refused) < len(calls)
    assert {(error.failure, error.status) for error in refused} == {(Failure.BUSY, 429)}
    assert all(error.retryable and not error.endpoint_fault for error in refused)


async def test_a_model_whose_process_died_is_not_ready_until_it_generates_again(
    server: TritonModels, adapt: Adapt
) -> None:
    engine = await adapt("llmapi")
    dying = engine.call({"text": "abc", "cut": 1, "die": 1})
    opening = await dying.open()
    assert opening.status == 200
    dying.abort(UpstreamError(Failure.TIMEOUT, "no more came", 504))
    dying.close()
    await asyncio.sleep(1.5)  # the model's process ends half a second after its first message
    with pytest.raises(UpstreamError) as caught:
        await engine.call("after").open()
    assert (caught.value.failure, caught.value.status) == (Failure.CONNECT, 503)
    report = await engine.probe()
    assert not report.ready
    assert "has died" in report.detail
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name="llmapi"))
        async with asyncio.timeout(10):
            while (await engine.probe()).ready:  # noqa: ASYNC110  # unloading goes on in the background
                await asyncio.sleep(0.05)
        await stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name="llmapi"))
    assert (await engine.probe()).ready
    assert (await engine.events("alive")).text == "alive"


async def test_an_unloaded_model_is_tried_elsewhere(server: TritonModels, adapt: Adapt) -> None:
    engine = await adapt("tensorrt_llm_bls")
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name="tensorrt_llm_bls"))
        with pytest.raises(UpstreamError) as caught:
            await engine.call("text").open()
        assert caught.value.retryable
        assert caught.value.endpoint_fault
        await stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name="tensorrt_llm_bls"))
    assert (await engine.probe()).ready


async def test_a_killed_server_ends_streams_with_an_error_and_is_back_after_its_return(
    server: TritonModels, adapt: Adapt
) -> None:
    engine = await adapt("ensemble")
    streaming = engine.call({"text": "x" * 1000, "cut": 1, "delay": 0.05})
    waiting = engine.call({"text": "late", "first_delay": 30})
    await streaming.open()
    sink = Collected()
    relay = await relayed(streaming, sink, 3)
    opening = asyncio.create_task(waiting.open())
    await asyncio.sleep(0.1)
    await server.kill()
    with pytest.raises(UpstreamError) as died:
        await relay
    with pytest.raises(UpstreamError) as lost:
        await opening
    with pytest.raises(UpstreamError) as refused:
        await engine.call("text").open()
    assert [each.value.failure for each in (died, lost, refused)] == [
        Failure.DIED,
        Failure.LOST_BEFORE_ANSWER,
        Failure.CONNECT,
    ]
    assert b"[DONE]" not in b"".join(sink.writes)
    with pytest.raises(UpstreamError):
        await engine.probe()
    await server.start()
    back = time.monotonic()
    async with asyncio.timeout(10):
        while True:
            try:
                if (await engine.probe()).ready:
                    break
            except UpstreamError:
                await asyncio.sleep(0.1)
    assert time.monotonic() - back < 5
    assert (await engine.events("again")).text == "again"


async def test_calls_leave_no_task_behind(adapt: Adapt) -> None:
    engine = await adapt("ensemble")
    before = len(asyncio.all_tasks())
    for _ in range(20):
        await engine.events({"text": "abc", "cut": 1})
        call = engine.call({"text": "abc", "first_delay": 5})
        opening = asyncio.create_task(call.open())
        await asyncio.sleep(0.01)
        call.close()
        with pytest.raises(UpstreamError):
            await opening
    gc.collect()
    await asyncio.sleep(0.1)
    assert len(asyncio.all_tasks()) <= before
