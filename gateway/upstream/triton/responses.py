"""The engine's messages over gRPC -> `Message`s.

The messages of one stream are alike: model, id, parameters and the outputs' names and shapes are the same in each, and
what differs are the tensors' contents, which come last (`raw_output_contents` has ModelInferResponse's highest field
number). So what came before the contents is remembered, and a message that begins with the same bytes is not parsed
again: its contents are taken off as they lie there. Any other message, the first and the last among them, goes through
protobuf's own reader.
"""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from gateway.upstream.triton.answer import EngineSaysError, Message, read_outputs

_INFER_RESPONSE = 0x12
"""Tag of ModelStreamInferResponse's field 2; before it comes only an error."""
_CONTENT = 0x32
"""Tag of ModelInferResponse's field 6, each of whose entries is a tensor."""


class ResponseReader:
    """Reads the messages of one stream."""

    __slots__ = ("_decode", "_described", "_head", "_roles")

    def __init__(self, decode: Callable[[bytes], Any], roles: Mapping[str, str]) -> None:
        """`decode` is the method's, `roles` are the contract's fields by the names of their outputs."""
        self._decode = decode
        self._roles = roles
        self._head: bytes | None = None
        """What the infer_response of a message began with that is not the last."""
        self._described: list[tuple[str | None, str]] = []
        """The role and the type of each of its outputs."""

    def read(self, data: bytes) -> Message:
        """Raises EngineSaysError, and ValueError for what is malformed."""
        if self._head is not None:
            contents = _contents(data, self._head)
            if contents is not None and len(contents) == len(self._described):
                return read_outputs(self._described, contents)
        try:
            response = self._decode(data)
        except DecodeError:
            raise ValueError("a message that is none of Triton's") from None
        if response.error_message:
            raise EngineSaysError(response.error_message)
        inferred = response.infer_response
        contents = list(inferred.raw_output_contents)
        described = [(self._roles.get(output.name), output.datatype) for output in inferred.outputs]
        message = read_outputs(described, contents)
        message.final = inferred.parameters["triton_final_response"].bool_param
        if not message.final:
            self._remember(data, described, contents)
        return message

    def _remember(self, data: bytes, described: list[tuple[str | None, str]], contents: list[bytes]) -> None:
        tail = sum(1 + (len(content).bit_length() + 6) // 7 + len(content) for content in contents if content)
        tail += 2 * contents.count(b"")
        start = _start(data)
        head = data[start : len(data) - tail]
        if start and _contents(data, head) == contents:
            self._head, self._described = head, described


def _start(data: bytes) -> int:
    """Where the infer_response of a message begins that is nothing else; 0 for any other message."""
    size = len(data)
    if size < 3 or data[0] != _INFER_RESPONSE:
        return 0
    first, second = data[1], data[2]
    if first < 128:
        return 2 if first + 2 == size else 0
    return 3 if second < 128 and (first & 127 | second << 7) + 3 == size else 0


def _contents(data: bytes, head: bytes) -> list[bytes] | None:
    """The tensors of a message that begins with `head` and is as long as it says; None for any other."""
    at = _start(data)
    if not at or not data.startswith(head, at):
        return None
    at += len(head)
    size = len(data)
    contents = []
    while at < size - 1:
        if data[at] != _CONTENT:
            return None
        length = data[at + 1]
        at += 2
        if length > 127:
            if at == size or data[at] > 127:
                return None
            length = length & 127 | data[at] << 7
            at += 1
        contents.append(data[at : at + length])
        at += length
    return contents if at == size else None
