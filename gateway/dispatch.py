"""Running a plan: try its endpoints until one commits to an answer (`open_answer`), then relay the answer.

Until an engine has committed, the client has been told nothing and another endpoint may be tried; after that, whatever
happens is reported to the client and never retried. The two are separate calls so that the request, whose body may be
large, is needed no longer than it may have to be sent again. Only failures that cannot have produced an answer are
retried: no connection, a connection that ended before any answer, an engine that said it is busy.
"""

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from gateway.exchange import Exchange
from gateway.http.client_response import ClientResponse, Headers
from gateway.http.errors import as_api_error, error_event
from gateway.upstream.base import AnswerHead, Engine, EngineRequest, Failure, UpstreamError
from router.fleet import Endpoint
from router.plan import Attempt, Plan
from router.prompt import Fields, PromptView

MAX_ATTEMPTS = 3
MAX_LOST = 1
"""How many engines a request may be lost in and still be tried elsewhere: it may be what brings them down."""

_BUSY = UpstreamError(Failure.BUSY, "The engine answered that it cannot take more now.", HTTPStatus.SERVICE_UNAVAILABLE)

logger = logging.getLogger(__name__)


class Engines(Protocol):
    """Where dispatch finds engines, and reports on them."""

    def engine(self, endpoint: Endpoint) -> Engine:
        """The engine of a planned endpoint. Raises UpstreamError (BUSY) if it takes no requests any more."""

    def attempted(self, attempt: Attempt) -> None:
        """A request is being sent to an endpoint."""

    def failed(self, endpoint: Endpoint, error: UpstreamError) -> None:
        """A request failed at an endpoint."""


@dataclass(slots=True, frozen=True)
class ClientRequest:
    """What the client asked, and the headers that go along to the engine."""

    prompt: PromptView
    fields: Fields
    request_id: str
    headers: tuple[tuple[str, str], ...]


@dataclass(slots=True, frozen=True)
class OpenAnswer:
    """An answer an engine has committed to. Its call is the exchange's."""

    attempt: Attempt
    head: AnswerHead


async def open_answer(exchange: Exchange, plan: Plan, request: ClientRequest, engines: Engines) -> OpenAnswer:
    """Send the request to the first endpoint of `plan` that will answer it.

    Raises the last UpstreamError, or ApiError for a request that the chosen engine's contract cannot express.
    """
    *others, last = plan.attempts[:MAX_ATTEMPTS]
    lost = 0
    for attempt in others:
        try:
            head = await _open(exchange, attempt, request, engines)
        except UpstreamError as error:
            engines.failed(attempt.endpoint, error)
            lost += error.failure is Failure.LOST_BEFORE_ANSWER
            if not error.retryable or lost > MAX_LOST:
                raise
            logger.info("request %s: %s Trying another endpoint.", request.request_id, error)
        else:
            if head.status != HTTPStatus.SERVICE_UNAVAILABLE:
                return OpenAnswer(attempt, head)
            engines.failed(attempt.endpoint, _BUSY)
    try:
        return OpenAnswer(last, await _open(exchange, last, request, engines))
    except UpstreamError as error:
        engines.failed(last.endpoint, error)
        raise


async def _open(exchange: Exchange, attempt: Attempt, request: ClientRequest, engines: Engines) -> AnswerHead:
    engine = engines.engine(attempt.endpoint)
    exchange.begin_attempt(attempt)
    engines.attempted(attempt)
    prompt = request.prompt
    call = engine.call(
        EngineRequest(
            api=prompt.api,
            body=request.fields,
            stream=prompt.stream,
            include_usage=prompt.include_usage,
            request_id=request.request_id,
            headers=request.headers,
            endpoint=attempt.endpoint,
            pool=attempt.pool,
        )
    )
    exchange.call = call
    return await call.open()


async def relay(exchange: Exchange, answer: OpenAnswer, engines: Engines) -> None:
    """Pass the answer on to the client, up to its end or to the report that it broke off."""
    response, call, head = exchange.response, exchange.call, answer.head
    assert call is not None
    exchange.streamed = head.events
    response.start(head.status, _headers(answer), head.content_length)
    response.follow(call)
    try:
        await call.relay(response)
    except UpstreamError as error:
        engines.failed(answer.attempt.endpoint, error)
        _report(response, head, error)
    else:
        response.finish()


def _headers(answer: OpenAnswer) -> Headers:
    head = answer.head
    headers = (
        ("Content-Type", head.content_type), ("x-headrace-endpoint", answer.attempt.endpoint.id), *head.headers,
    )  # fmt: skip
    if head.events:
        return (*headers, ("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
    return headers


def _report(response: ClientResponse, head: AnswerHead, error: UpstreamError) -> None:
    """Tell the client that its answer ends here, without ever making it look whole."""
    if head.events:
        response.write(error_event(as_api_error(error)))
        response.finish()
    else:
        response.abort()
