"""Edits on serialized messages, all of them by appending: in protobuf the last value of a field wins, and messages that
occur twice are merged. So a name is changed without reading, let alone re-encoding, the tensors before it.

Responses carry the name the client knows: `ModelInferResponse` and `ModelMetadataResponse` in field 1,
`ModelConfigResponse` in field 1 of its field 1, `ModelStreamInferResponse` in field 1 of its field 2.
"""

from functools import lru_cache

from router.kserve import LENGTH_DELIMITED, MalformedError, fields, text_of

_STREAM_ANSWER = 0x12
"""The tag of `infer_response`: the first byte of a `ModelStreamInferResponse` without `error_message`."""


def delimited(number: int, payload: bytes) -> bytes:
    """A length-delimited field: a string, bytes, or a message."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(len(payload)) + payload


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_FINAL = delimited(4, delimited(1, b"triton_final_response") + delimited(2, b"\x08\x01"))
"""The parameter that the last message for a request has."""


@lru_cache(maxsize=1024)
def name_field(name: str) -> bytes:
    """Appended to a message, makes `name` the value of its field 1."""
    return delimited(1, name.encode())


def config_name(name: str) -> bytes:
    """Appended to a `ModelConfigResponse`, makes `name` the configuration's name."""
    return delimited(1, name_field(name))


def stream_name(name: str) -> bytes:
    """Appended to a `ModelStreamInferResponse`, makes `name` its response's model name."""
    return delimited(2, name_field(name))


def statistics_named(response: bytes, name: str) -> bytes:
    """A `ModelStatisticsResponse` with `name` in each of its entries, which repeat and so cannot be appended to."""
    entries = (f for f in fields(response) if f[0] == 1 and f[1] == LENGTH_DELIMITED)
    return b"".join(delimited(1, response[start:end] + name_field(name)) for _, _, start, end in entries)


def renamed(message: bytes, named: bytes) -> bytes:
    """A `ModelStreamInferResponse` with `stream_name`'s bytes, unless it holds no name to be changed: an error from
    before the model has none."""
    if is_answer(message):
        return message + named
    for number, wire, start, end in fields(message):
        if number == 2 and wire == LENGTH_DELIMITED and any(f[0] == 1 for f in fields(message, start, end)):
            return message + named
    return message


def is_answer(message: bytes) -> bool:
    """Whether a message of a stream is a response and no error."""
    return bool(message) and message[0] == _STREAM_ANSWER


def error_text(message: bytes) -> str:
    """The `error_message` of a `ModelStreamInferResponse`."""
    try:
        return text_of(message, 1)
    except MalformedError:
        return ""


def only_answer(response: bytes, name: str) -> bytes:
    """A `ModelInferResponse` as the only, and so the last, message a stream has for a request."""
    return delimited(2, response + _FINAL + name_field(name))


def only_failure(text: str, request: bytes) -> bytes:
    """The failure of a model that answers once as the message a stream has for the `ModelInferRequest`. Raises
    MalformedError."""
    named = b"".join([delimited(number, value.encode()) for number in (1, 2, 3) if (value := text_of(request, number))])
    return delimited(1, text.encode()) + delimited(2, named + _FINAL)


def stream_error(text: str, request_id: str) -> bytes:
    """A `ModelStreamInferResponse` that reports an error the way Triton does: its text, and the request's id."""
    return delimited(1, text.encode()) + delimited(2, delimited(3, request_id.encode()) if request_id else b"")
