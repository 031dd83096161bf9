"""What a call makes of streams that no real Triton can be brought to send.

The RPC is a fake that hands on prepared messages, because a server that loses a request silently, floods or garbles an
answer cannot be had on demand; everything a real server does is tested against one in tests/contract.
"""

import asyncio
import struct
from typing import Any

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2

from gateway.relay.accounting import Account
from gateway.upstream.base import EngineRequest, Failure, UpstreamError
from gateway.upstream.http2.grpc_stream import CallEnd, Cause, Receiver
from gateway.upstream.triton import choices
from gateway.upstream.triton.answer import STOP_GRACE
from gateway.upstream.triton.call import TritonCall
from gateway.upstream.triton.cancels import GAP_S, STOP_LIMIT, Canceller
from gateway.upstream.triton.contract import Contract, Tensor
from gateway.upstream.triton.failures import from_message, from_status, is_refusal
from gateway.upstream.triton.vitals import Vitals
from router.fleet import Endpoint, EndpointState, Pool
from router.spec.documents import EndpointFields
from router.spec.fleet import PoolSpec

SPEC = PoolSpec(protocol="triton", model="m")
ENDPOINT = Endpoint("e", "p", EndpointFields(id="e", pool="p"), EndpointState(), b"e")
POOL = Pool.of("p", SPEC, (ENDPOINT,))
CONTRACT = Contract(
    "ensemble", "m", True, True, False, {"prompt": Tensor("text_input", "BYTES")}, {"text": "text_output"}
)


def message(text: bytes | None, *, final: bool = False) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = final
    if text is not None:
        response.infer_response.outputs.add(name="text_output", datatype="BYTES")
        response.infer_response.raw_output_contents.append(struct.pack("<I", len(text)) + text)
    return response


OK = CallEnd(Cause.STATUS, grpc.StatusCode.OK, "")


class FakeRpc:
    """An RPC that answers with `messages`, some to each read of the socket, and then ends with `end`. Also the method
    that starts it."""

    def __init__(self, messages: list[Any], end: CallEnd = OK, *, at_once: int = 1) -> None:
        self.messages = messages
        self.cancelled = False
        self.ended = False
        self.paused = False
        self._end = end
        self._at_once = at_once

    async def connect(self, timeout: float) -> None:
        assert timeout == 2

    def start(self, receiver: Receiver, _: Any, metadata: tuple[tuple[str, str], ...]) -> "FakeRpc":
        assert dict(metadata) == {"traceparent": "00-1"}
        self._receiver = receiver
        self._turn = asyncio.get_running_loop().call_soon(self._read)
        return self

    def decode(self, message: bytes) -> Any:
        return service_pb2.ModelStreamInferResponse.FromString(message)

    def _read(self) -> None:
        if self.cancelled or self.ended or self.paused:
            return
        read, self.messages[: self._at_once] = self.messages[: self._at_once], []
        if read:
            self._receiver.messages_received([message.SerializeToString() for message in read])
            self._turn = asyncio.get_running_loop().call_soon(self._read)
        else:
            self.ended = True
            self._receiver.call_ended(self._end)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self._turn.cancel()
            self._read()

    def cancel(self) -> bool:
        self.cancelled = True
        return True

    def done(self) -> bool:
        return self.cancelled or self.ended


class Sink:
    chunks = None

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    def write(self, payload: bytes) -> None:
        self.writes.append(payload)


def made(rpc: FakeRpc, *, stream: bool = True, **body: Any) -> TritonCall:
    fields = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in {"prompt": "x", **body}.items()}
    headers = (("traceparent", "00-1"),)
    account = Account(shows_usage=True)
    request = EngineRequest(
        "completions", fields, stream, True, "r", headers, ENDPOINT, POOL, account=account, connect_timeout=2
    )

    vitals = Vitals("e", asyncio.get_running_loop().time)
    return TritonCall(request, CONTRACT, "r.1", rpc, Canceller(), vitals, lambda error, dead: None)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_end_without_text_and_final_flag_is_an_error(stream: bool) -> None:
    with pytest.raises(UpstreamError) as caught:
        await made(FakeRpc([message(b"")]), stream=stream).open()
    assert caught.value.failure is Failure.LOST_BEFORE_ANSWER


async def test_an_end_after_text_is_an_end() -> None:
    call, sink = made(FakeRpc([message(b"text")])), Sink()
    await call.open()
    await call.relay(sink)
    assert sink.body.endswith(b"data: [DONE]\n\n")


async def test_the_stream_is_read_to_its_end_after_the_final_flag() -> None:
    rpc = FakeRpc([message(b"text"), message(None, final=True), message(None)])
    call = made(rpc)
    await call.open()
    await call.relay(Sink())
    assert rpc.messages == []
    assert not rpc.cancelled


async def test_an_engine_that_ignores_a_stop_string_is_cut_off() -> None:
    rpc = FakeRpc([message(b"good END"), *[message(b"more")] * 100])
    call, sink = made(rpc, stop="END"), Sink()
    await call.open()
    await call.relay(sink)
    call.close()
    assert b'"text":"good "' in sink.body
    assert b"more" not in sink.body
    assert len(rpc.messages) == 100 - STOP_GRACE - 1
    assert rpc.cancelled


async def test_a_collected_answer_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "ANSWER_LIMIT", 1000)
    with pytest.raises(UpstreamError, match="too long") as caught:
        await made(FakeRpc([message(b"x" * 300)] * 5), stream=False).open()
    assert caught.value.failure is Failure.PROTOCOL


async def test_a_garbled_tensor_breaks_the_protocol() -> None:
    garbled = message(b"text")
    garbled.infer_response.raw_output_contents[0] = b"\xff\xff\xff\xffx"
    with pytest.raises(UpstreamError) as caught:
        await made(FakeRpc([garbled])).open()
    assert caught.value.failure is Failure.PROTOCOL


@pytest.mark.parametrize(("at_once", "events"), [(1, [1, 1, 1, 3]), (2, [2, 4]), (3, [3, 3]), (4, [6])])
async def test_the_events_of_one_read_are_one_write(at_once: int, events: list[int]) -> None:
    sink = Sink()
    call = made(FakeRpc([*map(message, (b"a", b"b", b"c")), message(b"d", final=True)], at_once=at_once))
    await call.open()
    await call.relay(sink)
    assert [write.count(b"data: ") for write in sink.writes] == events
    assert sink.body.endswith(b"data: [DONE]\n\n")


async def test_what_came_before_an_error_in_one_read_is_passed_on_before_it() -> None:
    garbled = message(b"text")
    garbled.infer_response.raw_output_contents[0] = b"\xff\xff\xff\xffx"
    call, sink = made(FakeRpc([message(b"a"), message(b"b"), garbled], at_once=3)), Sink()
    await call.open()
    with pytest.raises(UpstreamError, match="malformed"):
        await call.relay(sink)
    assert b'"text":"b"' in sink.body
    assert b"[DONE]" not in sink.body


async def test_a_message_that_is_no_protobuf_breaks_the_protocol() -> None:
    rpc = FakeRpc([message(b"a")])
    rpc.decode = lambda message: service_pb2.ModelStreamInferResponse.FromString(b"\xff")  # type: ignore[method-assign]
    with pytest.raises(UpstreamError) as caught:
        await made(rpc).open()
    assert caught.value.failure is Failure.PROTOCOL


async def test_a_client_that_fails_in_a_write_is_told_to_whoever_relays() -> None:
    call, sink = made(FakeRpc([message(b"a"), message(b"b")])), Sink()
    await call.open()

    def gone(payload: bytes) -> None:
        if sink.writes:
            raise RuntimeError("the client has gone")
        sink.writes.append(b"")

    sink.write = gone  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await call.relay(sink)


async def test_a_paused_call_hands_nothing_on_and_is_ended_by_an_abort() -> None:
    call, sink = made(FakeRpc([message(b"a"), *[message(b"b")] * 10])), Sink()
    await call.open()
    call.pause()
    relay = asyncio.create_task(call.relay(sink))
    await asyncio.sleep(0.01)
    assert len(sink.writes) == 1
    call.abort(UpstreamError(Failure.TIMEOUT, "too slow", 504))
    with pytest.raises(UpstreamError, match="too slow"):
        await relay


async def test_a_complete_answer_waits_for_no_client_to_end() -> None:
    rpc = FakeRpc([message(b"a"), message(b"b", final=True)], at_once=2)
    call = made(rpc)
    await call.open()
    call.pause()
    await call.relay(Sink())
    assert rpc.ended


@pytest.mark.parametrize(
    ("end", "before", "after"),
    [
        (CallEnd(Cause.STATUS, grpc.StatusCode.INTERNAL, "boom"), Failure.ENGINE, Failure.ENGINE),
        (CallEnd(Cause.BROKEN, grpc.StatusCode.UNAVAILABLE, "x"), Failure.LOST_BEFORE_ANSWER, Failure.DIED),
        (CallEnd(Cause.REFUSED, grpc.StatusCode.UNAVAILABLE, "x"), Failure.BUSY, Failure.DIED),
        (CallEnd(Cause.MALFORMED, grpc.StatusCode.INTERNAL, "x"), Failure.PROTOCOL, Failure.PROTOCOL),
        (CallEnd(Cause.CLOSED, grpc.StatusCode.UNAVAILABLE, "x"), Failure.DIED, Failure.DIED),
    ],
)
async def test_how_a_call_ended_becomes_what_may_be_done_about_it(
    end: CallEnd, before: Failure, after: Failure
) -> None:
    with pytest.raises(UpstreamError) as caught:
        await made(FakeRpc([], end)).open()
    assert caught.value.failure is before
    call = made(FakeRpc([message(b"a")], end))
    await call.open()
    with pytest.raises(UpstreamError) as caught:
        await call.relay(Sink())
    assert caught.value.failure is after


async def test_only_reading_moves_the_last_read_time() -> None:
    call = made(FakeRpc([message(b"a", final=True)]))
    created = call.last_read
    await asyncio.sleep(0.01)
    await call.open()
    assert call.last_read > created


CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "before", "after"),
    [
        (CODE.UNAVAILABLE, "failed to connect to all addresses; last error: refused", Failure.CONNECT, Failure.DIED),
        (CODE.UNAVAILABLE, "Socket closed", Failure.LOST_BEFORE_ANSWER, Failure.DIED),
        (CODE.UNAVAILABLE, None, Failure.LOST_BEFORE_ANSWER, Failure.DIED),
        (CODE.INTERNAL, "Received RST_STREAM with error code 2", Failure.LOST_BEFORE_ANSWER, Failure.DIED),
        (CODE.UNAVAILABLE, "Exceeds maximum queue size", Failure.BUSY, Failure.DIED),
        (CODE.INTERNAL, "Maximum queue size of 64 reached", Failure.BUSY, Failure.ENGINE),
        (CODE.UNAVAILABLE, "GRPC server is shutting down and has stopped accepting", Failure.CONNECT, Failure.DIED),
        (CODE.CANCELLED, "CANCELLED", Failure.BUSY, Failure.DIED),
        (CODE.NOT_FOUND, "Request for unknown model: 'm' is not found", Failure.CONNECT, Failure.ENGINE),
        (CODE.INVALID_ARGUMENT, "Stub process 'm_0_0' is not healthy.", Failure.CONNECT, Failure.DIED),
        (CODE.INVALID_ARGUMENT, "unexpected shape for input", Failure.ENGINE, Failure.ENGINE),
        (CODE.RESOURCE_EXHAUSTED, "Received message larger than max", Failure.PROTOCOL, Failure.PROTOCOL),
        (CODE.INTERNAL, "boom", Failure.ENGINE, Failure.ENGINE),
    ],
)
def test_a_status_becomes_what_may_be_done_about_it(
    code: grpc.StatusCode, details: str | None, before: Failure, after: Failure
) -> None:
    assert from_status(code, details, endpoint="e", received=False).failure is before
    assert from_status(code, details, endpoint="e", received=True).failure is after


def test_an_engines_address_is_not_told() -> None:
    text = "recvmsg: ipv4:10.1.2.3:8001: Connection reset by peer"
    message = from_status(CODE.UNAVAILABLE, text, endpoint="e", received=True).message
    assert "10.1.2.3" not in message
    assert "Connection reset by peer" in message


def test_the_id_before_a_refusal_is_taken_off_and_nothing_else_a_client_wrote() -> None:
    full = "Exceeds maximum queue size"
    for id_, text in (("a", f"[request id: a] {full}"), ("", f"[request id: <id_unknown>] {full}"), ("x] y", full)):
        assert from_message(text, endpoint="e", received=False, request_id=id_).failure is Failure.BUSY
    stopping = "x] Server is stopping"
    text = f"[request id: {stopping}] expected number of inputs between 1 and 2 but got 0"
    assert from_message(text, endpoint="e", received=False, request_id=stopping).failure is Failure.ENGINE
    assert is_refusal(text, stopping)
    assert not is_refusal(f"failed: {full}", "a")


def test_an_in_stream_message_is_judged_by_its_words() -> None:
    assert from_message("Exceeds maximum queue size", endpoint="e", received=False).status == 429
    assert from_message("Request cancelled by client", endpoint="e", received=False).failure is Failure.BUSY
    assert from_message("Request cancelled by client", endpoint="e", received=True).failure is Failure.DIED
    assert from_message("boom", endpoint="e", received=True).failure is Failure.ENGINE


async def test_an_old_servers_cancels_wait_for_one_another_and_a_new_ones_do_not() -> None:
    canceller = Canceller()
    canceller.learn_version("2.51.0")
    rpcs = [FakeRpc([]) for _ in range(3)]
    for rpc in rpcs:
        canceller.cancel(rpc)
    assert [rpc.cancelled for rpc in rpcs] == [True, False, False]
    await asyncio.sleep(4 * GAP_S)
    assert [rpc.cancelled for rpc in rpcs] == [True, True, True]
    canceller.learn_version("2.53.0")
    rpcs = [FakeRpc([]) for _ in range(3)]
    for rpc in rpcs:
        canceller.cancel(rpc)
    assert [rpc.cancelled for rpc in rpcs] == [True, True, True]


async def test_a_finished_rpc_takes_no_turn() -> None:
    canceller = Canceller()
    finished, live = FakeRpc([]), FakeRpc([])
    finished.cancelled = True
    for _ in range(100):
        canceller.cancel(finished)
    canceller.cancel(live)
    assert live.cancelled


class FakeStops:
    """Stop requests that are never answered, or that cannot be sent."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sent: list[str] = []
        self.error = error

    def __call__(self, request_id: str, timeout: float) -> "FakeStops":
        assert timeout > 0
        self.sent.append(request_id)
        return self

    async def read(self) -> Any:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


async def test_a_cancel_with_an_id_is_a_stop_request_too_and_those_have_a_limit() -> None:
    canceller, stops = Canceller(), FakeStops()
    canceller.learn_version("2.53.0")
    canceller.send_stop = stops
    canceller.cancel(FakeRpc([]))
    finished = FakeRpc([])
    finished.cancelled = True
    canceller.cancel(finished, "finished")
    rpcs = [FakeRpc([]) for _ in range(STOP_LIMIT + 10)]
    for index, rpc in enumerate(rpcs):
        canceller.cancel(rpc, str(index))
    await asyncio.sleep(0)
    assert stops.sent == [str(index) for index in range(STOP_LIMIT)]
    assert all(rpc.cancelled for rpc in rpcs)
    for task in tuple(canceller._stopping):
        task.cancel()
    await asyncio.gather(*canceller._stopping, return_exceptions=True)
    assert not canceller._stopping


async def test_a_stop_request_that_fails_troubles_nobody() -> None:
    canceller = Canceller()
    canceller.send_stop = FakeStops(grpc.aio.UsageError("closed"))
    rpc = FakeRpc([])
    canceller.cancel(rpc, "r")
    await canceller.close()
    assert rpc.cancelled
