"""Messages that are like the one before are read without protobuf's reader, and mean the same."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from gateway.upstream.triton.answer import EngineSaysError, Message
from gateway.upstream.triton.contract import COMPLETION_TOKENS, SEQUENCE, TEXT, TOKENS
from gateway.upstream.triton.responses import ResponseReader

ROLES = {"text": TEXT, "ids": TOKENS, "count": COMPLETION_TOKENS, "index": SEQUENCE}
TYPES = {"text": "BYTES", "ids": "INT32", "count": "INT32", "index": "INT32", "other": "FP32"}

decode = service_pb2.ModelStreamInferResponse.FromString


def encoded(outputs: dict[str, bytes], *, final: bool = False, id_: str = "r", error: str = "") -> bytes:
    response = service_pb2.ModelStreamInferResponse(error_message=error)
    inferred = response.infer_response
    inferred.model_name, inferred.id = "m", id_
    inferred.parameters["triton_final_response"].bool_param = final
    for name, raw in outputs.items():
        inferred.outputs.add(name=name, datatype=TYPES[name], shape=[1, 1])
        inferred.raw_output_contents.append(raw)
    whole: bytes = response.SerializeToString()
    return whole


def bytes_tensor(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


NUMBERS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(lambda each: struct.pack(f"<{len(each)}i", *each))
RAW = {
    "text": st.binary(max_size=20_000).map(bytes_tensor) | st.just(b""),
    "ids": NUMBERS,
    "count": NUMBERS,
    "index": NUMBERS,
    "other": st.binary(max_size=200),
}
OUTPUTS = st.lists(st.sampled_from(list(RAW)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: RAW[name] for name in names})
)
SENT = st.builds(encoded, OUTPUTS, final=st.booleans() | st.just(False), id_=st.sampled_from("rrrrs"))


def alike(name: str, raws: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    return st.lists(raws.map(lambda raw: encoded({name: raw, "count": b"\1\0\0\0"})), max_size=6)


@given(st.one_of(alike("text", RAW["text"]), alike("ids", NUMBERS), st.lists(SENT, max_size=6)))
def test_a_message_means_the_same_whatever_was_read_before_it(sent: list[bytes]) -> None:
    reader = ResponseReader(decode, ROLES)
    for message in sent:
        assert reader.read(message) == ResponseReader(decode, ROLES).read(message)


@given(st.lists(st.binary(max_size=60), max_size=4), st.data())
def test_garbage_means_the_same_whatever_was_read_before_it(garbage: list[bytes], data: st.DataObject) -> None:
    reader = ResponseReader(decode, ROLES)
    like = encoded({"text": bytes_tensor(b"text")})
    reader.read(like)
    cut = data.draw(st.integers(0, len(like)))
    for message in (
        *garbage,
        like[:cut],
        like + like,
        like[:cut] + b"x" + like[cut:],
        *(like + each for each in garbage),
    ):
        assert outcome(reader, message) == outcome(ResponseReader(decode, ROLES), message)


def outcome(reader: ResponseReader, message: bytes) -> Message | str:
    try:
        return reader.read(message)
    except (ValueError, EngineSaysError, struct.error) as error:
        return type(error).__name__


def test_only_what_differs_is_parsed() -> None:
    parsed: list[bytes] = []

    def counting(message: bytes) -> Any:
        parsed.append(message)
        return decode(message)

    reader = ResponseReader(counting, ROLES)
    sent = [encoded({"text": bytes_tensor(b"x" * size), "count": b"\1\0\0\0"}) for size in (1, 5, 0, 127, 128, 5000)]
    last = encoded({"text": bytes_tensor(b"x"), "count": b"\1\0\0\0"}, final=True)
    read = [reader.read(message) for message in (*sent, last)]
    assert parsed == [sent[0], last]
    assert [len(message.text) for message in read] == [1, 5, 0, 127, 128, 5000, 1]
    assert [message.final for message in read] == [False] * 6 + [True]


def test_an_error_is_the_engines_own_words() -> None:
    reader = ResponseReader(decode, ROLES)
    reader.read(encoded({"text": b""}))
    with pytest.raises(EngineSaysError, match="out of memory"):
        reader.read(encoded({"text": b""}, error="out of memory"))
