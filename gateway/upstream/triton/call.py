"""One request to one Triton server: a stream of its own that carries one request.

`ModelStreamInfer` (for a model that answers once, `ModelInfer`) is called as what it is here, one message one way and
many the other: the request and the end of ours go out together, the server ends the stream when the request is done,
and cancelling the stream cancels this request only, also before its first token. The end is the transport's: a message
flagged `triton_final_response`, or the end of the stream. An end without flag and text is an engine that lost the
request, not an empty answer.

Messages are worked off where they arrive, in the connection's `data_received`: what one read of the socket brought of
this answer becomes one write to the client, without a task or a future in between. Two things wait: `open`, for the
first text, so that everything that fails before it still has a proper status and may be tried elsewhere (for all of an
answer that is not streamed), and `relay`, for the end.

Once the answer is complete and written, the stream is let come to its own end, which closes it the way the server
expects; nothing that happens then concerns the client.

A call that is paused keeps what it is sent, which is one window of HTTP/2's flow control at most: the server is given
no room for more, and must wait.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from gateway.upstream.base import AnswerHead, EngineRequest, Failure, Sink, UpstreamError, closed
from gateway.upstream.http2.grpc_stream import CallEnd, Cause, Receiver
from gateway.upstream.triton import cancels
from gateway.upstream.triton.answer import EngineSaysError
from gateway.upstream.triton.cancels import Canceller
from gateway.upstream.triton.choices import Choices
from gateway.upstream.triton.contract import Contract
from gateway.upstream.triton.failures import from_end, from_message, is_stub_death
from gateway.upstream.triton.prepare import one_choice_only, prepare
from gateway.upstream.triton.responses import ResponseReader
from gateway.upstream.triton.tokens import TokenCodec
from gateway.upstream.triton.unreadable import CHOICES_IGNORED, UNREADABLE, unreadable
from gateway.upstream.triton.vitals import Vitals

_TRAILING_MESSAGES = 2
"""Messages after the last one that counts, while the stream's end is waited for."""


class Rpc(cancels.Rpc, Protocol):
    """A call that has been sent."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Method(Protocol):
    """How calls are sent; see `gateway.upstream.triton.infer`."""

    @property
    def decode(self) -> Callable[[bytes], Any]: ...

    async def connect(self, timeout: float) -> None: ...

    def start(self, receiver: Receiver, message: Any, metadata: tuple[tuple[str, str], ...]) -> Rpc: ...


class TritonCall:
    """One request on its way; see `gateway.upstream.base.EngineCall`. What of it a stream calls is `Receiver`.

    `contract` is None while the model is unknown, `codec` where the pool has no tokenizer.
    `on_failure` is told every error of the engine's, and whether it says that the model's process is dead.
    """

    __slots__ = (
        "_account", "_attempt_id", "_cancelled", "_canceller", "_choices", "_codec", "_complete", "_contract",
        "_endpoint", "_error", "_loop", "_method", "_on_failure", "_opening", "_over", "_request", "_responses", "_rpc",
        "_sink", "_stream", "_trailing", "_vitals", "_waiter", "answering", "last_read", "paused",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        contract: Contract | None,
        attempt_id: str,
        method: Method,
        canceller: Canceller,
        vitals: Vitals,
        on_failure: Callable[[UpstreamError, bool], None],
        codec: TokenCodec | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.last_read = self._loop.time()
        self.answering = False
        self.paused = False
        """The client does not keep up."""
        self._request: EngineRequest | None = request
        self._stream = request.stream
        self._account = request.account
        self._endpoint = request.endpoint.id
        self._contract = contract
        self._codec = codec
        self._attempt_id = attempt_id
        self._method = method
        self._canceller = canceller
        self._vitals = vitals
        self._on_failure = on_failure
        self._rpc: Rpc | None = None
        self._cancelled = False
        self._choices: Choices
        self._responses: ResponseReader
        self._sink: Sink | None = None
        self._error: Exception | None = None
        """Why no more of the answer is passed on."""
        self._complete = False
        """The whole answer has been read and made out; nothing can fail any more."""
        self._over = False
        """The stream has ended as well, or need not be waited for."""
        self._trailing = 0
        self._opening = b""
        """What has been made of the answer before `relay`, for that to write."""
        self._waiter: asyncio.Future[None] | None = None

    async def open(self) -> AnswerHead:
        request, self._request = self._request, None  # the prompt is not needed once it has been sent
        assert request is not None
        if self._contract is None:
            raise self._failure(Failure.BUSY, "has not been probed yet", "engine_not_ready", 503)
        roles = {name: field for field, name in self._contract.outputs.items()}
        self._responses = ResponseReader(self._method.decode, roles)
        message, self._choices = await prepare(request, self._contract, self._attempt_id, self._codec)
        try:
            await self._method.connect(request.connect_timeout)
        except UpstreamError as error:
            raise self._error or self._judged(error, None) from None
        if self._error is not None:
            raise self._error
        self.last_read = self._loop.time()
        if self._stream:
            self._opening = self._choices.opening()
        self._rpc = self._method.start(self, message, request.headers)
        self._vitals.watch(self)
        del message, request
        if not self._opened:
            await self._woken()
        if not self._opened:
            assert self._error is not None
            raise self._error
        self._rpc.pause()  # until it is known who to write to
        if self._stream:
            return AnswerHead(200, "text/event-stream; charset=utf-8", events=True)
        self._opening = self._choices.whole()
        return AnswerHead(200, "application/json", content_length=len(self._opening))

    async def relay(self, sink: Sink) -> None:
        opening, self._opening = self._opening, b""
        self._write(sink, opening)
        self._sink = sink
        if self._rpc is not None and (self._complete or not self.paused):
            self._rpc.resume()
        if not self._over and self._error is None:
            await self._woken()
        if self._error is not None and not self._complete:
            raise self._error

    def messages_received(self, messages: list[bytes]) -> None:
        if self._error is not None:
            return
        before, self.last_read = self.last_read, self._loop.time()
        error: Exception | None = None
        events = b""
        try:
            for message in messages:
                events += self._read(message)
        except Exception as raised:  # to be raised to whoever waits, not into the connection
            error = raised
        self._pass_on(events, self.last_read - before, error)

    def call_ended(self, end: CallEnd) -> None:
        self._over = True
        if self._error is not None:
            return
        before, self.last_read = self.last_read, self._loop.time()
        error: Exception | None = None
        events = b""
        if not self._complete:
            try:
                events = self._read_end(end)
            except Exception as raised:
                error = raised
        self._pass_on(events, self.last_read - before, error)

    def pause(self) -> None:
        self.paused = True
        if self._rpc is not None and not self._complete:
            self._rpc.pause()

    def resume(self) -> None:
        self.paused = False
        self.last_read = self._loop.time()  # the engine has not been listened to
        if self._rpc is not None and self._sink is not None:
            self._rpc.resume()

    def abort(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error
            self._vitals.given_up(self, error)
        self._wake()
        if self._rpc is not None and not self._cancelled:
            self._cancelled = True
            done = self._complete and not self._choices.overrun  # all that is left to stop is the stream's end
            self._canceller.cancel(self._rpc, None if done else self._attempt_id)

    def close(self) -> None:
        self._vitals.unwatch(self)
        self.abort(closed())

    @property
    def _opened(self) -> bool:
        """What `open` waits for has come."""
        return self._complete or (self._stream and self.answering)

    async def _woken(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read(self, message: bytes) -> bytes:
        """The events of one more message. Sets `_complete` with the last."""
        if self._complete:
            self._trailing += 1
            return b""
        choices = self._choices
        try:
            response = self._responses.read(message)
            events = choices.take(response)
            if not self.answering and choices.started:
                self.answering = True
            if response.final or choices.overrun:
                events += self._finish()
        except UNREADABLE as error:
            raise self._unreadable(error) from None
        except EngineSaysError as error:
            text, received = str(error), self.answering
            judged = from_message(text, endpoint=self._endpoint, received=received, request_id=self._attempt_id)
            raise self._judged(judged, text) from None
        return events

    def _read_end(self, end: CallEnd) -> bytes:
        """The last events, of a stream that ended before its answer was complete."""
        if not end.ok:
            judged = from_end(end, endpoint=self._endpoint, received=self.answering)
            raise self._judged(judged, end.details if end.cause is Cause.STATUS else None)
        if not self._choices.started:
            raise self._failure(Failure.LOST_BEFORE_ANSWER, "ended its answer before any text", "engine_lost")
        try:
            return self._finish()
        except UNREADABLE as error:
            raise self._unreadable(error) from None

    def _finish(self) -> bytes:
        """The last events, of an answer that ended in order."""
        events = self._choices.finish()
        self._choices.tell(self._account)
        self._complete = True
        return events

    def _pass_on(self, events: bytes, gap: float, error: Exception | None) -> None:
        """Write what came, or keep it for `relay`; then let those go on who waited for it."""
        sink = self._sink
        if sink is None:
            self._opening += events
        elif events:
            self._account.gap(gap)
            try:
                self._write(sink, events)
            except Exception as raised:
                error = error or raised
        if error is not None:
            self._error = error
        if self._complete:
            if self._rpc is not None:
                self._rpc.resume()
            # Messages behind the answer's last are borne, whatever they say, but not for ever.
            self._over = self._over or self._trailing >= _TRAILING_MESSAGES or self._choices.overrun
        if error is not None or self._over or (sink is None and self._opened):
            self._wake()

    def _write(self, sink: Sink, events: bytes) -> None:
        self._account.body_bytes += len(events)
        if self._complete and sink.chunks is not None:
            sink.chunks.write_last(events)
        else:
            sink.write(events)

    def _unreadable(self, error: Exception) -> Exception:
        judged = self._judged(unreadable(error, self._endpoint), None)
        return one_choice_only() if judged.code == CHOICES_IGNORED else judged

    def _judged(self, error: UpstreamError, details: str | None) -> UpstreamError:
        self._on_failure(error, is_stub_death(details))
        return error

    def _failure(self, failure: Failure, what: str, code: str, status: int = 502) -> UpstreamError:
        return self._judged(UpstreamError(failure, f"Engine {self._endpoint} {what}.", status, code), None)
