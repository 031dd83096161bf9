"""`ModelStreamInfer`: one stream of a client's, many streams to engines.

**Decoupled models** may answer a request with any number of messages. Each request gets a stream to an engine of its
own, so that it goes where its prompt's cache is, and ends by itself; what the engines send is merged in the order in
which it comes, and told apart by the ids of the requests, as from Triton.

**Other models** are answered in order (`gateway.grpc.turns`), each request by a unary call when it is its turn. Streams
to such a model can take its Triton down: once its answer has been written, the server's record of the request may be
free, and serve a request to a decoupled model, by the time Triton notes in it that the answer is complete; that request
then ends too early, under the model that answers it. Measured on 2.51: one stream to a model that answers once beside
three to a decoupled one, each answered to its end and none cancelled, crashed the server within seconds in most runs.
It was also seen to crash when it was to end such a model's stream with a status.

Errors are reported as Triton does: as an `error_message` with the request's id, and the stream goes on; or, to a client
that asked for statuses, as the status that ends the stream. Measured on 2.51, the latter holds only for what goes wrong
in a model: a request that is refused before is answered with a message in either mode, so it is here.

**Waiting for room.** A request for which every endpoint is full waits in its route's queue before it goes out. In a
stream, what is answered in order goes out in order, so those behind it wait with it; nobody holds room while it waits
for somebody before it who has none.

**Tasks.** The handler only waits for the session's end, so it is the only one whom gRPC cancels when the client leaves.
Requests and the reading of them are tasks that nobody cancels: leaving cancels the RPCs under them, in turn
(`gateway.grpc.call`), and they end by that. A request is read only if fewer than `MAX_OPEN` are being answered, and a
message from an engine only when the one before it has been taken by the client's stream, so nothing piles up here.

**The end of a gateway.** A server that stops closes a connection with its last stream. A client answers messages with
window updates and pings, and where those meet a closed connection they bring about a reset: a client to which that
happens before it has read the status takes its stream for lost, though it has all of it. So while the gateway drains
the status follows when there has been time for these answers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import grpc

from gateway.exchange import Exchange, Origin
from gateway.grpc import wire
from gateway.grpc.call import StreamCall, UnaryCall
from gateway.grpc.requests import Requests
from gateway.grpc.statuses import GONE, INTERNAL, OK, Status, status_of
from gateway.grpc.stream_errors import ClientGoneError, ReportedError, raise_if_retryable, refused_before_the_model
from gateway.grpc.turns import Turn
from gateway.http.client_response import NOBODY
from gateway.upstream.base import Headers, UpstreamError
from gateway.upstream.triton.raw import EngineStatusError, RawTriton
from router.errors import ApiError
from router.fleet import FleetView
from router.kserve import Inference, MalformedError, read_infer
from router.plan import Attempt, Plan

Ask = Callable[[Exchange, bytes, Inference, Turn], Awaitable[float]]
"""Answers a request; returns the loop time of its first message."""

logger = logging.getLogger(__name__)

MAX_OPEN = 1024
"""Requests of one stream that may be open at once."""
LAST_STATUS_S = 0.2
"""How long after the last message of a stream its status follows while the gateway drains."""

_NOT_READING = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "The client does not read its answers.")


class Streams:
    """The handler of `ModelStreamInfer`."""

    def __init__(self, requests: Requests, serving: Callable[[], bool]) -> None:
        """`serving` says that the gateway does not drain."""
        self._requests = requests
        self._serving = serving
        self._sessions: set[Session] = set()

    async def infer(self, _: object, context: Any) -> None:
        """Answer one stream."""
        session = Session(self._requests, context)
        await session.metadata.settle()
        try:
            self._requests.access.view(session.metadata.caller)
        except ApiError as error:
            refused = status_of(error)
            await context.abort(refused.code, refused.details, trailing_metadata=session.placed())
        self._sessions.add(session)
        session.start(self._sessions.discard)
        try:
            status = await session.ended
        except asyncio.CancelledError:
            session.leave(GONE)
            raise
        if not self._serving():
            await asyncio.sleep(LAST_STATUS_S)
        if status is not OK:
            await context.abort(status.code, status.details, trailing_metadata=session.placed())


class Session:
    """One client's stream; also the `Client` of its requests' exchanges."""

    def __init__(self, requests: Requests, context: Any) -> None:
        self.requests = requests
        self.metadata = requests.metadata(context, "ModelStreamInfer")
        self.paused_since = 0.0
        self.resumed_at = 0.0
        self.ended: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        """How the client's stream ends."""
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: Status | None = None
        self._slots = asyncio.Semaphore(MAX_OPEN)
        self._in_order = asyncio.Lock()
        self._last_turn: Turn | None = None
        self._writing = asyncio.Lock()
        self._endpoint = NOBODY
        self._headed = False
        self._exchanges: set[Exchange] = set()
        self._forget: Any = None

    def start(self, forget: Any) -> None:
        """Begin to read; `forget` is called when nothing of the session is left."""
        self._forget = forget
        self.spawn(self._read())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the session; when none is left, the session has ended."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_part)

    def leave(self, status: Status) -> None:
        """Give up everything that is open, and end with `status`."""
        if self._left is None:
            self._left = status
        if not self.ended.done():
            self.ended.set_result(status)
        for exchange in self._exchanges:
            if exchange.call is not None:
                exchange.call.close()

    def abort(self) -> None:
        self.leave(_NOT_READING)

    def origin(self) -> Origin:
        return self.metadata.origin()

    def refuse(self, error: UpstreamError) -> None:
        self.metadata.refuse(error)

    def placed(self) -> Any:
        """What is said about where the stream's first request went."""
        return self.metadata.answer(self._endpoint)

    async def write(self, message: bytes) -> None:
        """Send a message. Raises ClientGoneError."""
        async with self._writing:
            if self._left is not None:
                raise ClientGoneError
            self.paused_since = self.requests.live.now()
            try:
                if not self._headed:
                    self._headed = True
                    await self._context.send_initial_metadata(self.placed())
                await self._context.write(message)
            except (Exception, asyncio.CancelledError) as error:  # whatever it is, the stream cannot be written to
                raise ClientGoneError from error
            finally:
                self.paused_since = 0.0
                self.resumed_at = self.requests.live.now()

    def place(self, attempt: Attempt) -> None:
        """Remember where the first request went."""
        if self._endpoint is NOBODY:
            self._endpoint = attempt.endpoint.id

    def _ended_part(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a stream failed", exc_info=task.exception())
        if self._tasks:
            return
        if not self.ended.done():
            self.ended.set_result(OK)
        self._forget(self)

    async def _read(self) -> None:
        while self._left is None:
            await self._slots.acquire()
            try:
                message = await self._context.read()
            except (Exception, asyncio.CancelledError):  # the call has ended, which its handler learns otherwise
                return
            if message is grpc.aio.EOF:
                return
            self.spawn(self._serve(message))

    async def _serve(self, message: bytes) -> None:
        """Answer one request."""
        requests = self.requests
        status, found, first_write = INTERNAL, None, 0.0
        turn, in_turn = Turn(), True
        with Exchange(requests.live, self) as exchange:
            self._exchanges.add(exchange)
            requests.begin(exchange, self.metadata)
            try:
                async with self._in_order:  # in which requests go out
                    try:
                        fleet = requests.access.view(self.metadata.caller)
                        found = read_infer(message, stream=True, otherwise=requests.turn(), salt=fleet.salt)
                        if fleet.limits is not None:
                            await requests.reserve(found.prompt, exchange, fleet.limits, fleet)
                        ask, in_turn = await self._way(exchange, found, fleet, len(message))
                    finally:
                        if in_turn:
                            self._last_turn = turn = Turn(self._last_turn)
                first_write = await ask(exchange, message, found, turn)
                status = OK
            except ClientGoneError:
                status = self._left or GONE
            except (ApiError, UpstreamError, MalformedError) as error:
                status = self._left or status_of(error)
                await self._report(error, status, found, turn)
            except Exception:
                logger.exception("request %s failed", self.metadata.request_id)
                await self._report(None, status, found, turn)
            finally:
                turn.ends()
                self._exchanges.discard(exchange)
                self._slots.release()
                requests.observe(exchange, status, first_write)

    async def _way(self, exchange: Exchange, found: Inference, fleet: FleetView, size: int) -> tuple[Ask, bool]:
        """How a request of `size` bytes is to be answered, and whether in turn. Raises ApiError, UpstreamError,
        ClientGoneError."""
        decided = self.requests.plan(found.prompt, exchange, fleet)
        if await self._decoupled(decided):
            return partial(self._alone, decided, self._enter(exchange, decided, found, fleet, size)), False
        return self._once, True

    def _enter(
        self, exchange: Exchange, decided: Plan, found: Inference, fleet: FleetView, size: int
    ) -> asyncio.Future[Plan] | None:
        """As `gateway.grpc.requests.Requests.enter`. Raises ClientGoneError, too."""
        if self._left is not None:
            raise ClientGoneError
        return self.requests.enter(exchange, decided, found.prompt, self.metadata, fleet, size)

    async def _report(self, error: Exception | None, status: Status, found: Inference | None, turn: Turn) -> None:
        """Tell the client that a request failed."""
        await turn.comes()
        if self._left is not None:
            return
        as_message = isinstance(error, ReportedError | ApiError | MalformedError) or (
            found is not None and refused_before_the_model(error, found.id)
        )
        if self.metadata.wants_status and not as_message:
            self.leave(status)
            return
        if isinstance(error, ReportedError):
            message = wire.renamed(error.reported, wire.stream_name(found.prompt.model if found is not None else ""))
        else:
            message = wire.stream_error(status.details, found.id if found is not None else "")
        try:
            await self.write(message)
        except ClientGoneError:
            return

    async def _decoupled(self, decided: Plan) -> bool:
        """Whether the model may answer with many messages, as the first endpoint says that answers. Raises
        UpstreamError if none does."""
        failure: UpstreamError | None = None
        for attempt in decided.attempts:
            try:
                return await self.requests.raw(attempt).decoupled(attempt.pool.spec.model)
            except UpstreamError as error:
                self.requests.fleet.failed(attempt, error)
                failure = error
        assert failure is not None
        raise failure

    async def _alone(
        self,
        decided: Plan,
        waiting: asyncio.Future[Plan] | None,
        exchange: Exchange,
        message: bytes,
        found: Inference,
        _: Turn,
    ) -> float:
        """Answer a request to a decoupled model, which may be `waiting`. Returns the loop time of the first message."""
        requests = self.requests
        if waiting is not None:
            decided = await waiting

        async def send(attempt: Attempt, raw: RawTriton) -> tuple[Attempt, RawTriton, StreamCall, bytes | None]:
            renamed = message + wire.name_field(attempt.pool.spec.model)
            rpc = raw.infer_alone(renamed, exchange.passed(self.metadata.passed_stream) + self.credentials(attempt))
            call = StreamCall(raw, rpc, versioned=found.versioned, request_id=found.id)
            self.begin_call(exchange, call)
            first = await call.read()
            if first is not None and not wire.is_answer(first):
                raise_if_retryable(raw, first, found)
            return attempt, raw, call, first

        attempt, raw, call, answer = await requests.first_willing(exchange, decided, self.metadata.request_id, send)
        self.place(attempt)
        named = wire.stream_name(found.prompt.model)
        first_write = 0.0
        try:
            while answer is not None:
                if not wire.is_answer(answer):
                    judged = raw.judged_text(wire.error_text(answer), found, received=True)
                    requests.fleet.failed(attempt, judged)
                await self.write(wire.renamed(answer, named))
                first_write = first_write or requests.live.now()
                answer = await call.read()
        except UpstreamError as error:
            requests.fleet.failed(attempt, error)
            exchange.failed(error)
            raise
        return first_write

    async def _once(self, exchange: Exchange, message: bytes, found: Inference, turn: Turn) -> float:
        """Answer a request to a model that answers once, when it is its turn, for which it gets its plan only then.
        Returns the loop time of the answer."""

        async def send(attempt: Attempt, raw: RawTriton) -> bytes:
            renamed = message + wire.name_field(attempt.pool.spec.model)
            rpc = raw.unary("ModelInfer", renamed, exchange.passed(self.metadata.passed) + self.credentials(attempt))
            call = UnaryCall(raw, rpc, versioned=found.versioned, request_id=found.id)
            self.begin_call(exchange, call)
            return await call.response()

        await turn.comes()
        fleet = self.requests.access.view(self.metadata.caller)
        decided = self.requests.plan(found.prompt, exchange, fleet)
        if (waiting := self._enter(exchange, decided, found, fleet, len(message))) is not None:
            decided = await waiting
        try:
            answer = await self.requests.first_willing(exchange, decided, self.metadata.request_id, send)
        except EngineStatusError as error:
            if self.metadata.wants_status or refused_before_the_model(error, found.id):
                raise
            reported = wire.only_failure(error.details, message)
            raise ReportedError(error.failure, error.message, error.status, error.code, reported) from None
        finally:
            if exchange.attempt is not None:
                self.place(exchange.attempt)
        await self.write(wire.only_answer(answer, found.prompt.model))
        return self.requests.live.now()

    def credentials(self, attempt: Attempt) -> Headers:
        """What goes to an attempt's engine as `authorization`. Raises UpstreamError."""
        return self.requests.fleet.credentials(attempt, self.metadata.authorization)

    def begin_call(self, exchange: Exchange, call: StreamCall | UnaryCall) -> None:
        """Put a call on its exchange; raises ClientGoneError if it comes too late."""
        exchange.call = call
        if self._left is not None:
            raise ClientGoneError
