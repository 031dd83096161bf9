"""A client's request body, as it comes in.

The connection feeds it, the request's handler takes it, whole (`collect`) or in pieces (`read`). Either way it is
bounded: a handler that takes pieces has the connection stop reading while too much lies here, one that collects has set
a limit. Whatever its framing turns out not to be, or a pause that is too long, is a refusal that the handler meets when
it reads. A body that has not arrived when its answer begins ends the connection with that answer, for nobody could tell
where the next request starts.
"""

import asyncio
from typing import Protocol

from gateway.http.request_head import RequestHead
from gateway.relay.http1 import ChunkedReader
from router.errors import ApiError, invalid

BODY_IDLE_S = 60.0
"""How long a client may pause in the middle of sending its request body."""
SLOWEST_BYTES_PER_S = 500
"""What a body has to come at on average, once it has been waited for for `BODY_IDLE_S`: a byte now and then is no
pause, but would hold an engine's connection for ever."""
_READ_AHEAD_BYTES = 256 * 1024
"""Bytes that lie here untaken before the connection is read no further."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodySource(Protocol):
    """The connection that a body comes from."""

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class RequestBody:
    """The body of one request, to be taken once."""

    __slots__ = (
        "_collects", "_error", "_held", "_limit", "_missing", "_pieces", "_reader", "_source", "_waited",
        "_waiter", "_waits_to_send", "arrived", "last_fed", "length", "size",
    )  # fmt: skip

    def __init__(self, source: BodySource, head: RequestHead) -> None:
        self._source = source
        self._reader = ChunkedReader() if head.chunked else None
        self._missing = head.content_length
        self.length = None if head.chunked else head.content_length
        """Its announced length; None if chunked."""
        self.arrived = self.length == 0
        """All of it is here, or has been taken."""
        self.size = 0
        """Bytes taken so far."""
        self.last_fed = 0.0
        """Loop time of what came last of a body that did not come with its head; 0 for one that did."""
        self._pieces: list[bytes] = []
        self._held = 0
        self._limit = 0
        self._collects = False
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waited = 0.0
        """Seconds for which the client was waited for, less the loop time since when it is now, if it is."""
        self._waits_to_send = not self.arrived and head.expects_continue

    # What the connection does.

    def feed(self, data: bytes) -> bytes:
        """Take in what was read, and return what lies behind the body."""
        if self._error is not None:
            return b""
        rest = b""
        if self._reader is None:
            missing = self._missing
            if len(data) > missing:
                data, rest = data[:missing], data[missing:]
            self._missing = missing - len(data)
            self.arrived = not self._missing
        else:
            data = self._reader.feed(data)
            if self._reader.error is not None:
                self.fail(invalid("The request body is not what its headers say.", code="bad_http_request"))
                return b""
            self.arrived, rest = self._reader.complete, self._reader.leftover
        if data:
            self._pieces.append(data)
            self._held += len(data)
        if self._collects:
            if self._held > self._limit:
                self.fail(self._too_large())
            elif self.arrived:
                self._wake()
        else:
            if self._held > _READ_AHEAD_BYTES and not self.arrived:
                self._source.pause_reading()
            self._wake()
        return rest

    def fail(self, error: ApiError) -> None:
        """Have whoever reads it raise `error`; nothing more is taken in."""
        self._error = error
        self._pieces.clear()
        self._wake()

    def overdue(self, now: float) -> None:
        """Give up a client that, while it was waited for, has paused for too long or sent too slowly."""
        if self._waiter is not None:
            allowed = BODY_IDLE_S + (self.size + self._held) / SLOWEST_BYTES_PER_S
            if now - self.last_fed > BODY_IDLE_S or self._waited + now > allowed:
                self.fail(ApiError(408, "The request body did not arrive in time.", code="request_timeout"))

    # What the handler does.

    def begin(self, limit: int) -> None:
        """Get ready to take it; before that, nothing of it is asked for. Raises ApiError (413) for a body that is
        announced to be larger than `limit` bytes."""
        self._limit = limit
        if (self.length or 0) > limit:
            raise self._too_large()
        if self._waits_to_send and not self._held and not self.arrived:
            self._source.write(_CONTINUE)

    @property
    def ended(self) -> bool:
        """Whether all of it has been taken."""
        return self.arrived and not self._pieces

    async def read(self) -> bytes:
        """The next bytes; none at its end. Raises ApiError: 413 over the limit, 408 for a client that stops sending,
        400 for bytes that are not what their framing says."""
        while not self._pieces and not self.arrived and self._error is None:
            await self._more()
        piece = self._take()
        self._source.resume_reading()
        return piece

    def drop(self) -> None:
        """Take no more of it: what is yet to come is thrown away."""
        if not self.arrived:
            self.fail(invalid("The request body is not taken any more."))  # nobody is told
            self._source.resume_reading()

    async def collect(self) -> bytes:
        """All of it. Raises ApiError as `read` does."""
        self._collects = True
        if not self.arrived:
            self._source.resume_reading()
            while not self.arrived and self._error is None:
                await self._more()
        return self._take()

    def _take(self) -> bytes:
        if self._error is not None:
            raise self._error
        pieces = self._pieces
        taken = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._held = 0
        self.size += len(taken)
        if self.size > self._limit:
            raise self._too_large()
        return taken

    async def _more(self) -> None:
        loop = asyncio.get_running_loop()
        self.last_fed = loop.time()
        self._waited -= self.last_fed
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._waited += loop.time()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _too_large(self) -> ApiError:
        message = f"The request body is larger than the limit of {self._limit} bytes."
        return ApiError(413, message, code="request_too_large")
