"""A stream to one engine that requests of one client's stream share: they are for one model, which answers each of them
once, in order.

The first request decides for an endpoint and may be tried on several; once one has answered, the stream is pinned to
it: sequences live in one engine's memory. The n-th answer then belongs to the n-th request, an error included. An
answer is written when its turn has come among those of all models (`gateway.grpc.turns`); until then it is held, and
nothing is read behind it. Deadlines hold for the request whose answer is due; those behind it wait for it as they would
at the engine. A request that the engine did not take, for its queue is full or the stream broke, is given back to be
tried elsewhere; the next one after a break starts a new stream.
"""

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

from gateway.exchange import Exchange
from gateway.grpc import wire
from gateway.grpc.call import StreamCall
from gateway.grpc.stream_errors import ended_early, raise_if_retryable, reported
from gateway.grpc.turns import Turn
from gateway.upstream.base import Failure, UpstreamError, closed
from gateway.upstream.triton.cancels import seen
from gateway.upstream.triton.raw import RawTriton
from router.fleet import Route
from router.kserve import Inference
from router.plan import Attempt, Plan, room

if TYPE_CHECKING:
    from gateway.grpc.stream import Session


class NotSentError(UpstreamError):
    """A request was not sent, because the stream to the engine had ended."""

    def __init__(self) -> None:
        super().__init__(Failure.BUSY, "The stream to the engine had ended.", 503, "engine_gone")


class _Pending:
    """A request that waits for its answer; when that is due, the `LiveCall` of its exchange."""

    def __init__(self, exchange: Exchange, found: Inference, turn: Turn, shared: "SharedStream") -> None:
        self.exchange = exchange
        self.found = found
        self.turn = turn
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.last_read = 0.0
        self.answering = False
        self._shared = shared

    def answered(self) -> None:
        """The engine owes it nothing more."""
        self.answering = True
        self.last_read = math.inf

    def abort(self, error: UpstreamError) -> None:
        if not self.done.done():
            self._shared.fail(error)

    def close(self) -> None:
        self.abort(closed())


class SharedStream:
    """The stream; made with the plan of its first request."""

    def __init__(self, session: "Session", decided: Plan) -> None:
        self.route = decided.route.name
        self.broken = False
        """It takes no more requests."""
        self._session = session
        self._plan: Plan | None = decided
        self._attempt: Attempt
        self._raw: RawTriton
        self._rpc: Any = None
        self._call: StreamCall
        self._pending: deque[_Pending] = deque()
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        """The id of the endpoint it goes to, or went to last; empty before."""
        return self._attempt.endpoint.id if self._rpc is not None else ""

    def plan(self, route: Route) -> Plan | None:
        """The only place where its next request can go, as a plan; None before the first has got anywhere."""
        if self._rpc is None:
            return None
        return Plan(route, (self._attempt,), room(self._attempt.endpoint), narrowed=True)

    async def ask(self, exchange: Exchange, message: bytes, found: Inference, turn: Turn) -> float:
        """Answer a request. Returns the loop time of its answer.

        Raises UpstreamError (NotSentError if the request was never sent), ClientGoneError, ApiError.
        """
        pending = _Pending(exchange, found, turn, self)
        decided, self._plan = self._plan, None
        async with self._writing:  # requests go out in the order in which they were asked
            if decided is not None:
                try:
                    first = await self._open(exchange, message, found, decided)
                except Exception:
                    self.broken = True
                    raise
                pending.answered()
                exchange.call = pending  # the stream outlives its first request
                self._pending.append(pending)
                self._reader = asyncio.create_task(self._read(first), name="shared stream")
            elif self.broken:
                raise NotSentError
            else:
                self._pending.append(pending)
                if len(self._pending) == 1:
                    self._is_due(pending)
                else:
                    exchange.begin_attempt(self._attempt)
                await self._write(message)
        return await pending.done

    def fail(self, error: UpstreamError) -> None:
        """Give the stream up."""
        self.broken = True
        if self._rpc is not None:
            self._call.abort(error)

    def cancel(self) -> None:
        """Give it up because the client has left."""
        self.fail(closed())

    def finish(self) -> None:
        """End the stream in order: nobody asks any more."""
        if self._reader is not None and not self.broken:
            self.broken = True
            self._closing = asyncio.ensure_future(self._rpc.done_writing())
            self._closing.add_done_callback(seen)

    async def _open(self, exchange: Exchange, message: bytes, found: Inference, decided: Plan) -> bytes:
        """The first answer, of the first endpoint that gives one."""
        session = self._session

        async def send(attempt: Attempt, raw: RawTriton) -> bytes:
            self._attempt, self._raw = attempt, raw
            self._rpc = raw.infer_stream(exchange.passed(session.metadata.passed) + session.credentials(attempt))
            self._call = StreamCall(raw, self._rpc, versioned=found.versioned, request_id=found.id)
            session.begin_call(exchange, self._call)
            await self._write(message)
            first = await self._call.read()
            if first is None:
                raise ended_early(self._attempt.endpoint.id)
            if not wire.is_answer(first):
                raise_if_retryable(raw, first, found)
            return first

        first = await session.requests.first_willing(exchange, decided, session.metadata.request_id, send)
        session.place(self._attempt)
        self._named = wire.stream_name(found.prompt.model)
        return first

    async def _write(self, message: bytes) -> None:
        try:
            await self._rpc.write(message + wire.name_field(self._attempt.pool.spec.model))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError, asyncio.CancelledError):
            return  # the stream has ended; reading tells why

    async def _read(self, message: bytes | None) -> None:
        """Hand each answer to the request it is for, until the stream ends; `message` is the first."""
        try:
            while message is not None:
                if self._pending:  # else it is an answer that nobody asked for
                    await self._hand_over(message, self._pending[0])
                    self._pending.popleft()
                    if self._pending:
                        self._is_due(self._pending[0])
                message = await self._call.read()
            error = ended_early(self._attempt.endpoint.id)
        except UpstreamError as failure:
            error = failure
        except Exception as failure:  # ClientGoneError: what is left is to stop the engine
            self.fail(closed())
            self._end(failure)
            return
        if self._pending:
            self._session.requests.fleet.failed(self._attempt, error)
        self._end(error)

    async def _hand_over(self, message: bytes, pending: _Pending) -> None:
        """Write a request's answer, or let the request be tried elsewhere."""
        pending.answered()
        self._call.request_id = ""  # there is nothing to stop until the next answer is due
        if not wire.is_answer(message):
            error = reported(self._raw, message, pending.found)
            self._session.requests.fleet.failed(self._attempt, error)
            if error.endpoint_fault:
                self.finish()
            if error.retryable:
                pending.done.set_exception(error)
                return
        await pending.turn.comes()
        await self._session.write(wire.renamed(message, self._named))
        pending.done.set_result(self._session.requests.live.now())

    def _end(self, error: Exception) -> None:
        self.broken = True
        while self._pending:
            done = self._pending.popleft().done
            if not done.done():
                done.set_exception(error)

    def _is_due(self, pending: _Pending) -> None:
        pending.exchange.begin_attempt(self._attempt)
        pending.last_read = self._session.requests.live.now()
        pending.exchange.call, self._call.request_id = pending, pending.found.id
