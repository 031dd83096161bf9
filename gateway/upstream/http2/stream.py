"""One stream of a connection: a request and its answer, as far as HTTP/2 is concerned (RFC 9113 section 5).

What a server may send before it has to wait is `RECEIVE_WINDOW`. It is given room anew when half of that is used up,
but not while the stream is paused: a client that does not keep up holds back its own stream, at the price of one
window of memory, and no other.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

from gateway.upstream.http2.frames import ErrorCode

RECEIVE_WINDOW = 128 * 1024


class Loss(Enum):
    """How a stream ends that neither side has ended."""

    BROKEN = "broken"
    """The connection broke off, or broke the protocol."""
    REFUSED = "refused"
    """The server has not looked at it and will not (sections 6.8, 8.7)."""
    CLOSED = "closed"
    """This side has closed the connection."""


class Transport(Protocol):
    """What a stream needs of its connection."""

    def give_room(self, stream: "Stream") -> None:
        """Let the server send as many bytes again as it has sent since the last time."""

    def reset(self, stream: "Stream", code: ErrorCode) -> None:
        """End the stream. Nothing more of it is handed on."""


class Stream:
    """The part that every kind of stream has. `_connection` is None before it has begun and once it has ended."""

    __slots__ = ("_connection", "id", "paused", "unanswered", "unsent", "window")

    def __init__(self) -> None:
        self._connection: Transport | None = None
        self.id = 0
        self.unsent: memoryview | None = None
        """What is left of the request's body; None once all of it has been sent."""
        self.window = 0
        """Bytes of it that the server has room for."""
        self.unanswered = 0
        """Bytes of the answer that the server has not been given room for again."""
        self.paused = False

    def begin(self, connection: Transport, body: bytes) -> None:
        self._connection = connection
        self.unsent = memoryview(body)

    def ended(self) -> None:
        """Nothing more comes of it."""
        self._connection = None
        self.unsent = None

    def pause(self) -> None:
        """Hand nothing on until `resume`, and let the server send no more than what it has room for."""
        self.paused = True

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        if self._connection is not None and self.unanswered >= RECEIVE_WINDOW // 2:
            self._connection.give_room(self)
        self.deliver()

    # What comes of the server. None of it raises.

    def take_headers(self, fields: Mapping[bytes, bytes], last: bool) -> None:
        """A block of fields; `last` if the server has ended the stream with it."""
        raise NotImplementedError

    def take_data(self, payload: bytes, last: bool) -> None:
        raise NotImplementedError

    def take_reset(self, code: int) -> None:
        raise NotImplementedError

    def take_excess(self) -> None:
        """A block of fields that is too long; the stream has been reset."""
        raise NotImplementedError

    def take_loss(self, loss: Loss, what: str) -> None:
        raise NotImplementedError

    def deliver(self) -> None:
        """Hand on what has been taken, unless paused: called once for all that a read of the socket brought."""
        raise NotImplementedError
