"""What routing reads from inference requests, and the edits on answers, against protobuf itself."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from gateway.grpc import wire
from router.kserve import MalformedError, query_view, read_infer, text_of
from router.prefix import chain_seed, conversation_key, session_key

NAMES = st.text(max_size=8)
OTHER_TENSORS = st.sampled_from(["max_tokens", "stop", "IN", ""])


def bytes_tensor(*elements: bytes) -> bytes:
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)


def add_input(request: Any, name: str, datatype: str, raw: bytes | None) -> Any:
    tensor = request.inputs.add(name=name, datatype=datatype)
    tensor.shape.extend([1, 1])
    if raw is not None:
        request.raw_input_contents.append(raw)
    return tensor


@st.composite
def requests(draw: st.DrawFn) -> tuple[Any, bytes]:
    """A request and the prompt it holds."""
    request = service_pb2.ModelInferRequest(model_name=draw(NAMES), id=draw(NAMES), model_version=draw(NAMES))
    raw = draw(st.booleans())
    prompt = b""
    before, after = draw(st.lists(OTHER_TENSORS, max_size=3)), draw(st.lists(OTHER_TENSORS, max_size=3))
    for name in (*before, "?", *after):
        if name != "?":
            payload = draw(st.binary(max_size=16))
            tensor = add_input(request, name, "FP32", payload if raw else None)
            if draw(st.booleans()):
                tensor.parameters["other"].string_param = "x"
            continue
        text = draw(st.binary(max_size=40))
        kind = draw(st.sampled_from(["text", "ids", "none"]))
        if kind == "text":
            prompt = text
            tensor = add_input(request, "text_input", "BYTES", bytes_tensor(text, b"second") if raw else None)
            if not raw:
                tensor.contents.bytes_contents.extend([text, b"second"])
        elif kind == "ids":
            ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=9))
            encoded = b"".join(i.to_bytes(4, "little") for i in ids)
            tensor = add_input(request, "input_ids", "INT32", encoded if raw else None)
            if raw:
                prompt = encoded
            else:
                tensor.contents.int_contents.extend(ids)
                packed = service_pb2.InferTensorContents(int_contents=ids).SerializeToString()
                prompt = packed[2:] if ids else b""
    return request, prompt


@given(requests(), st.booleans())
def test_everything_routing_needs_is_found_as_protobuf_would_find_it(made: tuple[Any, bytes], stream: bool) -> None:
    request, prompt = made
    found = read_infer(request.SerializeToString(), stream=stream, otherwise=7)
    assert found.prompt.model == request.model_name
    assert found.prompt.stream is stream
    assert found.id == request.id
    assert found.versioned is bool(request.model_version)
    assert found.prompt.canonical == prompt
    if prompt:
        assert found.prompt.key == conversation_key((prompt[:4096],), chain_seed(request.model_name, ""))


@given(requests(), NAMES)
def test_an_appended_name_is_the_one_that_counts(made: tuple[Any, bytes], name: str) -> None:
    request, _ = made
    renamed = request.SerializeToString() + wire.name_field(name)
    assert read_infer(renamed, stream=False, otherwise=0).prompt.model == name
    request.model_name = name
    assert service_pb2.ModelInferRequest.FromString(renamed) == request


@given(requests(), st.data())
def test_a_cut_request_is_malformed_or_a_shorter_one(made: tuple[Any, bytes], data: st.DataObject) -> None:
    message = made[0].SerializeToString()
    cut = message[: data.draw(st.integers(0, len(message)))]
    with contextlib.suppress(MalformedError):
        read_infer(cut, stream=False, otherwise=0)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(message: bytes) -> None:
    with contextlib.suppress(MalformedError):
        read_infer(message, stream=False, otherwise=0)


@pytest.mark.parametrize("message", [b"\x0b", b"\x0a\x05ab", b"\xff" * 11, b"\x02\x00", b"\x0a\x01\xff", b"\x0d\x00"])
def test_what_is_no_protobuf_is_refused(message: bytes) -> None:
    with pytest.raises(MalformedError):
        read_infer(message, stream=False, otherwise=0)


@pytest.mark.parametrize(("value", "key"), [({"int64_param": 42}, "42"), ({"string_param": "abc"}, "abc")])
def test_a_sequence_stays_together_whatever_its_prompts(value: dict[str, Any], key: str) -> None:
    keys = set()
    for prompt in (b"one", b"two"):
        request = service_pb2.ModelInferRequest(model_name="m")
        add_input(request, "text_input", "BYTES", bytes_tensor(prompt))
        request.parameters["priority"].uint64_param = 1
        request.parameters["sequence_id"].CopyFrom(service_pb2.InferParameter(**value))
        request.parameters["sequence_start"].bool_param = True
        found = read_infer(request.SerializeToString(), stream=True, otherwise=0)
        assert str(found.sequence) == key
        keys.add(found.prompt.key)
    assert keys == {session_key(key)}


def test_sequence_zero_is_none() -> None:
    request = service_pb2.ModelInferRequest(model_name="m")
    request.parameters["sequence_id"].int64_param = 0
    found = [read_infer(request.SerializeToString(), stream=True, otherwise=turn) for turn in range(2)]
    assert not found[0].sequence
    assert found[0].prompt.key != found[1].prompt.key


def test_prompts_are_found_behind_tensors_in_shared_memory() -> None:
    request = service_pb2.ModelInferRequest(model_name="m")
    add_input(request, "image", "UINT8", None).parameters["shared_memory_region"].string_param = "region"
    add_input(request, "text_input", "BYTES", bytes_tensor(b"the prompt"))
    assert read_infer(request.SerializeToString(), stream=False, otherwise=0).prompt.canonical == b"the prompt"


def test_conversations_share_a_key_with_the_openai_front() -> None:
    request = service_pb2.ModelInferRequest(model_name="m")
    add_input(request, "text_input", "BYTES", bytes_tensor(b"x" * 5000))
    found = read_infer(request.SerializeToString(), stream=False, otherwise=0)
    assert found.prompt.key == conversation_key((b"x" * 4096,), chain_seed("m", ""))


def test_questions_about_a_model_spread_over_its_replicas() -> None:
    assert query_view("m", 1).key != query_view("m", 2).key
    assert query_view("m", 1).model == "m"


@given(NAMES, NAMES)
def test_every_answer_takes_the_clients_name(name: str, other: str) -> None:
    response = service_pb2.ModelInferResponse(model_name=other, id="7", raw_output_contents=[b"x"])
    renamed = service_pb2.ModelInferResponse.FromString(response.SerializeToString() + wire.name_field(name))
    assert (renamed.model_name, renamed.id, list(renamed.raw_output_contents)) == (name, "7", [b"x"])

    config = service_pb2.ModelConfigResponse()
    config.config.name, config.config.max_batch_size = other, 3
    changed = service_pb2.ModelConfigResponse.FromString(config.SerializeToString() + wire.config_name(name))
    assert (changed.config.name, changed.config.max_batch_size) == (name, 3)

    statistics = service_pb2.ModelStatisticsResponse()
    for version in ("1", "2"):
        statistics.model_stats.add(name=other, version=version, inference_count=5)
    counted = service_pb2.ModelStatisticsResponse.FromString(
        wire.statistics_named(statistics.SerializeToString(), name)
    )
    assert [(m.name, m.version, m.inference_count) for m in counted.model_stats] == [(name, "1", 5), (name, "2", 5)]

    streamed = service_pb2.ModelStreamInferResponse(infer_response=response)
    answer = service_pb2.ModelStreamInferResponse.FromString(
        wire.renamed(streamed.SerializeToString(), wire.stream_name(name))
    )
    assert (answer.infer_response.model_name, answer.infer_response.id, answer.error_message) == (name, "7", "")

    only = service_pb2.ModelStreamInferResponse.FromString(wire.only_answer(response.SerializeToString(), name))
    assert (only.infer_response.model_name, only.infer_response.id) == (name, "7")
    assert only.infer_response.parameters["triton_final_response"].bool_param


def test_an_error_takes_the_clients_name_only_where_it_has_one() -> None:
    named = service_pb2.ModelStreamInferResponse(error_message="oh")
    named.infer_response.model_name, named.infer_response.id = "engine", "7"
    unnamed = service_pb2.ModelStreamInferResponse(error_message="oh")
    unnamed.infer_response.id = "7"
    for message, name in ((named, "route"), (unnamed, "")):
        encoded = wire.renamed(message.SerializeToString(), wire.stream_name("route"))
        read = service_pb2.ModelStreamInferResponse.FromString(encoded)
        assert (read.infer_response.model_name, read.infer_response.id, read.error_message) == (name, "7", "oh")


def test_own_errors_look_like_tritons() -> None:
    read = service_pb2.ModelStreamInferResponse.FromString(wire.stream_error("no such model", "7"))
    assert (read.error_message, read.infer_response.id) == ("no such model", "7")
    assert wire.error_text(wire.stream_error("no such model", "")) == "no such model"
    assert text_of(b"", 1) == ""
