"""The frame around every request that an engine answers: what ends in an answer of whichever kind, and is counted.

Whatever is wrong on a request's way is raised as `ApiError` or `UpstreamError`, and told to the client here, in the
error shape of its API. There is no other way out but the client's leaving, which cancels the handler and, through the
exchange, the engine.
"""

import asyncio
import logging
from collections.abc import Callable

from gateway.corridor import Corridor
from gateway.exchange import Exchange
from gateway.http.client_response import NOBODY, ClientResponse, Headers
from gateway.http.connection import Request
from gateway.http.errors import INTERNAL, as_api_error, error_event
from gateway.http.placement import placement
from gateway.metrics import CLIENT_GONE, UNKNOWN_ROUTE
from gateway.upstream.base import UpstreamError
from router.errors import ApiError

logger = logging.getLogger(__name__)

Shape = Callable[[ApiError], bytes]
"""An error in the shape of an API: the body of its answer, JSON."""


class Answering:
    """A request's exchange, as a context manager. It is counted under `api`, or not at all if that is None."""

    __slots__ = ("_api", "_exchange", "_live", "_metrics", "_request", "_request_id", "_response", "_shape")

    def __init__(
        self,
        corridor: Corridor,
        api: str | None,
        request: Request,
        request_id: str,
        response: ClientResponse,
        shape: Shape,
    ) -> None:
        self._live = corridor.live
        self._metrics = corridor.metrics
        self._api = api
        self._request = request
        self._request_id = request_id
        self._response = response
        self._shape = shape
        self._exchange = Exchange(corridor.live, response)

    def __enter__(self) -> Exchange:
        observer = self._live.observer
        if observer is not None:
            observer.begin_http(self._exchange, self._request, self._request_id)
        return self._exchange.__enter__()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        try:
            if error is not None:
                self._tell(error)
            self._count()
        except Exception:  # the client has its answer: nothing may be added to it
            logger.exception("request %s could not be answered or counted", self._request_id)
            self._response.close_after()
        finally:
            self._exchange.status = self._response.status
            self._exchange.__exit__()
        return isinstance(error, Exception)

    def _tell(self, error: BaseException) -> None:
        """Answer with the error, unless there is nobody left to answer."""
        response = self._response
        if isinstance(error, ApiError):
            refuse(response, error, self._shape, self._exchange)
        elif isinstance(error, UpstreamError):
            refuse(response, as_api_error(error), self._shape, self._exchange)
        elif isinstance(error, asyncio.CancelledError):
            account = self._exchange.account
            if not (response.complete or (account is not None and account.ended)):  # else it left with its answer
                response.status = CLIENT_GONE
        elif isinstance(error, Exception):
            logger.error("request %s failed", self._request_id, exc_info=error)
            response.close_after()
            if response.started:
                response.abort()
            else:
                refuse(response, INTERNAL, self._shape, self._exchange)

    def _count(self) -> None:
        api, exchange, response = self._api, self._exchange, self._response
        started = exchange.started
        ttft = response.first_write - started if exchange.streamed and response.first_write else None
        if api is not None:
            route = exchange.route or UNKNOWN_ROUTE
            self._metrics.answered(api, route, response.status, self._live.now() - started, ttft)
            if exchange.account is not None:
                self._metrics.accounted(api, route, exchange.account)
        if self._live.observer is not None:
            self._live.observer.end(exchange, api, response.status, ttft)


def refuse(response: ClientResponse, error: ApiError, shape: Shape, exchange: Exchange | None = None) -> None:
    """Answer with an error; one that comes after a sign of life is an event."""
    if exchange is not None:
        exchange.told(error.code)
    if response.started:
        response.write(error_event(error))
        response.finish()
        return
    headers: Headers = (("Content-Type", "application/json"), *placement(exchange))
    if all(name != "x-headrace-route" for name, _ in response.headers):
        headers += (("x-headrace-route", NOBODY),)
    if error.status == 401:
        headers += (("WWW-Authenticate", "Bearer"),)
    if error.retry_after is not None:
        headers += (("Retry-After", str(error.retry_after)),)
    headers += error.headers
    response.send(error.status, headers, shape(error))
