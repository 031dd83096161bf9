"""The frame around every request that an engine answers: what ends in an answer of whichever kind, and is counted.

Whatever is wrong on a request's way is raised as `ApiError` or `UpstreamError`, and told to the client here, in the
error shape of its API. There is no other way out but the client's leaving, which cancels the handler and, through the
exchange, the engine.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

from gateway.exchange import Exchange, LiveExchanges
from gateway.http.client_response import NOBODY, ClientResponse, Headers
from gateway.http.errors import as_api_error, error_event
from gateway.http.placement import placement
from gateway.metrics import CLIENT_GONE, UNKNOWN_ROUTE, Metrics
from gateway.upstream.base import UpstreamError
from router.errors import ApiError

logger = logging.getLogger(__name__)

_INTERNAL = ApiError(500, "The gateway failed to handle the request.", "server_error", code="internal_error")

Shape = Callable[[ApiError], bytes]
"""An error in the shape of an API: the body of its answer, JSON."""


@contextlib.contextmanager
def answering(
    live: LiveExchanges, metrics: Metrics, api: str | None, request_id: str, response: ClientResponse, shape: Shape
) -> Iterator[Exchange]:
    """A request's exchange. It is counted under `api`, or not at all if that is None."""
    with Exchange(live, response) as exchange:
        try:
            yield exchange
        except ApiError as error:
            refuse(response, error, shape, exchange)
        except UpstreamError as error:
            refuse(response, as_api_error(error), shape, exchange)
        except asyncio.CancelledError:
            response.status = CLIENT_GONE
            raise
        except Exception:
            logger.exception("request %s failed", request_id)
            response.close_after()
            if response.started:
                response.abort()
            else:
                refuse(response, _INTERNAL, shape, exchange)
        finally:
            if api is not None:
                started = exchange.started
                ttft = response.first_write - started if exchange.streamed and response.first_write else None
                route = exchange.route or UNKNOWN_ROUTE
                metrics.answered(api, route, response.status, live.now() - started, ttft)
                if exchange.account is not None:
                    metrics.accounted(api, route, exchange.account)


def refuse(response: ClientResponse, error: ApiError, shape: Shape, exchange: Exchange | None = None) -> None:
    """Answer with an error; one that comes after a sign of life is an event."""
    if response.started:
        response.write(error_event(error))
        response.finish()
        return
    headers: Headers = (("Content-Type", "application/json"), *placement(exchange))
    if all(name != "x-headrace-route" for name, _ in response.headers):
        headers += (("x-headrace-route", NOBODY),)
    if error.retry_after is not None:
        headers += (("Retry-After", str(error.retry_after)),)
    response.send(error.status, headers, shape(error))
