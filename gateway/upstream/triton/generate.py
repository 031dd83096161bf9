"""One request to one Triton server over HTTP: its generate extension, for pools with `transport: http`.

What is sent and what the answer means is the same as over gRPC; only the form differs (`generate_form`). Events are
read where they arrive, in `data_received`, and written on from there: no task switch per event.

**Unary requests** stream from the engine too, where the model can: Triton never notices that the client of `generate`
has gone, that of `generate_stream` it does, with the next message.

**Cancelling** is closing the connection. Before its first response Triton does not look at it: a request closed in the
queue or during prefill runs on until its first token. Only gRPC does better, and stop requests, which the raw engine
takes; they go over gRPC, so the endpoint needs that address for them. That is why gRPC is the default.

**Errors.** The head comes with the first response, and its status is that of the first response. `open` waits for the
first text all the same, because until then nothing has been promised to the client. Later errors are events.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from gateway.relay.accounting import Account
from gateway.upstream.base import AnswerHead, EngineRequest, Failure, Sink, UpstreamError
from gateway.upstream.collected import Collected
from gateway.upstream.http_call import HttpCall
from gateway.upstream.http_connection import ConnectionPool
from gateway.upstream.triton.answer import EngineSaysError
from gateway.upstream.triton.cancels import Canceller, seen
from gateway.upstream.triton.choices import ANSWER_LIMIT, Choices
from gateway.upstream.triton.contract import Contract
from gateway.upstream.triton.failures import MODEL_DEAD, from_http, from_message
from gateway.upstream.triton.generate_form import EventDecoder, error_text, generate_request
from gateway.upstream.triton.prepare import one_choice_only, prepare
from gateway.upstream.triton.tokens import TokenCodec
from gateway.upstream.triton.unreadable import CHOICES_IGNORED, UNREADABLE, unreadable
from gateway.upstream.triton.vitals import Vitals

_READING = (EngineSaysError, *UNREADABLE)
"""What reading an answer may raise."""


class GenerateCall(HttpCall):
    """One request on its way; see `gateway.upstream.base.EngineCall`, and `TritonCall` for the arguments."""

    __slots__ = (
        "_asked", "_attempt_id", "_canceller", "_choices", "_codec", "_contract", "_decoder", "_on_failure",
        "_relaying", "_told", "_translator", "_vitals", "_whole", "paused",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        contract: Contract,
        codec: TokenCodec | None,
        attempt_id: str,
        pool: ConnectionPool,
        decoder: EventDecoder,
        canceller: Canceller,
        vitals: Vitals,
        on_failure: Callable[[UpstreamError, bool], None],
    ) -> None:
        super().__init__(pool, (), request.connect_timeout)
        self._asked: EngineRequest | None = request
        self._told = request.account
        self._contract = contract
        self._codec = codec
        self._attempt_id = attempt_id
        self._decoder = decoder
        self._canceller = canceller
        self._vitals = vitals
        self._on_failure = on_failure
        self._choices: Choices
        self._translator: _Translator
        self._relaying: asyncio.Future[None] | None = None
        self._whole = b""
        """An answer that is not streamed."""
        self.paused = False

    async def open(self) -> AnswerHead:
        request, self._asked = self._asked, None  # the prompt is not needed once it has been sent
        assert request is not None
        stream, decoupled = request.stream, self._contract.decoupled
        message, self._choices = await prepare(
            request, self._contract, self._attempt_id, self._codec, engine_streams=True
        )
        self._request = generate_request(self._pool, message, request.headers, stream=decoupled)
        del message, request
        self._vitals.watch(self)
        try:
            head = await self.send()
            self._request = ()
            if head.status != 200:
                raise await self._refusal(head.status)
            self._translator = _Translator(
                self._choices, self._decoder, self._pool.endpoint, self._end_early, self._told
            )
            if not head.events:
                whole = Collected(ANSWER_LIMIT)
                await super().relay(whole)
                self._translator.write(whole.body)
                self._translator.finish()
            else:
                self._relaying = asyncio.ensure_future(self._read_on())
                self._relaying.add_done_callback(seen)
                waits = {self._relaying, self._translator.begun} if stream else {self._relaying}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if self._relaying.done():
                    self._relaying.result()
        except UpstreamError as error:
            judged = self._judged(_before_any_text(error))
            raise (one_choice_only() if judged.code == CHOICES_IGNORED else judged) from None
        if stream:
            return AnswerHead(200, "text/event-stream; charset=utf-8", events=True)
        self._whole = self._choices.whole()
        return AnswerHead(200, "application/json", content_length=len(self._whole))

    async def relay(self, sink: Sink) -> None:
        if self._whole:
            sink.write(self._whole)
            return
        self._translator.attach(sink)
        if self._relaying is None:
            return
        try:
            await asyncio.shield(self._relaying)
        except UpstreamError as error:
            raise self._judged(error) from None

    def pause(self) -> None:
        self.paused = True
        super().pause()

    def resume(self) -> None:
        self.paused = False
        self.last_read = self._loop.time()  # the engine has not been listened to
        super().resume()

    def abort(self, error: UpstreamError) -> None:
        if self._given_up is None:
            self._vitals.given_up(self, error)
        self._stop()
        super().abort(error)

    def close(self) -> None:
        self._vitals.unwatch(self)
        self._stop()
        super().close()

    async def _read_on(self) -> None:
        await super().relay(self._translator)
        self._translator.finish()

    def _end_early(self) -> None:
        """The text is complete but the engine goes on: leave it."""
        self._stop()
        self._complete(reusable=False)

    def _stop(self) -> None:
        """Tell the engine that nobody waits for the rest; the connection, which is about to be closed, may not."""
        if self._connection is not None:
            self._canceller.stop(self._attempt_id)

    async def _refusal(self, status: int) -> UpstreamError:
        body = Collected()
        await super().relay(body)
        return from_http(status, error_text(body.body), endpoint=self._pool.endpoint, received=False)

    def _judged(self, error: UpstreamError) -> UpstreamError:
        if error is not self._given_up or error.failure is not Failure.TIMEOUT:
            self._on_failure(error, error.code == MODEL_DEAD)
        return error


class _Translator:
    """The engine's answer, event by event, into OpenAI's form. A `Sink` for the engine's body.

    `end_early` is called when the text is complete and the engine goes on.
    """

    __slots__ = (
        "_account", "_choices", "_client", "_decoder", "_end_early", "_endpoint", "_events", "_heard", "_last_text",
        "_over", "begun",
    )  # fmt: skip

    chunks = None

    def __init__(
        self, choices: Choices, decoder: EventDecoder, endpoint: str, end_early: Callable[[], None], account: Account
    ) -> None:
        self._choices = choices
        self._decoder = decoder
        self._endpoint = endpoint
        self._end_early = end_early
        self._account = account
        self._last_text = 0.0
        """Loop time of the text before."""
        self._client: Sink | None = None
        self._over = False
        self._heard = False
        """A message has come, though perhaps one without text."""
        self._events = [choices.opening()]
        """What has come and nobody has taken yet."""
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with the first text."""

    def attach(self, client: Sink) -> None:
        """Write to `client` what has come, and what comes from now on."""
        self._client = client
        self._flush()

    def write(self, payload: bytes) -> None:
        """Whole events, or the one object of an answer without events. Raises UpstreamError."""
        choices = self._choices
        try:
            for event in payload.split(b"\n\n"):
                if event and not self._over:
                    self._take(event)
                    if choices.overrun:
                        self.finish()
                        self._end_early()
        finally:
            self._flush()
        if choices.started and not self.begun.done():
            self.begun.set_result(None)

    def finish(self) -> None:
        """The body has ended in order. Raises UpstreamError if the answer has not."""
        if self._over:
            return
        self._over = True
        if not self._heard:
            message = f"Engine {self._endpoint} ended its answer without a word."
            raise UpstreamError(Failure.LOST_BEFORE_ANSWER, message, 502, "engine_lost")
        try:
            self._events.append(self._choices.finish())
        except _READING as error:
            raise self._failed(error) from None
        self._choices.tell(self._account)
        self._flush()

    def _take(self, event: bytes) -> None:
        try:
            message = self._decoder.decode(event.removeprefix(b"data:"))
            self._heard = True
            if events := self._choices.take(message):
                self._events.append(events)
                before, self._last_text = self._last_text, asyncio.get_running_loop().time()
                if before:
                    self._account.gap(self._last_text - before)
        except _READING as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> UpstreamError:
        """What an error in reading the answer says of the engine."""
        if isinstance(error, EngineSaysError):
            return from_message(str(error), endpoint=self._endpoint, received=self._choices.started)
        return unreadable(error, self._endpoint)

    def _flush(self) -> None:
        if self._client is not None and self._events:
            events = b"".join(self._events)
            self._account.body_bytes += len(events)
            self._client.write(events)
            self._events.clear()


def _before_any_text(error: UpstreamError) -> UpstreamError:
    """An answer that broke off before its first text is one that was lost: it may be tried elsewhere."""
    if error.failure is not Failure.DIED:
        return error
    return replace(error, failure=Failure.LOST_BEFORE_ANSWER, code="engine_lost")
