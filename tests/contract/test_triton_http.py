"""The Triton adapter over HTTP (`transport: http`), against a real Triton: the answer is the same as over gRPC, for an
endpoint that has both addresses and for one that has only the HTTP one."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.triton.generate import GenerateCall
from tests.contract.triton_adapter import Adapt, Adapter, Collected, Events
from tests.contract.triton_models_server import TritonModels, triton_models

TEXT = "The quick brown 🦊 jumps; 快速的棕色狐狸。\n    def f(x): return {'é': \"\\\\\"}\t  end "


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[TritonModels]:
    async with triton_models("llmapi", "ensemble") as running:
        yield running


@pytest.fixture(params=[("grpc", "http"), ("http",)], ids=["both addresses", "http alone"])
def apis(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


async def over_http(adapt: Adapt, apis: tuple[str, ...] = ("grpc", "http"), **pool: Any) -> Adapter:
    made = await adapt("llmapi", apis=apis, transport="http", **pool)
    assert isinstance(made.call("x"), GenerateCall)
    return made


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 64, None])
async def test_the_text_comes_byte_for_byte(adapt: Adapt, apis: tuple[str, ...], cut: int | None) -> None:
    engine = await over_http(adapt, apis)
    script = {"text": TEXT, "cut": cut}
    for api in ("completions", "chat.completions"):
        streamed = await engine.events(script, api=api)
        assert (streamed.text, streamed.finish, streamed.done) == (TEXT, "stop", True)
        whole = await engine.whole(script, api=api)
        choice = whole["choices"][0]
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == TEXT
        assert choice["finish_reason"] == "stop"


async def test_the_model_gets_the_same_tensors_as_over_grpc(adapt: Adapt, apis: tuple[str, ...]) -> None:
    asked: dict[str, Any] = {
        "seed": -1, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "stop": ["\n\n", "é"], "frequency_penalty": -1,
        "max_tokens": 77,
    }  # fmt: skip
    over_grpc = await (await adapt("llmapi")).inputs(**asked)
    got = await (await over_http(adapt, apis)).inputs(**asked)
    for inputs in (over_grpc, got):
        del inputs["id"], inputs["asked"]
    assert got == over_grpc
    assert got["sampling_param_seed"] == 2**64 - 1


async def test_a_stop_string_ends_the_text_before_it(adapt: Adapt) -> None:
    engine = await over_http(adapt)
    endless = {"text": "one two STOP" + " three" * 1000, "cut": 2, "ignore_stop": True, "delay": 0.01}
    assert (await engine.events(endless, stop="STOP")).text == "one two "
    assert (await engine.whole(endless, stop="STOP"))["choices"][0]["text"] == "one two "


async def test_the_limit_of_tokens_is_told(adapt: Adapt) -> None:
    events = await (await over_http(adapt)).events({"text": "abcdef", "cut": 1, "finish": "length"}, max_tokens=3)
    assert (events.text, events.finish) == ("abc", "length")


async def test_an_abort_raises_its_error(adapt: Adapt) -> None:
    call = (await over_http(adapt)).call({"text": "x" * 1000, "cut": 1, "delay": 0.05})
    await call.open()
    sink = Collected()
    relay = asyncio.create_task(call.relay(sink))
    await asyncio.sleep(0.2)
    call.abort(UpstreamError(Failure.TIMEOUT, "too slow", 504))
    with pytest.raises(UpstreamError, match="too slow"):
        await relay
    call.close()
    assert b"[DONE]" not in b"".join(sink.writes)
    assert set(Events.of(b"".join(sink.writes)).text) == {"x"}


async def test_a_paused_stream_goes_on_where_it_was(adapt: Adapt) -> None:
    call = (await over_http(adapt)).call({"text": "abcdefgh", "cut": 1, "delay": 0.02})
    await call.open()
    sink = Collected()
    relay = asyncio.create_task(call.relay(sink))
    call.pause()
    await asyncio.sleep(0.1)
    writes = len(sink.writes)
    await asyncio.sleep(0.1)
    assert len(sink.writes) == writes
    call.resume()
    await relay
    call.close()
    assert Events.of(b"".join(sink.writes)).text == "abcdefgh"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("message", "failure", "status"),
    [
        ("the sampler is broken", Failure.ENGINE, 400),  # Triton says 400 of every failure of a model
        ("Exceeds maximum queue size", Failure.BUSY, 429),
        ("server is shutting down", Failure.CONNECT, 503),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    adapt: Adapt, message: str, failure: Failure, status: int, stream: bool
) -> None:
    call = (await over_http(adapt)).call({"text": "x", "fail": message}, stream=stream)
    with pytest.raises(UpstreamError) as caught:
        await call.open()
    call.close()
    assert (caught.value.failure, caught.value.status) == (failure, status)


async def test_an_error_in_mid_stream_is_no_end(adapt: Adapt) -> None:
    engine = await over_http(adapt)
    script = {"text": "abcdef", "cut": 1, "fail": "out of memory", "fail_after": 3}
    call = engine.call({**script, "delay": 0.05})  # so that the error is not read together with the first text
    await call.open()
    sink = Collected()
    with pytest.raises(UpstreamError, match="out of memory") as caught:
        await call.relay(sink)
    call.close()
    assert caught.value.failure is Failure.ENGINE
    stream = Events.of(b"".join(sink.writes))
    assert (stream.text, stream.finish, stream.done) == ("abc", None, False)
    whole = engine.call(script, stream=False)
    with pytest.raises(UpstreamError, match="out of memory"):
        await whole.open()
    whole.close()


async def test_taking_back_text_breaks_the_protocol(adapt: Adapt) -> None:
    call = (await over_http(adapt)).call({"text": "abcdef", "cut": 2, "delay": 0.05, "revise": True})
    await call.open()
    with pytest.raises(UpstreamError) as caught:
        await call.relay(Collected())
    call.close()
    assert caught.value.failure is Failure.PROTOCOL


async def test_a_stream_without_text_is_no_answer(adapt: Adapt) -> None:
    engine = await over_http(adapt)
    for stream in (True, False):
        call = engine.call({"text": ""}, stream=stream)
        with pytest.raises(UpstreamError) as caught:
            await call.open()
        call.close()
        assert caught.value.failure is Failure.LOST_BEFORE_ANSWER


async def test_an_ensemble_is_not_served_over_http(adapt: Adapt) -> None:
    report = await (await adapt("ensemble", transport="http")).probe()
    assert (report.ready, report.capabilities) == (True, frozenset())
    assert "transport grpc" in report.detail


async def test_an_unknown_model_is_tried_elsewhere_and_not_ready(adapt: Adapt, apis: tuple[str, ...]) -> None:
    engine = await over_http(adapt, apis)
    pool = replace(engine.pool, spec=msgspec.structs.replace(engine.pool.spec, model="none"))
    other = Adapter(engine.engine, engine.endpoint, pool)
    assert not (await other.probe()).ready


async def test_a_server_that_dies_ends_its_streams_with_errors_and_is_found_again(
    server: TritonModels, adapt: Adapt, apis: tuple[str, ...]
) -> None:
    engine = await over_http(adapt, apis)
    streaming, waiting = engine.call({"text": "x" * 1000, "cut": 1, "delay": 0.05}), engine.call({"first_delay": 30})
    await streaming.open()
    sink = Collected()
    relay = asyncio.create_task(streaming.relay(sink))
    opening = asyncio.create_task(waiting.open())
    await asyncio.sleep(0.2)
    await server.kill()
    with pytest.raises(UpstreamError) as died:
        await relay
    with pytest.raises(UpstreamError) as lost:
        await opening
    with pytest.raises(UpstreamError) as refused:
        await engine.call("text").open()
    assert [each.value.failure for each in (died, lost, refused)] == [
        Failure.DIED, Failure.LOST_BEFORE_ANSWER, Failure.CONNECT,
    ]  # fmt: skip
    assert b"[DONE]" not in b"".join(sink.writes)
    with pytest.raises(UpstreamError):
        await engine.probe()
    await server.start()
    async with asyncio.timeout(10):
        while True:
            try:
                if (await engine.probe()).ready:
                    break
            except UpstreamError:
                await asyncio.sleep(0.1)
    assert (await engine.events("again")).text == "again"
    streaming.close()
    waiting.close()


async def test_a_model_whose_process_died_is_not_ready_until_it_generates_again(
    server: TritonModels, adapt: Adapt, apis: tuple[str, ...]
) -> None:
    engine = await over_http(adapt, apis)
    dying = engine.call({"text": "abc", "cut": 1, "die": 1})
    await dying.open()
    await asyncio.sleep(1.5)  # the model's process ends half a second after its first message
    with pytest.raises(UpstreamError) as caught:
        await engine.call("after").open()
    assert (caught.value.failure, caught.value.code) == (Failure.CONNECT, "model_process_died")
    relay = asyncio.create_task(dying.relay(Collected()))
    report = await engine.probe()
    assert not report.ready
    assert "has died" in report.detail
    with pytest.raises(UpstreamError, match="has died"):
        await relay
    dying.close()
    await server.reload("llmapi")
    assert (await engine.probe()).ready
    assert (await engine.events("alive")).text == "alive"
