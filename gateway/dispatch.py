"""Running a plan: try its endpoints until one commits to an answer (`open_answer`), then relay the answer.

Until an engine has committed, the client has been given no content, only signs of life if it streams
(`gateway.http.pings`), and another endpoint may be tried; after that, whatever happens is reported to the client and
never retried. The two are separate calls so that the request, whose body may be large, is needed no longer than it may
have to be sent again. Only failures that left no answer begun are retried: no connection, an answer that ended before
any content, an engine that said it is busy. And only as many as the retry budget allows (`router.retry`): when it is
spent, the client is told of the failure it would have been told of without anywhere else to go.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from gateway.exchange import Exchange
from gateway.http.client_response import ClientResponse, Headers
from gateway.http.errors import as_api_error, error_event
from gateway.http.pings import UNBUFFERED, AsEvent
from gateway.http.placement import placement
from gateway.relay.accounting import Account
from gateway.upstream.base import AnswerHead, Engine, EngineCall, EngineRequest, Failure, UpstreamError
from gateway.upstream.base import Headers as EngineHeaders
from gateway.upstream.refusals import blamed, kept_out
from router.fleet import Endpoint
from router.plan import Attempt, Plan
from router.prompt import Fields, PromptView

MAX_ATTEMPTS = 3
MAX_LOST = 1
"""How many engines a request may be lost in and still be tried elsewhere: it may be what brings them down."""

REACHED_NOBODY = frozenset({Failure.CONNECT, Failure.NO_CONNECTION})
"""Failures after which the next attempt loads the fleet no more than the first would have: they cost no retry."""

_Sent = TypeVar("_Sent")

logger = logging.getLogger(__name__)


class Engines(Protocol):
    """Where dispatch finds engines, and reports on them."""

    def engine(self, endpoint: Endpoint) -> Engine:
        """The engine of a planned endpoint. Raises UpstreamError (BUSY) if it takes no requests any more."""

    def credentials(self, attempt: Attempt, clients: str) -> EngineHeaders:
        """What is sent as Authorization, where the client's own is `clients`. Raises UpstreamError if it needs a token
        that is not there."""

    def attempted(self, attempt: Attempt) -> None:
        """A request is being sent to an endpoint."""

    def failed(self, attempt: Attempt, error: UpstreamError) -> None:
        """A request failed at an endpoint."""

    def answered(self, attempt: Attempt) -> None:
        """An endpoint has begun to answer a request."""

    def succeeded(self, endpoint: Endpoint) -> None:
        """A request has been answered to the end."""

    def retry_refused(self, route: str) -> None:
        """A failed request of a route was not tried elsewhere, because the retry budget is spent."""


class ClientRequest(msgspec.Struct, frozen=True):
    """What the client asked, and the headers that go along to the engine."""

    prompt: PromptView
    fields: Fields
    request_id: str
    headers: tuple[tuple[str, str], ...]
    authorization: str
    """The client's own; empty without one. It goes to engines of pools that forward it."""
    account: Account
    """What the answer will say about itself."""


class OpenAnswer(msgspec.Struct, frozen=True):
    """An answer an engine has committed to."""

    attempt: Attempt
    head: AnswerHead
    call: EngineCall


@dataclass(slots=True)
class AnsweredError(UpstreamError):
    """A failure that came as an answer: if nobody else is asked, the client gets that as it is."""

    answer: Any = None

    @classmethod
    def of(cls, fault: UpstreamError, answer: object) -> "AnsweredError":
        return cls(fault.failure, fault.message, fault.status, fault.code, answer)


async def first_willing(
    exchange: Exchange,
    plan: Plan,
    engines: Engines,
    request_id: str,
    send: Callable[[Attempt, Engine], Awaitable[_Sent]],
    *,
    relayed: bool = False,
) -> _Sent:
    """What `send` returns for the first endpoint of `plan` for which it does not raise.

    `send` puts its call on the exchange. If the answer is yet to be `relayed`, it is for the caller to tell `engines`
    that the endpoint has answered. Raises the last UpstreamError, and at once whatever else `send` raises.
    """
    if exchange.failure is not None:
        _spend_retry(exchange, exchange.failure, plan, engines)
    lost = 0
    attempts = plan.attempts[:MAX_ATTEMPTS]
    for attempt in attempts:
        try:
            engine = engines.engine(attempt.endpoint)
            exchange.begin_attempt(attempt)
            engines.attempted(attempt)
            sent = await send(attempt, engine)
        except UpstreamError as failure:
            error = kept_out(failure.status, attempt.endpoint, attempt.pool) or failure
            engines.failed(attempt, error)
            exchange.failed(error)
            lost += error.failure is Failure.LOST_BEFORE_ANSWER
            if not error.retryable or lost > MAX_LOST or attempt is attempts[-1]:
                raise error from None
            _spend_retry(exchange, error, plan, engines)
            logger.info("request %s: %s Trying another endpoint.", request_id, error)
        else:
            exchange.settle_retry()
            if not relayed:
                engines.answered(attempt)
                engines.succeeded(attempt.endpoint)
            return sent
    raise AssertionError("a plan has at least one attempt")


def _spend_retry(exchange: Exchange, failure: UpstreamError, plan: Plan, engines: Engines) -> None:
    """Take a place in the retry budget, if going on after `failure` needs one. Raises `failure` if none is left."""
    if failure.failure not in REACHED_NOBODY and not exchange.may_retry():
        engines.retry_refused(plan.route.name)
        raise failure


async def open_answer(exchange: Exchange, plan: Plan, request: ClientRequest, engines: Engines) -> OpenAnswer:
    """Send the request to the first endpoint of `plan` that will answer it.

    Raises the last UpstreamError, or ApiError for a request that the chosen engine's contract cannot express.
    """
    prompt = request.prompt

    async def send(attempt: Attempt, engine: Engine) -> OpenAnswer:
        assert exchange.timeouts is not None
        call = engine.call(
            EngineRequest(
                api=prompt.api,
                body=request.fields,
                stream=prompt.stream,
                include_usage=prompt.include_usage,
                request_id=request.request_id,
                headers=exchange.passed(request.headers) + engines.credentials(attempt, request.authorization),
                endpoint=attempt.endpoint,
                pool=attempt.pool,
                retention=plan.route.retention,
                account=request.account,
                connect_timeout=exchange.timeouts.connect,
            )
        )
        exchange.call = call
        try:
            head = await call.open()
        except UpstreamError as error:
            if error.failure is Failure.NO_CONNECTION:
                error.own_deadline = exchange.timeouts.connect < attempt.pool.timeouts.connect
            raise blamed(error) from None
        if head.status >= 400 and (refused := kept_out(head.status, attempt.endpoint, attempt.pool)) is not None:
            raise refused
        answer = OpenAnswer(attempt, head, call)
        if head.fault is not None:
            raise AnsweredError.of(head.fault, answer)
        return answer

    try:
        answer = await first_willing(exchange, plan, engines, request.request_id, send, relayed=True)
    except AnsweredError as failed:
        answer = failed.answer
    if answer.head.fault is None and answer.head.status < 400:
        engines.answered(answer.attempt)
    return answer


async def relay(exchange: Exchange, response: ClientResponse, answer: OpenAnswer, engines: Engines) -> None:
    """Pass the answer on to the client, up to its end or to the report that it broke off."""
    head = answer.head
    response.follow(answer.call)
    try:
        if response.started and not head.events:
            body = AsEvent(answer.attempt.endpoint.id, head.status)
            await answer.call.relay(body)
            response.write(body.event)
        else:
            exchange.streamed = head.events
            if not head.events:
                exchange.ping = None  # there is no place for one in the middle of such a body
            if not response.started:
                response.start(head.status, _headers(exchange, answer), head.content_length)
            if not head.events:  # of those, the first has come
                response.flush_soon()
            await answer.call.relay(response)
    except UpstreamError as error:
        engines.failed(answer.attempt, error)
        exchange.failed(error)
        _report(response, exchange, error)
    else:
        response.finish()
        if head.fault is None and head.status < 400:
            engines.succeeded(answer.attempt.endpoint)


def _headers(exchange: Exchange, answer: OpenAnswer) -> Headers:
    head = answer.head
    headers = (("Content-Type", head.content_type), *placement(exchange), *head.headers)
    return (*headers, *UNBUFFERED) if head.events else headers


def _report(response: ClientResponse, exchange: Exchange, error: UpstreamError) -> None:
    """Tell the client that its answer ends here, without ever making it look whole."""
    exchange.told(error.code)
    if exchange.streamed:
        response.write(error_event(as_api_error(error)))
        response.finish()
    else:
        response.abort()
