"""One HTTP request to an engine, and its answer relayed to a sink.

Everything happens in `data_received`: a read that can go on as it is goes to the client's socket before the event loop
turns again, if the stream is in its steady state without this module having a part in it (`gateway.relay.steady`). The
call only ever waits for two things, the head of the answer and its end.

An answer that breaks off is never made to look whole. What had been relayed stays, the unfinished event is dropped, and
`relay` raises. The one exception is a stream that had already said `[DONE]`: nothing of it is missing.

Some engines can be made to send events before their first content. A call told how to know them (`preamble`) drops
them, and takes the answer for begun only with the first event that is none: until then it may still be tried elsewhere.
The same holds for a call that is told to hold the head of a stream (`holds_head`): engines send it before they have
begun with the prompt.
"""

import asyncio
from collections.abc import Callable

from gateway.relay.accounting import Account, says_usage
from gateway.relay.events import END_MARK, EventHolder, EventTooLongError
from gateway.relay.http1 import HEAD_LIMIT, ChunkedReader, FramingError, ResponseHead, parse_head
from gateway.relay.steady import SteadyStream
from gateway.upstream.base import Failure, Sink, UpstreamError
from gateway.upstream.http_connection import Connection, ConnectionPool
from gateway.upstream.http_failures import broke_off, broke_protocol, lost

_INTERIM_LIMIT = 16
"""1xx responses before the real one."""
_STALE_S = 0.05
"""How soon a write shows that its connection was closed already: the reset is on its way or a round trip off."""
_EARLY_LIMIT = 64 * 1024
"""Body bytes read ahead of `relay` before reading is paused."""


class HttpCall(SteadyStream):
    """One request on one connection of `pool`.

    `request` is complete: head and body. `preamble` tells of an event of a stream that it comes before the content.
    `account` is filled in with what the answer says about itself.
    """

    __slots__ = (
        "_account",
        "_begun",
        "_connection",
        "_done",
        "_early",
        "_early_size",
        "_events",
        "_first_content",
        "_given_up",
        "_head",
        "_head_bytes",
        "_head_waiter",
        "_holds_head",
        "_interim",
        "_loop",
        "_lost",
        "_lost_error",
        "_pool",
        "_preamble",
        "_reader",
        "_remaining",
        "_request",
        "_sink",
        "_tally",
        "_timeout",
        "answering",
    )

    def __init__(
        self,
        pool: ConnectionPool,
        request: tuple[bytes | memoryview, ...],
        connect_timeout: float,
        preamble: Callable[[bytes], bool] | None = None,
        account: Account | None = None,
        *,
        holds_head: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._account = account
        self._tally = account or Account(shows_usage=True)
        super().__init__(self._loop.time, self._tally.gap_counts)
        self._pool = pool
        self._request = request
        self._timeout = connect_timeout
        self._connection: Connection | None = None
        self._head: ResponseHead | None = None
        self._head_bytes = b""
        self._interim = 0
        self._head_waiter: asyncio.Future[ResponseHead] | None = None
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._given_up: UpstreamError | None = None
        self._sink: Sink | None = None
        self._begun = False
        """The client has been sent some of the body."""
        self._early: list[bytes] = []
        self._early_size = 0
        self._lost = False
        self._lost_error: Exception | None = None
        self._reader: ChunkedReader | None = None
        self._remaining = 0
        self._events: EventHolder | None = None
        self._preamble = preamble
        self._holds_head = holds_head
        self._first_content = b""
        self.last_read = self._loop.time()
        self.answering = False

    async def send(self) -> ResponseHead:
        """Send the request and wait for the head of the answer. Raises UpstreamError.

        A connection that was used before may be closed by the engine in the moment it is used again. If it ends at once
        and without a single byte of answer, the request is sent once more on a new one, as RFC 9112 section 9.3.1 has
        it. One that ends later had the request in work, and is not worked on twice here.
        """
        connection = self._pool.take()
        if connection is not None:
            try:
                return await self._send_on(connection)
            except UpstreamError as error:
                if error.failure is not Failure.LOST_BEFORE_ANSWER or not self._was_stale():
                    raise
        return await self._send_on(await self._pool.connect(self._timeout))

    def _was_stale(self) -> bool:
        """Whether the connection just lost was dead before the request reached the engine."""
        unanswered = self._head is None and not self._head_bytes and self._given_up is None
        return unanswered and self._loop.time() - self.last_read < _STALE_S

    async def _send_on(self, connection: Connection) -> ResponseHead:
        self._connection = connection
        if self._given_up is not None:
            raise self._given_up
        assert connection.transport is not None
        self.last_read = self._loop.time()
        self._head_waiter = self._loop.create_future()
        connection.read_for(self)
        connection.transport.writelines(self._request)
        return await self._head_waiter

    async def relay(self, sink: Sink) -> None:
        """Pass the body on until it is complete. Raises UpstreamError when it breaks off; a sink may raise it too.

        What was read before is passed on first; if the connection ended meanwhile, only then is it known what that
        means.
        """
        self._request = ()
        self._sink = sink
        early, self._early = self._early, []
        if self._early_size >= _EARLY_LIMIT:
            self.resume()
        if self._first_content:
            self._events_out(self._first_content, sink)
            early.insert(0, b"")  # the same read may have ended the body
        try:
            for data in early:
                self._body(data, sink)
        except (FramingError, EventTooLongError, UpstreamError) as error:
            self._broken(error)
        if self._lost and not self._done.done():
            self._judge_end(self._lost_error)
        try:
            await self._done
        finally:
            self.write = None
            self._tally.streamed(*self.taken())

    def receive(self, data: bytes, now: float) -> None:
        if self.write is not None:
            self._tally.streamed(*self.taken())
        if self.answering:
            self._tally.gap(now - self.last_read)
        self.last_read = now
        try:
            if self._head is None:
                data = self._read_head(data)
                if not data:
                    return
            if self._preamble is not None:
                self._read_preamble(data, self._preamble)
                return
            self.answering = True
            if self._sink is not None:
                self._body(data, self._sink)
            else:
                self._early.append(data)
                self._early_size += len(data)
                if self._early_size >= _EARLY_LIMIT:
                    self.pause()
                if self._holds_head:
                    self._holds_head = False
                    assert self._head is not None
                    self._begin_answer(self._head)
        except (FramingError, EventTooLongError, UpstreamError) as error:
            self._broken(error)

    def _read_head(self, data: bytes) -> bytes:
        """Take the head, once it is there, and return the body bytes that came with it."""
        self._head_bytes += data
        while (end := self._head_bytes.find(b"\r\n\r\n")) >= 0:
            head = parse_head(self._head_bytes[:end])
            self._head_bytes = self._head_bytes[end + 4 :]
            if head.status >= 200:
                self._start_body(head)
                return self._head_bytes
            self._interim += 1
            if self._interim > _INTERIM_LIMIT:
                raise FramingError(f"more than {_INTERIM_LIMIT} interim responses")
        if len(self._head_bytes) > HEAD_LIMIT:
            raise FramingError(f"a response head of more than {HEAD_LIMIT} bytes")
        return b""

    def _start_body(self, head: ResponseHead) -> None:
        self._head = head
        if head.chunked:
            self._reader = ChunkedReader()
        self._remaining = head.content_length or 0
        if head.events:
            self._events = EventHolder()
        if not (head.chunked and self._events is not None):
            self._preamble = None
        if self._preamble is not None or self._events is None or head.content_length == 0:
            self._holds_head = False
        if self._preamble is None and not self._holds_head:
            self._begin_answer(head)
        if head.content_length == 0:
            self._complete(reusable=head.keep_alive)

    def _begin_answer(self, head: ResponseHead) -> None:
        assert self._head_waiter is not None
        if not self._head_waiter.done():
            self._head_waiter.set_result(head)

    def _read_preamble(self, data: bytes, preamble: Callable[[bytes], bool]) -> None:
        """Drop the events before the first content."""
        assert self._head is not None and self._reader is not None and self._events is not None
        content = self._events.feed(self._reader.feed(data))
        while content:
            end = content.find(b"\n\n") + 2
            if end < 2 or not preamble(content[:end]):
                break
            content = content[end:]
        if self._reader.complete:
            content += self._events.rest()
        if not content and (self._reader.error is not None or self._reader.complete):
            raise self._reader.error or FramingError("a stream without content")
        if content:
            self._preamble = None
            self._first_content = content
            self.answering = True
            self._begin_answer(self._head)

    def _body(self, data: bytes, sink: Sink) -> None:
        assert self._head is not None
        reader, events, chunks = self._reader, self._events, sink.chunks
        if reader is not None:
            payload = reader.feed(data)
            complete, leftover = reader.complete, bool(reader.leftover)
        elif self._head.content_length is not None:
            payload = data[: self._remaining]
            self._remaining -= len(payload)
            complete, leftover = self._remaining == 0, len(payload) < len(data)
        else:
            payload, complete, leftover = data, False, False
        if events is not None:
            payload = events.feed(payload)
            torn = complete and events.torn
            if complete and not torn:
                payload += events.rest()
            self._events_out(payload, sink, last=complete and not torn)
            if torn:
                raise FramingError("a stream that ends in the middle of an event")
            flows = self._begun and reader is not None and reader.at_boundary and not events.holding
            self.write = chunks.write_raw if flows and chunks is not None else None
        elif payload:
            if self._account is not None:
                self._account.read_whole(payload)
            sink.write(payload)
        if reader is not None and reader.error is not None:
            raise reader.error
        if complete:
            self._complete(reusable=self._head.keep_alive and not leftover)

    def _events_out(self, events: bytes, sink: Sink, *, last: bool = False) -> None:
        """Pass whole events on, without those that the client did not ask for; `last`: the body ends with them."""
        if self._account is not None and says_usage(events):
            events = self._account.without_usage(events)
        if not events:
            return
        self._tally.relayed(events)
        self._begun = True
        if last and sink.chunks is not None:
            sink.chunks.write_last(events)
        else:
            sink.write(events)

    def _complete(self, *, reusable: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if reusable:
                self._pool.give_back(connection)
            else:
                connection.drop()
        if not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection = None
        if self._head is None or self._preamble is not None or self._holds_head:
            self._fail(lost(self._pool.endpoint))
        elif self._sink is None:
            self._lost, self._lost_error = True, error
        elif not self._done.done():
            self._judge_end(error)

    def _judge_end(self, error: Exception | None) -> None:
        """The connection has ended after all that was read from it: is the answer whole?"""
        if self._ended_by_close(error):
            self._complete(reusable=False)
        else:
            self._fail(broke_off(self._pool.endpoint))

    def _ended_by_close(self, error: Exception | None) -> bool:
        """Whether the end of the connection is the end of the answer: the body is delimited by it, or nothing is
        missing but the framing."""
        assert self._head is not None
        if self._events is None:
            return error is None and not self._head.chunked and self._head.content_length is None
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
        if self._head_waiter is not None and not self._head_waiter.done():
            self._head_waiter.set_exception(error)
        elif self._head is not None and not self._done.done():
            self._done.set_exception(error)

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
        if self._sink is None or self._events is None or self._done.done() or not self._ended_by_close(error):
            self._fail(error)
        else:
            self._complete(reusable=False)

    def close(self) -> None:
        """Release the connection; if the answer is not complete, the engine sees its client go."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()
        for waiter in (self._head_waiter, self._done):
            if waiter is None:
                continue
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen: nobody may be left to raise it to
            else:
                waiter.cancel()
