"""A stream to one engine that requests of one client's stream share, because they are answered in order.

So it is for models that answer every request once. The first request decides for an endpoint and may be tried on
several; once one has answered, the stream is pinned to it: sequences live in one engine's memory, and answers cannot
come in order from two. The n-th answer then belongs to the n-th request, an error included. Deadlines hold for the
request whose turn it is; those behind it wait for it as they would at the engine. If the stream breaks, all of them
fail, and the next request starts a new one.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

from gateway.exchange import Exchange
from gateway.grpc import wire
from gateway.grpc.call import CLOSED, StreamCall
from gateway.grpc.stream_errors import ended_early, raise_if_retryable
from gateway.upstream.base import UpstreamError
from gateway.upstream.triton.raw import RawTriton
from router.kserve import Inference
from router.plan import Attempt, Plan

if TYPE_CHECKING:
    from gateway.grpc.stream import Session


class _Pending:
    """A request that waits for its turn to be answered; then the `LiveCall` of its exchange."""

    answering = False

    def __init__(self, exchange: Exchange, shared: "SharedStream", request_id: str) -> None:
        self.exchange = exchange
        self.request_id = request_id
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.last_read = 0.0
        self._shared = shared

    def abort(self, error: UpstreamError) -> None:
        if not self.done.done():
            self._shared.fail(error)

    def close(self) -> None:
        self.abort(CLOSED)


class SharedStream:
    """The stream; made with the plan of its first request."""

    def __init__(self, session: "Session", decided: Plan) -> None:
        self.route = decided.route.name
        self.broken = False
        """It takes no more requests."""
        self._session = session
        self._plan: Plan | None = decided
        self._opened = asyncio.Event()
        self._error: UpstreamError | None = None
        self._attempt: Attempt
        self._raw: RawTriton
        self._rpc: Any = None
        self._call: StreamCall
        self._pending: deque[_Pending] = deque()
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    async def ask(self, exchange: Exchange, message: bytes, found: Inference) -> float:
        """Answer a request. Returns the loop time of its answer. Raises UpstreamError, ClientGoneError, ApiError."""
        decided, self._plan = self._plan, None
        if decided is not None:
            try:
                return await self._open(exchange, message, found, decided)
            except UpstreamError as error:
                self._error = error
                raise
            finally:
                if self._reader is None:
                    self.broken = True
                self._opened.set()
        await self._opened.wait()
        if self._reader is None or self._error is not None:
            raise self._error or CLOSED
        pending = _Pending(exchange, self, found.id)
        self._pending.append(pending)
        if len(self._pending) == 1:
            self._its_turn(pending)
        else:
            exchange.begin_attempt(self._attempt)
        async with self._writing:
            await self._write(message)
        return await pending.done

    def fail(self, error: UpstreamError) -> None:
        """Give the stream up."""
        self.broken = True
        if self._rpc is not None:
            self._call.abort(error)

    def cancel(self) -> None:
        """Give it up because the client has left."""
        self.fail(CLOSED)

    def finish(self) -> None:
        """End the stream in order: nobody asks any more."""
        if self._reader is not None and not self.broken:
            self.broken = True
            self._closing = asyncio.ensure_future(self._rpc.done_writing())
            self._closing.add_done_callback(_seen)

    async def _open(self, exchange: Exchange, message: bytes, found: Inference, decided: Plan) -> float:
        session = self._session

        async def send(attempt: Attempt, raw: RawTriton) -> bytes:
            self._attempt, self._raw = attempt, raw
            self._rpc = raw.infer_stream(session.metadata.passed)
            self._call = StreamCall(raw, self._rpc, versioned=found.versioned, request_id=found.id)
            session.begin_call(exchange, self._call)
            await self._write(message)
            first = await self._call.read()
            if first is None:
                raise ended_early(self._attempt.endpoint.id)
            if not wire.is_answer(first):
                raise_if_retryable(raw, first, versioned=found.versioned)
            return first

        first = await session.requests.first_willing(exchange, decided, session.metadata.request_id, send)
        session.place(self._attempt)
        exchange.call, self._call.request_id = None, ""  # the stream outlives its first request
        self._named = wire.stream_name(found.prompt.model)
        await self._pass_on(first)
        self._reader = asyncio.create_task(self._read(), name="shared stream")
        return session.requests.live.now()

    async def _write(self, message: bytes) -> None:
        try:
            await self._rpc.write(message + wire.name_field(self._attempt.pool.spec.model))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError, asyncio.CancelledError):
            return  # the stream has ended; reading tells why

    async def _pass_on(self, message: bytes) -> None:
        if not wire.is_answer(message):
            error = self._raw.judged_text(wire.error_text(message), received=True, versioned=False)
            self._session.requests.fleet.failed(self._attempt.endpoint, error)
        await self._session.write(wire.renamed(message, self._named))

    async def _read(self) -> None:
        """Hand each answer to the request whose turn it is, until the stream ends."""
        try:
            while (message := await self._call.read()) is not None:
                if not self._pending:
                    continue  # an answer nobody asked for
                await self._pass_on(message)
                answered = self._pending.popleft()
                answered.done.set_result(self._session.requests.live.now())
                if self._pending:
                    self._its_turn(self._pending[0])
            error = ended_early(self._attempt.endpoint.id)
        except UpstreamError as failure:
            error = failure
        except Exception as failure:  # ClientGoneError: what is left is to stop the engine
            self.fail(CLOSED)
            self._end(failure)
            return
        if self._pending:
            self._session.requests.fleet.failed(self._attempt.endpoint, error)
        self._error = error
        self._end(error)

    def _end(self, error: Exception) -> None:
        self.broken = True
        while self._pending:
            done = self._pending.popleft().done
            if not done.done():
                done.set_exception(error)

    def _its_turn(self, pending: _Pending) -> None:
        pending.exchange.begin_attempt(self._attempt)
        pending.last_read = self._session.requests.live.now()
        pending.exchange.call, self._call.request_id = pending, pending.request_id


def _seen(closing: "asyncio.Future[None]") -> None:
    if not closing.cancelled():
        closing.exception()
