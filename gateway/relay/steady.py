"""A stream in its steady state: what each read of it costs when nothing about it needs thought.

Nearly every read of a stream is one or more complete chunks that end an event and hold no usage. It is counted and
goes to the client as it is; anything else goes to `receive`. Between two wake-ups of an event loop little of an
interpreter is left in a processor's caches, so that even a dozen lines of Python cost more than the system calls around
them. So `SteadyStream`, and the `Feed` by which reads come to it, are compiled from `_steady.c` where a C compiler is:
from socket to socket not a line of Python is run. `PureSteadyStream` and `PureFeed` are the same in Python: tests hold
both equal, and they are used where nothing was compiled.

The compiled stream gives bytes to the kernel itself while its client's transport has none waiting, because a transport
puts off what it is given to the end of the loop's turn. What the kernel does not take, the transport gets.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gateway.relay.accounting import GAP_BOUNDS, says_usage
from gateway.relay.events import whole_chunks


class ClientTransport(Protocol):
    """What a stream needs of an `asyncio.Transport`."""

    def write(self, data: bytes, /) -> None:
        """Raises RuntimeError if the client has gone."""

    def is_closing(self) -> bool: ...

    def get_write_buffer_size(self) -> int: ...


class Receiver(Protocol):
    """Who a connection reads for."""

    def data_received(self, data: bytes, /) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...


class PureFeed:
    """A connection's `data_received`, which event loops look up once: hands all that is read to the `receiver`, which
    may be exchanged at any time."""

    __slots__ = ("receiver",)

    receiver: Receiver | None
    """None: nobody has asked for anything."""

    def __init__(self) -> None:
        self.receiver = None

    def data_received(self, data: bytes, /) -> None:
        if self.receiver is not None:
            self.receiver.data_received(data)
        else:
            self.unasked()

    def unasked(self) -> None:
        """Something has come that nobody asked for."""
        raise NotImplementedError


class PureSteadyStream:
    """Takes what is read of an answer. To be derived from: `receive` takes what is not steady.

    `time` tells the loop's time in seconds; `gap_counts` counts the times between two reads by `GAP_BOUNDS`.
    """

    __slots__ = (
        "_body_bytes", "_gap_counts", "_gap_total", "_piece", "_piece_before", "_time",
        "descriptor", "last_read", "transport",
    )  # fmt: skip

    def __init__(self, time: Callable[[], float], gap_counts: list[int]) -> None:
        self._time = time
        self._gap_counts = gap_counts
        self.transport: ClientTransport | None = None
        """Where steady reads go; None as long as every read needs thought."""
        self.descriptor = -1
        """The transport's socket; -1 if what goes to the socket is not what is written to the transport (TLS)."""
        self.last_read = 0.0
        """Loop time of the last steady read; `receive` sets it for the others."""
        self._gap_total = 0.0
        self._body_bytes = 0
        self._piece: bytes | None = None
        self._piece_before: bytes | None = None

    def data_received(self, data: bytes) -> None:
        now = self._time()
        if self.transport is None or not whole_chunks(data) or says_usage(data):
            self.receive(data, now)
            return
        gap = now - self.last_read
        self._gap_counts[bisect_left(GAP_BOUNDS, gap)] += 1
        self._gap_total += gap
        self._body_bytes += len(data)
        self._piece_before, self._piece = self._piece, data
        self.last_read = now
        try:
            self.transport.write(data)
        except RuntimeError:  # the client has gone, and the request is about to be closed
            self.transport = None

    def receive(self, data: bytes, now: float) -> None:
        """Take a read that is not steady, made at `now`."""
        raise NotImplementedError

    def taken(self) -> tuple[float, int, tuple[bytes, ...]]:
        """What the steady reads since the last call come to: seconds between them, bytes, and the last two of them."""
        reads = tuple(piece for piece in (self._piece_before, self._piece) if piece is not None)
        taken = self._gap_total, self._body_bytes, reads
        self._gap_total, self._body_bytes = 0.0, 0
        self._piece = self._piece_before = None
        return taken


if TYPE_CHECKING:
    Feed = PureFeed
    SteadyStream = PureSteadyStream
    COMPILED: bool
else:
    try:
        from gateway.relay._steady import Feed, SteadyStream

        COMPILED = True
    except ImportError:
        Feed, SteadyStream = PureFeed, PureSteadyStream
        COMPILED = False
