"""Is told when a request begins and ends, and tells who wants to know of it: the access log, traces."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from gateway.http.client_response import ClientResponse
from gateway.http.connection import Request
from gateway.http.kserve import OPEN_PATHS
from gateway.metrics import UNKNOWN_ROUTE, Metrics
from gateway.telemetry.access_log import AccessLog, Line
from gateway.telemetry.record import Record
from router.spec.fleet import FleetSpec
from router.spec.gateway import OFF

if TYPE_CHECKING:
    from gateway.exchange import Exchange, Origin
    from gateway.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)


class Observer:
    """Of the requests of one process."""

    def __init__(
        self, log: AccessLog | None, tracing: "Tracing | None", metrics: Metrics, now: Callable[[], float]
    ) -> None:
        """`now` gives the loop's time."""
        self._log = log
        self._tracing = tracing
        self._metrics = metrics
        self._now = now

    @property
    def tells_of_all(self) -> bool:
        """Whether somebody wants to know of requests, too, that no engine had to do with."""
        return self._log is not None

    def begin_http(self, exchange: "Exchange", request: Request, request_id: str) -> None:
        """A request has come over HTTP."""
        request.recorded = True
        head = request.head
        if self._wanted(exchange, head.headers):
            client = request.address
            exchange.record = Record(request_id, head.method, head.raw_path, head.headers, client)

    def begin_rpc(self, exchange: "Exchange", origin: "Origin", headers: Mapping[str, str]) -> None:
        """A request has come by an RPC."""
        if self._wanted(exchange, headers):
            exchange.record = Record(origin.request_id, "POST", origin.path, headers, origin.address, rpc=True)

    def _wanted(self, exchange: "Exchange", headers: Mapping[str, str]) -> bool:
        """Whether a request is to be written down."""
        if self._tracing is not None:
            exchange.trace = self._tracing.begin(headers, exchange.started)
        return self._log is not None or exchange.trace is not None

    def end(self, exchange: "Exchange", api: str | None, status: int, ttft: float | None) -> None:
        """A request has ended and is counted; `ttft` is the time to its first token, in seconds, if it streamed."""
        record, now = exchange.record, self._now()
        if record is None:
            return
        trace = exchange.trace
        try:
            if trace is not None and self._tracing is not None:
                record.trace_id = trace.shown_id
                if api is not None:
                    route = exchange.route or UNKNOWN_ROUTE
                    self._metrics.exemplify(api, route, now - exchange.started, ttft, record.trace_id)
                self._tracing.end(trace, record, exchange, api, status, ttft)
            if self._log is not None:
                self._log.add(_line(self._log.now(), record, exchange, api, status, ttft, now))
        except Exception:  # the request is answered, whoever wants to know of it
            logger.exception("request %s could not be told of", record.request_id)

    async def close(self) -> None:
        """Tell what is still to be told."""
        if self._tracing is not None:
            await self._tracing.close()
        if self._log is not None:
            await self._log.close()

    async def handle(self, handler: Callable[[Request], Awaitable[ClientResponse]], request: Request) -> ClientResponse:
        """What `handler` answers. A request without an exchange, which no engine had to do with, is told of here,
        unless it is a probe."""
        started = self._now()
        response = await handler(request)
        head = request.head
        if self._log is not None and not request.recorded and head.raw_path not in OPEN_PATHS:
            request_id = dict(response.headers)["x-request-id"]
            record = Record(request_id, head.method, head.raw_path, head.headers, request.address)
            self._log.add(
                Line(
                    time=self._log.now(),
                    request_id=request_id,
                    client=record.client,
                    user_agent=record.user_agent,
                    method=record.method,
                    path=record.path,
                    api=None,
                    status=response.status,
                    duration_ms=_ms(self._now() - started),
                    trace_id=record.trace_id or None,
                )
            )
        return response


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def observer_of(spec: FleetSpec, metrics: Metrics, now: Callable[[], float]) -> Observer | None:
    """Who is told of requests in a gateway of this fleet; None where nobody wants to know."""
    wanted = spec.gateway
    log = AccessLog(wanted.access_log, metrics.dropped_lines) if wanted.access_log != OFF else None
    tracing = None
    if wanted.tracing is not None:
        from gateway.telemetry.tracing import Tracing

        try:
            tracing = Tracing(wanted.tracing, spec.fleet, metrics.told_of_spans)
        except Exception as error:  # whatever the SDK does not like about a variable, requests are to be served
            logger.error("there are no traces, for the exporter refuses a setting (an OTEL_ variable?): %s", error)
    return Observer(log, tracing, metrics, now) if log is not None or tracing is not None else None


def _line(
    time: str,
    record: Record,
    exchange: "Exchange",
    api: str | None,
    status: int,
    ttft: float | None,
    now: float,
) -> Line:
    """The line of a request that ended now."""
    attempt, account = exchange.attempt, exchange.account
    return Line(
        time=time,
        request_id=record.request_id,
        client=record.client,
        user_agent=record.user_agent,
        method=record.method,
        path=record.path,
        api=api,
        tenant=exchange.tenant or None,
        route=exchange.route or None,
        endpoint=attempt.endpoint.id if attempt is not None else None,
        reason=attempt.reason if attempt is not None else None,
        attempts=exchange.attempts,
        status=status,
        code=record.code or None,
        stream=exchange.streamed,
        queue_ms=_ms(exchange.attempt_started - exchange.started) if attempt is not None else None,
        ttft_ms=_ms(ttft) if ttft is not None else None,
        duration_ms=_ms(now - exchange.started),
        prompt_tokens=account.prompt_tokens if account is not None and account.prompt_tokens else None,
        cached_tokens=account.cached_tokens if account is not None and account.prompt_tokens else None,
        completion_tokens=account.completion_tokens if account is not None and account.prompt_tokens else None,
        bytes=account.body_bytes if account is not None else None,
        finish_reason=account.finish_reason or None if account is not None else None,
        trace_id=record.trace_id or None,
    )
