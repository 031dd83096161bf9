"""A stream as a gRPC call of one request and any number of responses (gRPC's PROTOCOL-HTTP2).

The request is a block of fields and one message; what comes back are fields, messages, and fields again that hold the
call's status, or fields alone. A message is a byte that says whether it is compressed (we ask for none that are), its
length in four bytes, and itself; frames may cut it anywhere.

A call ends with a `CallEnd`, whatever happened. How that came about is kept apart from the status, because it decides
what may be done next, which for statuses that gRPC's libraries make up themselves can only be guessed from their words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol
from urllib.parse import unquote

import grpc

from gateway.upstream.http2.frames import ErrorCode
from gateway.upstream.http2.stream import Loss, Stream

MESSAGE_BYTES = 64 * 1024 * 1024
"""The longest message taken. A response of one message holds at most `triton.choices.ANSWER_LIMIT` characters."""
PREFIX_BYTES = 5

_STATUSES = {b"%d" % status.value[0]: status for status in grpc.StatusCode}
_OF_HTTP = {
    400: grpc.StatusCode.INTERNAL,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    429: grpc.StatusCode.UNAVAILABLE,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}
"""What a proxy's HTTP status means (gRPC's http-grpc-status-mapping); UNKNOWN what is not listed."""
_OF_RESET = {
    ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}
"""What a stream's reset means (PROTOCOL-HTTP2, "Errors"); INTERNAL what is not listed."""


class Cause(Enum):
    """What a call's end comes from."""

    STATUS = "status"
    """The server's word, in trailers or a reset."""
    BROKEN = "broken"
    """The connection or the stream broke off."""
    REFUSED = "refused"
    """The server has not looked at the request and will not."""
    MALFORMED = "malformed"
    """The server sent in this stream what is no gRPC, or more than is taken."""
    CLOSED = "closed"
    """This side closed the connection."""


_OF_LOSS = {Loss.BROKEN: Cause.BROKEN, Loss.REFUSED: Cause.REFUSED, Loss.CLOSED: Cause.CLOSED}


@dataclass(slots=True, frozen=True)
class CallEnd:
    """How a call ended. `code` says something where the cause is STATUS."""

    cause: Cause
    code: grpc.StatusCode
    details: str

    @property
    def ok(self) -> bool:
        return self.cause is Cause.STATUS and self.code is grpc.StatusCode.OK


class Receiver(Protocol):
    """Who a call is made for. What is called here must not raise."""

    def messages_received(self, messages: list[bytes]) -> None:
        """All messages that one read of the socket brought, at least one."""

    def call_ended(self, end: CallEnd) -> None:
        """Once, and nothing after."""


def framed(message: bytes) -> bytes:
    """A request's body, of one message."""
    return b"\0" + len(message).to_bytes(4) + message


class MessageError(Exception):
    """What a stream holds is no sequence of messages, or one is too long."""


class MessageReader:
    """Messages out of what frames hold, however it was cut."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def holding(self) -> bool:
        """A message has begun and not ended."""
        return bool(self._rest)

    def feed(self, payload: bytes) -> list[bytes]:
        """The messages that `payload` completes. Raises MessageError, and must not be used then."""
        if not self._rest:
            size = len(payload)
            if size >= PREFIX_BYTES and not payload[0] and PREFIX_BYTES + int.from_bytes(payload[1:5]) == size:
                return [payload[PREFIX_BYTES:]]  # one message to a frame is what servers send
        rest = self._rest
        rest += payload
        messages, at = [], 0
        while len(rest) - at >= PREFIX_BYTES:
            if rest[at]:
                raise MessageError("a message that is compressed")
            length = int.from_bytes(rest[at + 1 : at + PREFIX_BYTES])
            if length > MESSAGE_BYTES:
                raise MessageError(f"a message of {length} bytes, more than {MESSAGE_BYTES}")
            end = at + PREFIX_BYTES + length
            if end > len(rest):
                break
            messages.append(bytes(rest[at + PREFIX_BYTES : end]))
            at = end
        del rest[:at]
        return messages


class GrpcStream(Stream):
    """One call, to be started with `Connection.start`."""

    __slots__ = ("_end", "_messages", "_open", "_over", "_reader", "_receiver")

    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self._receiver = receiver
        self._reader = MessageReader()
        self._messages: list[bytes] = []
        self._end: CallEnd | None = None
        self._open = False
        """The head of the answer has come."""
        self._over = False
        """The receiver is told nothing more."""

    def cancel(self) -> bool:
        """Tell the server to stop; nothing more is received, not even an end. Whether there was anything to stop."""
        self._over = True
        if self._connection is None:
            return False
        self._connection.reset(self, ErrorCode.CANCEL)
        return True

    def done(self) -> bool:
        """Nothing more comes from the server."""
        return self._connection is None

    def take_headers(self, fields: Mapping[bytes, bytes], last: bool) -> None:
        if not self._open:
            status = fields.get(b":status", b"")
            if status.startswith(b"1") and len(status) == 3:
                return  # an interim response
            self._open = True
            if status != b"200" and b"grpc-status" not in fields:
                code = int(status[:3]) if status.isdigit() else 0
                self._finish(Cause.STATUS, _OF_HTTP.get(code, grpc.StatusCode.UNKNOWN), f"HTTP status {code}")
            elif not fields.get(b"content-type", b"").startswith(b"application/grpc"):
                self._finish(Cause.MALFORMED, grpc.StatusCode.UNKNOWN, "an answer that is no gRPC")
        elif not last:
            self._finish(Cause.MALFORMED, grpc.StatusCode.INTERNAL, "fields between its messages")
        if last:
            self._read_status(fields)

    def take_data(self, payload: bytes, last: bool) -> None:
        if self._end is not None:
            return
        if not self._open:
            self._finish(Cause.MALFORMED, grpc.StatusCode.INTERNAL, "messages without a head")
            return
        try:
            self._messages += self._reader.feed(payload)
        except MessageError as error:
            self._finish(Cause.MALFORMED, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        if last:
            self._finish(Cause.BROKEN, grpc.StatusCode.INTERNAL, "it ended without a status")

    def take_reset(self, code: int) -> None:
        status = _OF_RESET.get(code, grpc.StatusCode.INTERNAL)  # type: ignore[call-overload]  # an IntEnum is an int
        self._finish(Cause.STATUS, status, f"Received RST_STREAM with error code {code}")

    def take_excess(self) -> None:
        self._finish(Cause.MALFORMED, grpc.StatusCode.RESOURCE_EXHAUSTED, "more metadata than is taken")

    def take_loss(self, loss: Loss, what: str) -> None:
        self._finish(_OF_LOSS[loss], grpc.StatusCode.UNAVAILABLE, what)

    def deliver(self) -> None:
        if self._messages and not self.paused and not self._over:
            messages, self._messages = self._messages, []
            self._receiver.messages_received(messages)
        if self._end is not None and not self.paused and not self._over:
            end, self._over = self._end, True
            self._receiver.call_ended(end)

    def _read_status(self, fields: Mapping[bytes, bytes]) -> None:
        status = fields.get(b"grpc-status")
        if status is None:
            self._finish(Cause.BROKEN, grpc.StatusCode.UNKNOWN, "it ended without a status")
        elif status == b"0" and self._reader.holding:
            self._finish(Cause.BROKEN, grpc.StatusCode.INTERNAL, "it ended in the middle of a message")
        else:
            code = _STATUSES.get(status, grpc.StatusCode.UNKNOWN)
            details = unquote(fields.get(b"grpc-message", b"").decode("ascii", "replace"), errors="replace")
            self._finish(Cause.STATUS, code, details)

    def _finish(self, cause: Cause, code: grpc.StatusCode, details: str) -> None:
        """Note how the call ends; the first word counts. What the server goes on to send is not wanted."""
        if self._end is None:
            self._end = CallEnd(cause, code, details)
        if self._connection is not None:
            self._connection.reset(self, ErrorCode.CANCEL)
