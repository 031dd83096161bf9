"""One request to one Triton server: a stream of its own that carries one request.

`ModelStreamInfer` (for a model that answers once, `ModelInfer`) is called as what it is here, one message one way and
many the other: request and half-close go out in one batch, the server ends the stream when the request is done, and
cancelling the stream cancels this request only, also before its first token. The end is the transport's: a message
flagged `triton_final_response`, or the end of the stream. An end without flag and text is an engine that lost the
request, not an empty answer.

`open` reads up to the first text, so that everything that fails before it still has a proper status and may be tried
elsewhere; of an answer that is not streamed it reads all. Once the end has been written, the stream is read to its own
end, which closes it the way the server expects.

Reading happens only in `open` and `relay`, one message at a time, so not reading is all that `pause` takes: gRPC's flow
control holds the server back.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from gateway.upstream.base import AnswerHead, EngineRequest, Failure, Sink, UpstreamError, closed
from gateway.upstream.triton.cancels import Canceller
from gateway.upstream.triton.choices import Choices
from gateway.upstream.triton.contract import Contract
from gateway.upstream.triton.failures import from_message, from_status, is_stub_death
from gateway.upstream.triton.prepare import one_choice_only, prepare
from gateway.upstream.triton.tokens import TokenCodec
from gateway.upstream.triton.unreadable import CHOICES_IGNORED, UNREADABLE, unreadable
from gateway.upstream.triton.vitals import Vitals

_TRAILING_MESSAGES = 2
"""Messages read after the last one that counts, in search of the stream's end."""


class TritonCall:
    """One request on its way; see `gateway.upstream.base.EngineCall`.

    `send` starts the RPC for a ModelInferRequest with metadata. `contract` is None while the model is unknown, `codec`
    where the pool has no tokenizer.
    `on_failure` is told every error of the engine's, and whether it says that the model's process is dead.
    """

    def __init__(
        self,
        request: EngineRequest,
        contract: Contract | None,
        attempt_id: str,
        send: Callable[..., Any],
        canceller: Canceller,
        vitals: Vitals,
        on_failure: Callable[[UpstreamError, bool], None],
        codec: TokenCodec | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.last_read = self._loop.time()
        self.answering = False
        self._request: EngineRequest | None = request
        self._account = request.account
        self._endpoint = request.endpoint.id
        self._contract = contract
        self._codec = codec
        self._attempt_id = attempt_id
        self._send = send
        self._canceller = canceller
        self._vitals = vitals
        self._on_failure = on_failure
        self._rpc: Any = None
        self._cancelled = False
        self._choices: Choices
        self._error: UpstreamError | None = None
        self._complete = False
        """The whole answer has been read and made out; nothing can fail any more."""
        self._opening = b""
        """What `open` has made of the answer, for `relay` to write."""
        self._may_read = asyncio.Event()
        self._may_read.set()

    async def open(self) -> AnswerHead:
        request, self._request = self._request, None  # the prompt is not needed once it has been sent
        assert request is not None
        if self._contract is None:
            raise self._failure(Failure.BUSY, "has not been probed yet", "engine_not_ready", 503)
        message, self._choices = await prepare(request, self._contract, self._attempt_id, self._codec)
        self._dispatch(message, request.headers)
        stream = request.stream
        del message, request
        return await (self._open_stream() if stream else self._collect())

    async def relay(self, sink: Sink) -> None:
        account = self._account
        account.body_bytes += len(self._opening)
        sink.write(self._opening)
        self._opening = b""
        while not self._complete:
            before = self.last_read
            if events := await self._next():
                account.gap(self.last_read - before)
                account.body_bytes += len(events)
                sink.write(events)
        await self._read_to_end()

    def pause(self) -> None:
        self._may_read.clear()

    def resume(self) -> None:
        self.last_read = self._loop.time()  # the engine has not been listened to
        self._may_read.set()

    @property
    def paused(self) -> bool:
        return not self._may_read.is_set()

    def abort(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error
            self._vitals.given_up(self, error)
        self._may_read.set()
        if self._rpc is not None and not self._cancelled:
            self._cancelled = True
            self._canceller.cancel(self._rpc, self._attempt_id)

    def close(self) -> None:
        self._vitals.unwatch(self)
        self.abort(closed())

    def _dispatch(self, message: Any, headers: tuple[tuple[str, str], ...]) -> None:
        if self._error is not None:
            raise self._error
        self.last_read = self._loop.time()
        try:
            self._rpc = self._send(message, metadata=(*headers, ("triton_grpc_error", "true")))
        except grpc.aio.UsageError:
            raise self._failure(Failure.CONNECT, "has left the fleet", "connect_failed") from None
        self._vitals.watch(self)

    async def _open_stream(self) -> AnswerHead:
        events = self._choices.opening()
        while not self._complete and not self.answering:
            events += await self._next()
        self._opening = events
        return AnswerHead(200, "text/event-stream; charset=utf-8", events=True)

    async def _collect(self) -> AnswerHead:
        while not self._complete:
            await self._next()
        self._opening = self._choices.whole()
        return AnswerHead(200, "application/json", content_length=len(self._opening))

    async def _next(self) -> bytes:
        """The events of one more message. Sets `_complete` with the last."""
        response = await self._read()
        choices = self._choices
        if response is None:
            if not choices.started:
                raise self._failure(Failure.LOST_BEFORE_ANSWER, "ended its answer before any text", "engine_lost")
        elif response.error_message:
            raise self._judged(
                from_message(
                    response.error_message,
                    endpoint=self._endpoint,
                    received=self.answering,
                    request_id=self._attempt_id,
                ),
                response.error_message,
            )
        try:
            if response is None:
                return self._finish()
            inferred = response.infer_response
            events = choices.feed(inferred)
            if not self.answering and choices.started:
                self.answering = True
            if inferred.parameters["triton_final_response"].bool_param or choices.overrun:
                events += self._finish()
        except UNREADABLE as error:
            judged = self._judged(unreadable(error, self._endpoint), None)
            raise (one_choice_only() if judged.code == CHOICES_IGNORED else judged) from None
        return events

    def _finish(self) -> bytes:
        """The last events, of an answer that ended in order."""
        events = self._choices.finish()
        self._choices.tell(self._account)
        self._complete = True
        return events

    async def _read(self) -> Any:
        """The next message, None at the end of the stream."""
        if not self._may_read.is_set():
            await self._may_read.wait()
        if self._error is not None:
            raise self._error
        try:
            message = await (self._shielded_read() if self._canceller.paced else self._rpc.read())
        except grpc.aio.AioRpcError as error:
            judged = from_status(error.code(), error.details(), endpoint=self._endpoint, received=self.answering)
            raise (self._error or self._judged(judged, error.details())) from None
        except asyncio.CancelledError:
            # gRPC raises this for a cancelled RPC as well; only a cancelled task may end as one.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise (self._error or self._failure(Failure.DIED, "has left the fleet", "engine_died")) from None
        if self._error is not None:
            raise self._error
        self.last_read = self._loop.time()
        return None if message is grpc.aio.EOF else message

    async def _shielded_read(self) -> Any:
        """A read that outlives this task: gRPC cancels the RPC of a read that is cancelled, before it is its turn."""
        reading = asyncio.ensure_future(self._rpc.read())
        reading.add_done_callback(seen)
        return await asyncio.shield(reading)

    async def _read_to_end(self) -> None:
        """Let the server close the stream; whatever happens now, the answer was complete."""
        self._may_read.set()
        if self._choices.overrun:
            return
        try:
            for _ in range(_TRAILING_MESSAGES):
                if await self._read() is None:
                    return
        except UpstreamError:
            return

    def _judged(self, error: UpstreamError, details: str | None) -> UpstreamError:
        self._on_failure(error, is_stub_death(details))
        return error

    def _failure(self, failure: Failure, what: str, code: str, status: int = 502) -> UpstreamError:
        return self._judged(UpstreamError(failure, f"Engine {self._endpoint} {what}.", status, code), None)


def seen(reading: "asyncio.Future[Any]") -> None:
    """Take note of an exception that nobody may be left to raise to."""
    if not reading.cancelled():
        reading.exception()
