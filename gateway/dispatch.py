"""Running a plan: try its endpoints until one commits to an answer, then relay the answer.

Until an engine has committed, the client has been told nothing and another endpoint may be tried; after that, whatever
happens is reported to the client and never retried. Only failures that left the engine without work are retried at all:
a connection that was refused, one that ended before any answer, an engine that said it is busy.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

from gateway.exchange import Exchange
from gateway.http.client_response import ClientResponse
from gateway.http.errors import as_api_error, error_event
from gateway.upstream.base import AnswerHead, Engine, EngineRequest, UpstreamError
from router.fleet import Endpoint
from router.plan import Attempt, Plan
from router.prompt import Fields, PromptView

MAX_ATTEMPTS = 3

logger = logging.getLogger(__name__)


class Engines(Protocol):
    """Where dispatch finds engines, and reports on them."""

    def engine(self, endpoint: Endpoint) -> Engine: ...

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


async def dispatch(exchange: Exchange, plan: Plan, request: ClientRequest, engines: Engines) -> None:
    """Answer `exchange.response` by the first endpoint of `plan` that will.

    Raises the last UpstreamError, or ApiError for a request that the chosen engine's contract cannot express; nothing
    has been written to the client then.
    """
    attempts = plan.attempts[:MAX_ATTEMPTS]
    for attempt in attempts:
        last = attempt is attempts[-1]
        try:
            head = await _open(exchange, attempt, request, engines)
        except UpstreamError as error:
            engines.failed(attempt.endpoint, error)
            if last or not error.retryable:
                raise
            logger.info("request %s: %s at %s, trying another", request.request_id, error, attempt.endpoint.id)
            continue
        if head.status != 503 or last:
            await _relay(exchange, attempt, head, engines)
            return


async def _open(exchange: Exchange, attempt: Attempt, request: ClientRequest, engines: Engines) -> AnswerHead:
    exchange.begin_attempt(attempt)
    engines.attempted(attempt)
    prompt = request.prompt
    call = engines.engine(attempt.endpoint).call(
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


async def _relay(exchange: Exchange, attempt: Attempt, head: AnswerHead, engines: Engines) -> None:
    response, call = exchange.response, exchange.call
    assert call is not None
    response.start(head.status, answer_headers(attempt, head), head.content_length)
    response.follow(call)
    try:
        await call.relay(response)
    except UpstreamError as error:
        engines.failed(attempt.endpoint, error)
        _report(response, head, error)
    else:
        response.finish()


def answer_headers(attempt: Attempt, head: AnswerHead) -> tuple[tuple[str, str], ...]:
    """The headers of an engine's answer."""
    headers = (("Content-Type", head.content_type), ("x-headrace-endpoint", attempt.endpoint.id), *head.headers)
    if head.events:
        return (*headers, ("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
    return headers


def _report(response: ClientResponse, head: AnswerHead, error: UpstreamError) -> None:
    """Tell the client that its answer ends here, without ever making it look whole."""
    if head.events:
        response.write(error_event(as_api_error(error)))
        response.close_after()
        response.finish()
    else:
        response.abort()
