"""Triton's gRPC API through the gateway, compared with Triton itself: a client must not notice the gateway."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc as sync_client
import tritonclient.grpc.aio as aio_client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from gateway.upstream.triton.raw import SERVICE
from tests.contract.grpc_front import (
    GrpcFront,
    channel,
    grpc_front,
    infer,
    patient,
    scripted,
    step,
    stream,
    stub,
    sync,
    without_name,
)

STATUSES = (("triton_grpc_error", "true"),)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def front() -> AsyncIterator[GrpcFront]:
    async with grpc_front() as started:
        yield started


UNARY: list[tuple[str, Any]] = [
    ("an answer", lambda p: scripted(f"{p}ensemble_whole", "hello", "id-1")),
    ("no id", lambda p: scripted(f"{p}ensemble_whole", "hello")),
    ("parameters", lambda p: scripted(f"{p}ensemble_whole", {"inputs": True}, "1", custom="x", priority=1)),
    ("a reserved parameter", lambda p: scripted(f"{p}ensemble_whole", "hello", "1", triton_x="x")),
    ("the model's failure", lambda p: scripted(f"{p}ensemble_whole", {"fail": "broken"}, "1")),
    ("the model's refusal", lambda p: scripted(f"{p}ensemble_whole", {"fail": "no", "invalid": True}, "1")),
    ("a decoupled model", lambda p: scripted(f"{p}ensemble", "hello", "1")),
    ("no inputs", lambda p: service_pb2.ModelInferRequest(model_name=f"{p}ensemble_whole")),
    ("a wrong version", lambda p: service_pb2.ModelInferRequest(model_name=f"{p}ensemble_whole", model_version="9")),
    ("no version", lambda p: service_pb2.ModelInferRequest(model_name=f"{p}ensemble_whole", model_version="x")),
]


@pytest.mark.parametrize(("what", "make"), UNARY, ids=[what for what, _ in UNARY])
async def test_a_unary_request_is_answered_as_by_triton(front: GrpcFront, what: str, make: Any) -> None:
    answers = []
    for address, prefix in front.sides:
        request = make(prefix)
        async with channel(address) as opened:
            answer = await infer(opened, request)
        response = without_name(answer.response, request.model_name) if answer.response is not None else None
        answers.append((answer.code, answer.details, response))
    assert answers[0] == answers[1]
    assert all(endpoint.phase == "ready" for endpoint in front.running.gateway.fleet.endpoints.values())


LATE_FAILURE = {"text": "abc", "cut": 1, "fail": "x", "fail_after": 2, "delay": 0.2}
"""Of an error that follows at once Triton makes a status that overtakes messages it has not written yet."""
STREAMS: list[tuple[str, Any]] = [
    ("one answer", lambda p: [scripted(f"{p}ensemble", {"text": "abcdef", "cut": 2}, "1")]),
    ("no answer", lambda p: []),
    ("an empty last answer", lambda p: [scripted(f"{p}ensemble", "x", "1", triton_enable_empty_final_response=True)]),
    ("a failure", lambda p: [scripted(f"{p}ensemble", {"text": "abc", "fail": "broken"}, "1")]),
    ("a late failure", lambda p: [scripted(f"{p}ensemble", LATE_FAILURE)]),
    ("a refusal", lambda p: [scripted(f"{p}ensemble", {"text": "abc", "fail": "no", "invalid": True}, "1")]),
    (
        "a wrong version",
        lambda p: [service_pb2.ModelInferRequest(model_name=f"{p}ensemble", model_version="9", id="1")],
    ),
    ("no inputs", lambda p: [service_pb2.ModelInferRequest(model_name=f"{p}ensemble", id="1")]),
    ("one that answers once", lambda p: [scripted(f"{p}ensemble_whole", "hello", "1")]),
    ("many in order", lambda p: [patient(f"{p}patient", 0.01, str(i)) for i in range(20)]),
    ("one that answers once and fails", lambda p: [scripted(f"{p}ensemble_whole", {"fail": "broken"}, "1")]),
    (
        "a sequence",
        lambda p: [step(f"{p}sequence_sum", i, 7, start=i == 1, end=i == 5, id_=str(i)) for i in range(1, 6)],
    ),
    ("a sequence that was never started", lambda p: [step(f"{p}sequence_sum", 1, 8, id_="1")]),
]


@pytest.mark.parametrize(("what", "make"), STREAMS, ids=[what for what, _ in STREAMS])
async def test_a_stream_is_answered_as_by_triton(front: GrpcFront, what: str, make: Any) -> None:
    answers = []
    for address, prefix in front.sides:
        requests = make(prefix)
        async with channel(address) as opened:
            answer = await stream(opened, requests)
        name = requests[0].model_name if requests else ""
        answers.append((answer.code, answer.details, [without_name(message, name) for message in answer.messages]))
    assert answers[0] == answers[1]
    assert all(endpoint.phase == "ready" for endpoint in front.running.gateway.fleet.endpoints.values())


CRASHING = ("one that answers once and fails", "a sequence that was never started")
"""What Triton 2.51 was seen to crash on when it was to report it as a status."""
WITH_STATUS = [case for case in STREAMS if case[0] not in CRASHING]


@pytest.mark.parametrize(("what", "make"), WITH_STATUS, ids=[what for what, _ in WITH_STATUS])
async def test_a_stream_that_asks_for_statuses_is_answered_as_by_triton(front: GrpcFront, what: str, make: Any) -> None:
    answers = []
    for address, prefix in front.sides:
        requests = make(prefix)
        async with channel(address) as opened:
            answer = await stream(opened, requests, STATUSES)
        name = requests[0].model_name if requests else ""
        answers.append((answer.code, answer.details, [without_name(message, name) for message in answer.messages]))
    assert answers[0] == answers[1]
    assert all(endpoint.phase == "ready" for endpoint in front.running.gateway.fleet.endpoints.values())


async def test_a_failure_of_a_model_that_answers_once_is_a_status_for_who_asks_for_it(front: GrpcFront) -> None:
    async with channel(front.running.grpc_address) as opened:
        answer = await stream(opened, [scripted("r-ensemble_whole", {"fail": "no", "invalid": True})], STATUSES)
    assert (answer.code, answer.details) == (grpc.StatusCode.INVALID_ARGUMENT, "no")


async def test_decoupled_answers_are_merged_as_they_come(front: GrpcFront) -> None:
    requests = [
        scripted("r-ensemble", {"text": text * 20, "cut": 1, "delay": 0.02}, text) for text in ("a", "b", "c", "d")
    ]
    async with channel(front.running.grpc_address) as opened:
        answer = await stream(opened, requests)
    assert {id_: answer.text(id_) for id_ in "abcd"} == {id_: id_.encode() * 20 for id_ in "abcd"}
    order = [message.infer_response.id for message in answer.messages]
    assert order != sorted(order)


async def test_an_unknown_route_ends_its_request_not_the_stream(front: GrpcFront) -> None:
    requests = [scripted("nope", "x", "1"), scripted("r-ensemble", "hello", "2")]
    async with channel(front.running.grpc_address) as opened:
        answer = await stream(opened, requests)
        unary = await infer(opened, requests[0])
    assert answer.code is grpc.StatusCode.OK
    assert "'nope' does not exist" in answer.of("1")[0].error_message
    assert answer.text("2") == b"hello"
    assert unary.code is grpc.StatusCode.NOT_FOUND


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
async def test_generated_tensors_are_answered_as_by_triton(front: GrpcFront, data: st.DataObject) -> None:
    request = data.draw(typed_requests())
    answers = []
    for address, prefix in front.sides:
        request.model_name = prefix + "typed_identity"
        async with channel(address) as opened:
            answer = await infer(opened, request)
        response = without_name(answer.response, request.model_name) if answer.response is not None else None
        answers.append((answer.code, answer.details, response))
    assert answers[0] == answers[1]


_SIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip


@st.composite
def typed_requests(draw: st.DrawFn) -> Any:
    """A request to `typed_identity`, right in most ways."""
    request = service_pb2.ModelInferRequest(id=draw(st.text(max_size=5)))
    raw = draw(st.booleans())
    for datatype in draw(st.lists(st.sampled_from([*_SIZES, "BYTES"]), max_size=4)):
        name = ("STRING" if datatype == "BYTES" else datatype) + draw(st.sampled_from(["_IN"] * 9 + ["_UNKNOWN"]))
        shape = draw(st.lists(st.integers(0, 3), min_size=2, max_size=2 + draw(st.integers(0, 10)) // 10))
        count = int(np.prod(shape)) + draw(st.sampled_from([0] * 9 + [1]))
        tensor = request.inputs.add(name=name, datatype=draw(st.sampled_from([datatype] * 9 + ["INT32"])))
        tensor.shape.extend(shape)
        if datatype == "BYTES":
            elements = [draw(st.binary(max_size=6)) for _ in range(count)]
            if raw:
                request.raw_input_contents.append(b"".join(len(e).to_bytes(4, "little") + e for e in elements))
            else:
                tensor.contents.bytes_contents.extend(elements)
        elif raw or datatype in ("FP16", "UINT16", "INT8"):
            size = _SIZES[datatype] * count
            payload = draw(st.binary(min_size=size, max_size=size))
            request.raw_input_contents.append(bytes(b & 1 for b in payload) if datatype == "BOOL" else payload)
        else:
            values = [draw(st.integers(0, 1)) for _ in range(count)]
            field = {
                "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT32": "uint_contents", "INT16": "int_contents",
                "UINT64": "uint64_contents", "INT32": "int_contents", "INT64": "int64_contents",
                "FP32": "fp32_contents", "FP64": "fp64_contents",
            }[datatype]  # fmt: skip
            getattr(tensor.contents, field).extend(values)
        if draw(st.booleans()):
            request.outputs.add(name=name.replace("_IN", "_OUT"))
    for key in draw(st.lists(st.sampled_from(["custom", "timeout", "priority", "triton_forbidden"]), max_size=2)):
        if key == "custom":
            request.parameters[key].string_param = "x"
        else:
            request.parameters[key].int64_param = 1_000_000 if key == "timeout" else 1
    return request


def _tensor(name: str, values: Any, datatype: str) -> Any:
    tensor = sync_client.InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return tensor


async def test_tritons_blocking_client_works(front: GrpcFront) -> None:
    def use() -> None:
        with sync(front.running.grpc_address) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("r-ensemble")
            assert not client.is_model_ready("nope")
            assert client.get_model_metadata("r-ensemble").name == "r-ensemble"
            assert client.get_model_config("r-ensemble").config.name == "r-ensemble"
            assert {m.name for m in client.get_inference_statistics("r-ensemble").model_stats} == {"r-ensemble"}
            assert {m.name for m in client.get_inference_statistics().model_stats} >= {"r-ensemble", "r-patient"}
            assert {m.name: m.state for m in client.get_model_repository_index().models}["r-ensemble"] == "READY"
            values = np.array([["ä".encode(), b"\x00x"]], dtype=np.object_)
            result = client.infer(
                "r-typed_identity", [_tensor("STRING_IN", values, "BYTES")], compression_algorithm="gzip"
            )
            assert result.as_numpy("STRING_OUT").tolist() == values.tolist()
            refusals: list[Callable[[], Any]] = [
                lambda: client.load_model("r-ensemble"),
                lambda: client.unload_model("r-ensemble"),
                lambda: client.register_system_shared_memory("x", "/x", 10),
                lambda: client.get_cuda_shared_memory_status(),
                lambda: client.update_log_settings({"log_info": True}),
                lambda: client.get_trace_settings(),
            ]
            for refused in refusals:
                with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
                    refused()

    await asyncio.to_thread(use)


async def test_tritons_blocking_client_streams(front: GrpcFront) -> None:
    def use() -> list[Any]:
        answers: queue.Queue[Any] = queue.Queue()
        with sync(front.running.grpc_address) as client:
            client.start_stream(callback=lambda result, error: answers.put(error or result))
            for i in range(1, 5):
                client.async_stream_infer(
                    "r-sequence_sum",
                    [_tensor("VALUE", np.array([[i]], dtype=np.int32), "INT32")],
                    sequence_id=99,
                    sequence_start=i == 1,
                    sequence_end=i == 4,
                )
            got = [answers.get(timeout=10) for _ in range(4)]
            client.stop_stream()
        return [result.as_numpy("SUM").item() for result in got]

    assert await asyncio.to_thread(use) == [1, 3, 6, 10]


async def test_tritons_async_client_streams(front: GrpcFront) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for text in ("one", "two"):
            yield {
                "model_name": "r-ensemble",
                "inputs": [
                    _tensor("text_input", np.array([[text.encode()]], dtype=np.object_), "BYTES"),
                    _tensor("max_tokens", np.array([[5]], dtype=np.int32), "INT32"),
                ],
                "request_id": text,
            }

    async with aio_client.InferenceServerClient(front.running.grpc_address) as client:
        answers = {}
        async for result, error in client.stream_infer(requests()):
            assert error is None
            answers[result.get_response().id] = result.as_numpy("text_output").item()
    assert answers == {"one": b"one", "two": b"two"}


@pytest.mark.parametrize("sequence", [4711, "four"])
async def test_a_sequence_stays_at_one_engine_whichever_call_it_comes_by(front: GrpcFront, sequence: int | str) -> None:
    async with channel(front.running.grpc_address) as opened:
        endpoints = set()
        total = 0
        for i in range(1, 9):
            total += i
            request = step("r-sequence_sum", i, sequence, start=i == 1, end=i == 8)
            answer = await infer(opened, request)
            assert answer.response is not None, answer.details
            assert answer.response.raw_output_contents[0] == total.to_bytes(4, "little")
            endpoints.add(answer.metadata["x-headrace-endpoint"])
    assert len(endpoints) == 1


async def test_requests_without_prompt_spread_over_the_engines(front: GrpcFront) -> None:
    async with channel(front.running.grpc_address) as opened:
        answers = [await infer(opened, patient("r-patient", 0)) for _ in range(20)]
    assert {answer.metadata["x-headrace-endpoint"] for answer in answers} == {"patient-0", "patient-1"}


async def test_a_conversation_stays_at_its_engine(front: GrpcFront) -> None:
    async with channel(front.running.grpc_address) as opened:
        answers = [await infer(opened, scripted("r-ensemble_whole", "the same prompt")) for _ in range(6)]
    assert len({answer.metadata["x-headrace-endpoint"] for answer in answers}) == 1


async def test_answers_say_where_they_come_from_and_carry_the_clients_request_id(front: GrpcFront) -> None:
    asked = (("x-request-id", "mine"), ("authorization", "Bearer secret"))
    async with channel(front.running.grpc_address) as opened:
        answer = await infer(opened, scripted("r-ensemble_whole", "hello"), asked)
        streamed = await stream(opened, [scripted("r-ensemble", "hello")], asked)
        refused = await infer(opened, scripted("r-ensemble_whole", {"fail": "no"}), asked)
    for metadata, route in (
        (answer.metadata, "r-ensemble_whole"), (streamed.metadata, "r-ensemble"), (refused.metadata, "r-ensemble_whole")
    ):  # fmt: skip
        assert metadata["x-request-id"] == "mine"
        assert metadata["x-headrace-endpoint"].startswith(route.removeprefix("r-"))


async def test_requests_are_counted(front: GrpcFront) -> None:
    def count(status: str, api: str = "kserve") -> float:
        labels = {"api": api, "route": "r-ensemble", "status": status}
        return front.running.gateway.registry.get_sample_value("headrace_requests_total", labels) or 0

    def first_tokens() -> float:
        labels = {"api": "kserve", "route": "r-ensemble"}
        name = "headrace_time_to_first_token_seconds_count"
        return front.running.gateway.registry.get_sample_value(name, labels) or 0

    before = count("200"), count("501"), first_tokens()
    async with channel(front.running.grpc_address) as opened:
        await stream(opened, [scripted("r-ensemble", "hello", "1"), scripted("r-ensemble", "hello", "2")])
        await infer(opened, scripted("r-ensemble", "hello"))
    assert (count("200"), count("501"), first_tokens()) == (before[0] + 2, before[1] + 1, before[2] + 2)


async def test_the_health_service_answers(front: GrpcFront) -> None:
    async with channel(front.running.grpc_address) as opened:
        assert await opened.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await opened.unary_unary("/grpc.health.v1.Health/Watch")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_what_is_no_protobuf_is_refused(front: GrpcFront) -> None:
    async with channel(front.running.grpc_address) as opened:
        for method in ("ModelInfer", "ModelMetadata", "RepositoryIndex"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await opened.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"\xff\xff\xff")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_waits_for_its_open_requests_after_the_client_closed_its_side(front: GrpcFront) -> None:
    async with channel(front.running.grpc_address) as opened:
        answer = await stream(opened, [scripted("r-ensemble", {"text": "late", "first_delay": 0.5}, "1")])
    assert answer.code is grpc.StatusCode.OK
    assert answer.text("1") == b"late"


async def test_clients_may_ping_as_tritons_clients_can_be_told_to(front: GrpcFront) -> None:
    options = [
        ("grpc.keepalive_time_ms", 200),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(front.running.grpc_address, options=options) as opened:
        call = stub(opened).ModelInfer(patient("r-patient", 3))
        assert (await call).outputs[0].name == "SLEPT"


async def test_an_operator_ends_a_call_and_a_request_of_a_stream_and_the_engine_is_told(front: GrpcFront) -> None:
    url = f"{front.running.admin_url}/admin/v1/requests"
    before = await front.cancelled("ensemble")
    async with aiohttp.ClientSession() as session, channel(front.running.grpc_address) as opened:

        async def end(state: str) -> dict[str, Any]:
            async with asyncio.timeout(5):
                while True:
                    async with session.get(url, params={"state": state}) as response:
                        if rows := (await response.json())["requests"]:
                            break
                    await asyncio.sleep(0.01)
            async with session.delete(f"{url}/{rows[0]['id']}") as response:
                assert response.status == 200
            row: dict[str, Any] = rows[0]
            return row

        unary = asyncio.create_task(infer(opened, patient("r-patient", 5), (("x-request-id", "mine"),)))
        row = await end("prefill")
        assert (row["protocol"], row["path"], row["client"]) == ("grpc", f"/{SERVICE}/ModelInfer", "127.0.0.1")
        assert (row["request_id"], row["model"], row["engine"]) == ("mine", "patient", "triton")
        answer = await unary
        assert (answer.code, answer.details) == (
            grpc.StatusCode.CANCELLED,
            "The operator of this gateway has ended the request.",
        )
        script = {"text": "x" * 1000, "cut": 1, "delay": 0.05}
        streamed = asyncio.create_task(stream(opened, [scripted("r-ensemble", script, "a")]))
        assert (await end("decode"))["path"] == f"/{SERVICE}/ModelStreamInfer"
        last = (await streamed).messages[-1]
        assert last.error_message == "The operator of this gateway has ended the request."
    await front.until_cancelled("ensemble", before + 1)
    await front.running.until_idle()
