"""One HTTP request to an engine, and its answer relayed to a sink.

Everything happens in `data_received`: a read that can go on as it is goes to the client's socket before the event loop
turns again, if the stream is in its steady state without this module having a part in it (`gateway.relay.steady`). The
call only ever waits for two things, the beginning of the answer (`gateway.upstream.opening`) and its end.

An answer that breaks off is never made to look whole. What had been relayed stays, the unfinished event is dropped, and
`relay` raises. The one exception is a stream that had already said `[DONE]`: nothing of it is missing.
"""

import asyncio

from gateway.relay.accounting import USAGE_KEY, Account
from gateway.relay.events import END_MARK, EventHolder, EventTooLongError
from gateway.relay.http1 import FramingError, ResponseHead
from gateway.relay.steady import SteadyStream
from gateway.upstream.base import Failure, Sink, UpstreamError
from gateway.upstream.http_connection import Connection, ConnectionPool
from gateway.upstream.http_failures import broke_off, broke_protocol, lost
from gateway.upstream.opening import Opening

_STALE_S = 0.05
"""How soon a write shows that its connection was closed already: the reset is on its way or a round trip off."""
_EARLY_LIMIT = 64 * 1024
"""Body bytes read ahead of `relay` before reading is paused."""


class HttpCall(SteadyStream):
    """One request on one connection of `pool`.

    `request` is complete: head and body. `opening` knows when the answer has begun. `account` is filled in with what
    the answer says about itself.
    """

    __slots__ = (
        "_account",
        "_begun",
        "_connection",
        "_events",
        "_failed",
        "_given_up",
        "_loop",
        "_lost",
        "_lost_error",
        "_opening",
        "_over",
        "_pool",
        "_request",
        "_sink",
        "_tally",
        "_timeout",
        "_waiter",
        "_wanted",
        "answering",
    )

    def __init__(
        self,
        pool: ConnectionPool,
        request: tuple[bytes | memoryview, ...],
        connect_timeout: float,
        opening: Opening | None = None,
        account: Account | None = None,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._account = account
        self._tally = tally = account or Account(shows_usage=True)
        super().__init__(loop.time, tally.gap_counts)
        self._pool = pool
        self._request = request
        self._timeout = connect_timeout
        self._opening = opening or Opening()
        self._connection: Connection | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Whoever waits for the call: for as much of the opening as is `_wanted`, or for the end of the relay."""
        self._wanted = 0
        self._given_up: UpstreamError | None = None
        self._sink: Sink | None = None
        self._events: EventHolder | None = None
        self._begun = False
        """The client has been sent some of the body."""
        self._over = False
        """Nothing is to be relayed any more; `_failed` tells why not, if the answer is not complete."""
        self._failed: BaseException | None = None
        self._lost = False
        """The connection has ended before `relay`; `_lost_error` tells how."""
        self._lost_error: Exception | None = None
        self.last_read = loop.time()
        self.answering = False

    async def send(self) -> ResponseHead:
        """Send the request and wait until the answer has begun. Raises UpstreamError.

        A connection that was used before may be closed by the engine in the moment it is used again. If it ends at once
        and without a single byte of answer, the request is sent once more on a new one, as RFC 9112 section 9.3.1 has
        it. One that ends later had the request in work, and is not worked on twice here.
        """
        connection = self._pool.take(self._loop.time())
        if connection is not None:
            try:
                return await self._send_on(connection)
            except UpstreamError as error:
                if error.failure is not Failure.LOST_BEFORE_ANSWER or not self._was_stale():
                    raise
        return await self._send_on(await self._pool.connect(self._timeout))

    def _was_stale(self) -> bool:
        """Whether the connection just lost was dead before the request reached the engine."""
        unanswered = self._opening.untouched and self._given_up is None
        return unanswered and self._loop.time() - self.last_read < _STALE_S

    async def _send_on(self, connection: Connection) -> ResponseHead:
        self._connection = connection
        if self._given_up is not None:
            raise self._given_up
        assert connection.transport is not None
        self.last_read = self._loop.time()
        connection.receiver = self
        connection.transport.writelines(self._request)
        await self._wait()
        return self._opening.head

    async def read_ahead(self, size: int) -> bytes:
        """Wait for the first `size` bytes of the body, or for as much as there is of it, and return them. They stay to
        be relayed. Raises UpstreamError if the call is given up meanwhile."""
        if self._connection is not None and not self._opening.has(size):
            self._wanted = size
            await self._wait()
        return self._opening.content[:size]

    async def relay(self, sink: Sink) -> None:
        """Pass the body on until it is complete. Raises UpstreamError when it breaks off; a sink may raise it too.

        What was read before is passed on first; if the connection ended meanwhile, only then is it known what that
        means.
        """
        opening = self._opening
        self._request = ()
        self._sink = sink
        if opening.head.events:
            self._events = EventHolder()
        early, opening.content = opening.content, b""
        if len(early) >= _EARLY_LIMIT:
            self.resume()
        if early or opening.reader.complete or opening.reader.error is not None:
            try:
                self._pass_on(early, sink)
            except (FramingError, EventTooLongError, UpstreamError) as error:
                self._broken(error)
        if self._lost and not self._over:
            self._judge_end(self._lost_error)
        try:
            if not self._over:
                await self._wait()
            elif self._failed is not None:
                raise self._failed
        finally:
            self.transport = None
            self._tally.streamed(*self.taken())

    def receive(self, data: bytes, now: float) -> None:
        if self.transport is not None:
            self._tally.streamed(*self.taken())
        if self.answering:
            self._tally.gap(now - self.last_read)
        self.last_read = now
        try:
            if self._sink is not None:
                self._pass_on(self._opening.reader.feed(data), self._sink)
            else:
                self._read_early(data)
        except (FramingError, EventTooLongError, UpstreamError) as error:
            self._broken(error)

    def _read_early(self, data: bytes) -> None:
        opening = self._opening
        opening.feed(data)
        self.answering = opening.talks
        if len(opening.content) >= _EARLY_LIMIT:
            self.pause()
        if opening.has(self._wanted):
            self._wake()

    def _pass_on(self, payload: bytes, sink: Sink) -> None:
        """Pass on what has been read of the body, without its framing."""
        opening, events, chunks = self._opening, self._events, sink.chunks
        reader = opening.reader
        complete = reader.complete
        if events is not None:
            payload = events.feed(payload)
            torn = complete and events.torn
            if complete and not torn:
                payload += events.rest()
            self._events_out(payload, sink, last=complete and not torn)
            if torn:
                raise FramingError("a stream that ends in the middle of an event")
            self.transport = None
            if chunks is not None and self._begun and reader.at_boundary and not events.holding:
                self.transport, self.descriptor = chunks.transport, chunks.descriptor
        elif payload:
            if self._account is not None:
                self._account.read_whole(payload)
            sink.write(payload)
        if reader.error is not None:
            raise reader.error
        if complete:
            self._complete(reusable=opening.head.keep_alive and not reader.leftover)

    def _events_out(self, events: bytes, sink: Sink, *, last: bool = False) -> None:
        """Pass whole events on, without those that the client did not ask for; `last`: the body ends with them."""
        if self._account is not None and USAGE_KEY in events:
            events = self._account.without_usage(events)
        if not events:
            return
        self._tally.relayed(events)
        self._begun = True
        if last and sink.chunks is not None:
            sink.chunks.write_last(events)
        else:
            sink.write(events)

    def _wait(self) -> asyncio.Future[None]:
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _complete(self, *, reusable: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if reusable:
                self._pool.give_back(connection, self._loop.time())
            else:
                connection.drop()
        self._over = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._connection = None
        if not self._opening.begun:
            self._fail(lost(self._pool.endpoint))
        elif self._sink is None:
            self._lost, self._lost_error = True, error
            self._wake()
        elif not self._over:
            self._judge_end(error)

    def note_progress(self) -> None:
        """Bring its account up to date in the middle of a stream."""
        self._tally.streamed(*self.taken())

    def _judge_end(self, error: Exception | None) -> None:
        """The connection has ended after all that was read from it: is the answer whole?"""
        if self._ended_by_close(error):
            self._complete(reusable=False)
        else:
            self._fail(broke_off(self._pool.endpoint))

    def _ended_by_close(self, error: Exception | None) -> bool:
        """Whether the end of the connection is the end of the answer: the body is delimited by it, or nothing is
        missing but the framing."""
        head = self._opening.head
        if self._events is None:
            return error is None and not head.chunked and head.content_length is None
        self._tally.streamed(*self.taken())
        rest = self._events.rest()
        if END_MARK.search(rest) is None:
            return not rest and self._tally.said(END_MARK)
        if self._sink is not None:
            self._events_out(rest, self._sink)
        return True

    def _broken(self, error: Exception) -> None:
        self.abort(error if isinstance(error, UpstreamError) else broke_protocol(self._pool.endpoint, error))

    def _fail(self, error: UpstreamError) -> None:
        """Have whoever waits for the call raise `error`, or whoever will, once the answer has begun."""
        if self._opening.begun and not self._over:
            self._over, self._failed = True, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def abort(self, error: UpstreamError) -> None:
        """Give up: close the connection, which is how an HTTP engine learns of it, and let the waiter raise `error`,
        unless the stream has said that nothing of it is missing."""
        self._given_up = error
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()
        if self._sink is None or self._events is None or self._over or not self._ended_by_close(error):
            self._fail(error)
        else:
            self._complete(reusable=False)

    def close(self) -> None:
        """Release the connection; if the answer is not complete, the engine sees its client go."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()
        if not self._over:
            self._over, self._failed = True, asyncio.CancelledError()
        waiter = self._waiter
        if waiter is not None and not waiter.cancel() and not waiter.cancelled():
            waiter.exception()  # seen: nobody may be left to raise it to
