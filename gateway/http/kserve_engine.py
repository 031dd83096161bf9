"""Getting a Triton to answer a request of its HTTP API: what is sent, and where else it may be tried.

A request is tried at the next endpoint as long as nothing of it but what was read ahead has been sent. Besides the
failures of any engine, Triton's own refusals count that another replica need not share: it is full (503), it has not
got the model now (404), or the process behind the model has died, which it says with the status of a client's mistake.
So an error is read before it is passed on. It is judged by how its text begins: further inside there may be names and
ids of the client's, who must not be able to bring an endpoint into disrepute.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.dispatch import AnsweredError, Engines, first_willing
from gateway.exchange import Exchange
from gateway.http.errors import as_api_error
from gateway.http.kserve_paths import ModelPath
from gateway.http.request_body import RequestBody
from gateway.relay.http1 import ResponseHead
from gateway.upstream.base import Engine, Failure, Headers, UpstreamError
from gateway.upstream.collected import Collected
from gateway.upstream.http_upload import HttpUpload
from gateway.upstream.opening import Opening
from gateway.upstream.refusals import kept_out
from gateway.upstream.triton.engine import TritonEngine
from gateway.upstream.triton.failures import is_stub_death
from gateway.upstream.triton.generate_form import error_text
from gateway.upstream.triton.vitals import Vitals
from router.kserve_json import read_id
from router.plan import Attempt, Plan

GENERATING = frozenset({"infer", "generate", "generate_stream"})
"""The operations that run the model."""

_NOT_SERVED = re.compile(rb"""\{"error":"Request for unknown model: '""")


@dataclass(slots=True, frozen=True)
class Sending:
    """A request as it goes to an engine."""

    path: ModelPath
    method: str
    request_id: str
    headers: Headers
    """The client's that go along."""
    authorization: str
    """The client's own; see `gateway.credentials`."""
    start: bytes
    """The body, as far as it has been read ahead."""
    body: RequestBody | None
    """Where the rest comes from; None without a body."""

    @property
    def whole(self) -> bool:
        """Whether `start` is the whole body."""
        return self.body is None or (self.body.size == len(self.start) and self.body.ended)

    @property
    def repeatable(self) -> bool:
        """Whether it can be sent again: nothing has been read but `start`."""
        return self.body is None or self.body.size == len(self.start)


@dataclass(slots=True, frozen=True)
class Answer:
    """An answer that a Triton has committed to."""

    attempt: Attempt
    head: ResponseHead
    call: HttpUpload
    error_body: bytes | None = None
    """The whole body of an error, which has been read already. A stream with an error's status is none."""


class _WatchedUpload(HttpUpload):
    """A request whose silence is listened to: Triton tells nobody that a model's process has died. `stop` is called
    when it is given up: Triton tells the model of it late or never."""

    __slots__ = ("_stop", "_vitals", "paused")

    def __init__(self, vitals: Vitals, stop: Callable[[], None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, opening=_StreamOpening())
        self._stop = stop
        self._vitals = vitals
        self.paused = False
        vitals.watch(self)

    @property
    def first_event(self) -> bytes:
        """What has been read of a stream with an error's status: its first event, and what came with it."""
        return self._opening.content

    def abort(self, error: UpstreamError) -> None:
        self._vitals.given_up(self, error)
        self._stop_unanswered()
        super().abort(error)

    def pause(self) -> None:
        self.paused = True
        super().pause()

    def resume(self) -> None:
        self.paused = False
        super().resume()

    def close(self) -> None:
        self._vitals.unwatch(self)
        self._stop_unanswered()
        super().close()

    def _stop_unanswered(self) -> None:
        if self._connection is not None:  # else it has been answered, or nobody has got it
            self._stop()


class _StreamOpening(Opening):
    """When the first event of a stream is an error, Triton gives the answer an error's status, and goes on with the
    stream if the model does. So only that event is read before the answer counts as begun."""

    __slots__ = ()

    def _begin_body(self, head: ResponseHead) -> None:
        if head.status >= 400:
            self._preamble = _no_preamble
        super()._begin_body(head)


def _no_preamble(event: bytes) -> bool:
    return False


async def open_answer(exchange: Exchange, plan: Plan, sending: Sending, engines: Engines) -> Answer:
    """The answer of the first endpoint of `plan` that gives one; every endpoint of it has an HTTP address.

    Raises the last UpstreamError, or ApiError for one that cannot be tried elsewhere or for a body that ends early.
    """

    async def send(attempt: Attempt, engine: Engine) -> Answer:
        assert isinstance(engine, TritonEngine)
        call = _call(exchange, attempt, engine, sending, engines.credentials(attempt, sending.authorization))
        exchange.call = call
        try:
            head = await call.send()
            if head.status < 400:
                return Answer(attempt, head, call)
            if (refused := kept_out(head.status, attempt.endpoint, attempt.pool)) is not None:
                raise refused
            body = None
            if isinstance(call, _WatchedUpload) and head.events:
                said = call.first_event
            else:
                kept = Collected()
                await call.relay(kept)
                said = body = kept.body
        except UpstreamError as error:
            if sending.repeatable:
                raise
            engines.failed(attempt, error)
            raise as_api_error(error) from None
        answer = Answer(attempt, head, call, body)
        fault = _fault(head.status, said, attempt, engine, sending)
        if fault is not None:
            if sending.repeatable:
                raise AnsweredError.of(fault, answer)
            engines.failed(attempt, fault)
        return answer

    try:
        answer = await first_willing(exchange, plan, engines, sending.request_id, send, relayed=True)
    except AnsweredError as failed:
        answer = failed.answer
    if answer.head.status < 400 and sending.path.operation in GENERATING:
        engines.answered(answer.attempt)
    return answer


def _call(
    exchange: Exchange, attempt: Attempt, engine: TritonEngine, sending: Sending, credentials: Headers
) -> HttpUpload:
    pool, timeouts = engine.http, exchange.timeouts
    assert pool is not None and timeouts is not None
    start, rest = sending.start, None if sending.whole else sending.body
    chunked = rest is not None and rest.length is None
    lines = [
        f"{sending.method} {sending.path.at(pool.path, attempt.pool.spec.model)} HTTP/1.1",
        f"host: {pool.host_header}",
        f"x-request-id: {sending.request_id}",
        *(f"{name}: {value}" for name, value in exchange.passed(sending.headers) + credentials),
    ]
    if chunked:
        lines.append("transfer-encoding: chunked")
        start = b"%x\r\n%b\r\n" % (len(start), start) if start else b""
    elif sending.method != "GET":
        lines.append(f"content-length: {len(start) if rest is None else rest.length}")
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    make: Callable[..., HttpUpload] = HttpUpload
    if sending.path.operation in GENERATING:
        make = partial(_WatchedUpload, engine.vitals, partial(engine.stop, read_id(sending.start)))
    return make(pool, (head, start), rest, timeouts.connect, chunked=chunked, sent=exchange.still_sending)


def _fault(status: int, body: bytes, attempt: Attempt, engine: TritonEngine, sending: Sending) -> UpstreamError | None:
    """What an error says against the endpoint; None for an error of the request's own."""
    id_ = attempt.endpoint.id
    if is_stub_death(error_text(body)):
        message = f"Engine {id_} was lost before it answered: its model process has died."
        fault = UpstreamError(Failure.LOST_BEFORE_ANSWER, message, 502, "engine_lost")
        engine.vitals.failed(fault, process_dead=True)
        return fault
    if status == 503:
        return UpstreamError(Failure.BUSY, f"Engine {id_} cannot take more now.", 503, "engine_busy")
    if status == 404 and not sending.path.version and _NOT_SERVED.match(body):
        return UpstreamError(Failure.BUSY, f"Engine {id_} does not serve the model now.", 503, "model_unavailable")
    return None
