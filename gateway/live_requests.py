"""The requests that a gateway has open, as operators see them: listed, and cancelled one by one.

Nothing is kept for it. What there is to tell of a request is read off its exchange when somebody asks, and it has no
name before: the first listing that shows it gives it a number, so that a request nobody looks at pays nothing. Names
begin with what is new in every process, and no other request of any gateway ever has the same.

Prompts and answers are not in a row, nor a path's query, where clients put keys.
"""

import heapq
import itertools
import os
from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.exchange import Exchange, LiveExchanges
from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.http_call import HttpCall
from router.spec.fleet import Protocol as EngineProtocol

State = Literal["reading", "queued", "prefill", "decode"]

MOST_ROWS = 1000
CANCELLED = "request_cancelled"
"""The code of the error that the client of a cancelled request is told."""

_OF_THIS_PROCESS = os.urandom(4).hex()
_numbers = itertools.count(1)


class RequestFilter(Struct, frozen=True, kw_only=True):
    """Which of the open requests are to be listed: those that are all of what is given and not empty."""

    tenant: str = ""
    route: str = ""
    endpoint: str = ""
    state: Literal["", "reading", "queued", "prefill", "decode"] = ""
    older_than_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds since they came, at least."""
    limit: Annotated[int, Meta(ge=1, le=MOST_ROWS)] = 100
    """Rows at most; the oldest are listed."""


class RequestRow(Struct, frozen=True, kw_only=True):
    """One open request."""

    id: str
    """By which it is cancelled."""
    request_id: str
    """Its `x-request-id`."""
    client: str
    """The address it came from, as a trusted proxy says where there is one."""
    protocol: Literal["http", "grpc"]
    """The client's."""
    path: str
    tenant: str | None = None
    route: str | None = None
    endpoint: str | None = None
    engine: EngineProtocol | None = None
    """The protocol of its endpoint."""
    model: str | None = None
    """Its name at the engine."""
    state: State
    """`reading`: it has not all come, or is being looked at; `queued`: every endpoint is full; `prefill`: an engine has
    it and has not answered; `decode`: the answer has begun."""
    age_s: float
    attempts: int
    queue_position: int | None = None
    """Its place when it began to wait; null if it never had to."""
    bytes: int | None = None
    """Of the answer so far, where they are counted: on `/v1`."""
    completion_tokens: int | None = None
    """As the engine says, which most do at the end only."""


class RequestList(Struct, frozen=True, kw_only=True):
    """The open requests that a filter lets through, oldest first."""

    requests: list[RequestRow]
    matching: int
    """How many there are; more than are listed, if that was limited."""
    problems: list[str] = []
    """Whose requests could not be listed."""


def list_requests(live: LiveExchanges, wanted: RequestFilter) -> RequestList:
    """The open requests of this process that are `wanted`."""
    now = live.now()
    found = [exchange for exchange in live if _is_wanted(exchange, wanted, now)]
    oldest = heapq.nsmallest(wanted.limit, found, key=lambda exchange: exchange.started)
    return RequestList(requests=[_row(exchange, now) for exchange in oldest], matching=len(found))


def cancel_request(live: LiveExchanges, id_: str) -> bool:
    """End the request named `id_`: its engine is told to stop, its client that an operator has ended it. One that waits
    for its turn in a gRPC stream ends when that has come. Returns whether it was there."""
    process, _, number = id_.rpartition("-")
    if process != _OF_THIS_PROCESS:
        return False
    for exchange in live:
        if exchange.number and str(exchange.number) == number:
            _cancel(exchange)
            return True
    return False


def merged(lists: list[RequestList], wanted: RequestFilter) -> RequestList:
    """What several processes have listed, as one list."""
    rows = heapq.nsmallest(wanted.limit, (row for one in lists for row in one.requests), key=lambda row: -row.age_s)
    problems = [problem for one in lists for problem in one.problems]
    return RequestList(requests=rows, matching=sum(one.matching for one in lists), problems=problems)


def _cancel(exchange: Exchange) -> None:
    # Not 409 or 5xx, which clients' libraries repeat by themselves; 401 and 403 are about keys.
    error = UpstreamError(Failure.CANCELLED, "The operator of this gateway has ended the request.", 410, CANCELLED)
    exchange.cancelled = error
    if exchange.call is not None:
        exchange.call.abort(error)
    else:
        exchange.client.refuse(error)


def _is_wanted(exchange: Exchange, wanted: RequestFilter, now: float) -> bool:
    return (
        now - exchange.started >= wanted.older_than_s
        and wanted.tenant in ("", exchange.tenant)
        and wanted.route in ("", exchange.route)
        and wanted.endpoint in ("", _endpoint(exchange))
        and wanted.state in ("", _state(exchange))
    )


def _endpoint(exchange: Exchange) -> str | None:
    return exchange.attempt.endpoint.id if exchange.attempt is not None else None


def _state(exchange: Exchange) -> State:
    if exchange.waits_for is not None:
        return "queued"
    if exchange.attempt is None:
        return "reading"
    return "decode" if exchange.call is not None and exchange.call.answering else "prefill"


def _row(exchange: Exchange, now: float) -> RequestRow:
    exchange.number = exchange.number or next(_numbers)
    if isinstance(exchange.call, HttpCall):
        exchange.call.note_progress()
    attempt, account, origin = exchange.attempt, exchange.account, exchange.client.origin()
    return RequestRow(
        id=f"{_OF_THIS_PROCESS}-{exchange.number}",
        request_id=origin.request_id,
        client=origin.address,
        protocol=origin.protocol,
        path=origin.path[:200],
        tenant=exchange.tenant or None,
        route=exchange.route or None,
        endpoint=_endpoint(exchange),
        engine=attempt.pool.spec.protocol if attempt is not None else None,
        model=attempt.pool.spec.model if attempt is not None else None,
        state=_state(exchange),
        age_s=round(now - exchange.started, 3),
        attempts=exchange.attempts,
        queue_position=exchange.position or None,
        bytes=account.body_bytes if account is not None else None,
        completion_tokens=(account.completion_tokens or None) if account is not None else None,
    )
