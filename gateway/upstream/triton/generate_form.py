"""Requests and answers in the form of Triton's generate extension (HTTP `generate` and `generate_stream`).

A request is one JSON object: a key that is the name of an input becomes that tensor, from a scalar or from a flat list
that is cut to the declared shape. Any other key would silently become a parameter, so a request is made from the same
`ModelInferRequest` as over gRPC, which holds declared inputs only.

An answer is one JSON object of outputs by name, a scalar for a tensor of one element, else a flat list. A stream sends
each as a server-sent event; an error is an object with the key `error`, also inside a stream that began with status
200. A stream has no end mark: it ends where its body does.

`EventDecoder` reads only the outputs that the contract binds, straight into a typed struct, with no dict per event.
"""

from typing import Any
from urllib.parse import quote

import msgspec

from gateway.upstream.http_connection import ConnectionPool
from gateway.upstream.triton.answer import COUNTS, EngineSaysError, Message
from gateway.upstream.triton.contract import (
    FINISH_REASON,
    LOG_PROBS,
    SEQUENCE,
    TEXT,
    TOKEN_COUNT,
    TOKENS,
    Contract,
)
from gateway.upstream.triton.tensors import unpack_row, unpack_texts

_TEXT_LIMIT = 2000
"""Characters of an answer that is no error in Triton's form and is shown as one."""

_FIELDS = (TEXT, TOKENS, TOKEN_COUNT, LOG_PROBS, FINISH_REASON, SEQUENCE, *COUNTS)
"""What a message may hold, by the names that contracts use."""


class _Error(msgspec.Struct):
    error: str


def generate_request(
    pool: ConnectionPool, message: Any, headers: tuple[tuple[str, str], ...], *, stream: bool
) -> tuple[bytes, bytes]:
    """Head and body of the HTTP request for a ModelInferRequest."""
    fields: dict[str, Any] = {"id": message.id}
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        values = unpack_texts(raw) if tensor.datatype == "BYTES" else unpack_row(tensor.datatype, raw)
        fields[tensor.name] = values[0] if len(values) == 1 else values
    body = msgspec.json.encode(fields)
    operation = "generate_stream" if stream else "generate"
    lines = [
        f"POST {pool.path}/v2/models/{quote(message.model_name, safe='')}/{operation} HTTP/1.1",
        f"host: {pool.host_header}",
        *(f"{name}: {value}" for name, value in headers),
        "content-type: application/json",
        "accept-encoding: identity",
        f"content-length: {len(body)}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1"), body


def error_text(body: bytes) -> str:
    """What an answer that is an error says, be it an event or not; of anything else, its beginning."""
    payload = body.strip().removeprefix(b"data:").strip()
    try:
        return msgspec.json.decode(payload, type=_Error).error
    except msgspec.MsgspecError:
        return payload[:_TEXT_LIMIT].decode("utf-8", "replace")


class EventDecoder:
    """Reads the answers of one contract."""

    __slots__ = ("_decoder",)

    def __init__(self, contract: Contract) -> None:
        # An output that is not bound must not be taken for a field of the same name.
        renamed = {field: contract.outputs.get(field, f"no output: {field}") for field in _FIELDS}
        event = msgspec.defstruct(
            "Event", [(field, Any, None) for field in _FIELDS] + [("error", Any, None)], rename=renamed
        )
        self._decoder = msgspec.json.Decoder(event)

    def decode(self, payload: bytes) -> Message:
        """The message in one JSON object. Raises EngineSaysError for an error, ValueError for anything malformed."""
        event: Any = self._decoder.decode(payload)
        if event.error is not None:
            raise EngineSaysError(str(event.error))
        message = Message()
        text = _first(event.text)
        if text:
            message.text = str(text).encode()
        if event.tokens is not None:
            message.tokens = _row(event.tokens)
        if event.token_count is not None:
            message.token_count = _integer(event.token_count)
        if event.log_probs is not None:
            message.log_probs = _row(event.log_probs)
        if event.sequence is not None:
            message.sequence = _integer(event.sequence)
        reason = _first(event.finish_reason)
        if reason not in (None, "", "None"):
            message.finish_reason = str(reason)
        for field in COUNTS:
            value = getattr(event, field)
            if value is not None and (count := _integer(value)) is not None:
                message.counts[field] = count
        return message


def _first(value: Any) -> Any:
    return (value[0] if value else None) if isinstance(value, list) else value


def _row(value: Any) -> list[Any]:
    row = value if isinstance(value, list) else [value]
    if not all(isinstance(element, int | float) for element in row):
        raise ValueError("an output that should hold numbers holds something else")
    return row


def _integer(value: Any) -> int | None:
    """As `tensors.unpack_integer`: some models send numbers as strings."""
    first = _first(value)
    if isinstance(first, str):
        return int(first) if first.isdigit() else None
    return int(first) if isinstance(first, int | float) else None
