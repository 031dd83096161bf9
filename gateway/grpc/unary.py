"""The unary calls that an engine answers: `ModelInfer`, and what a client may ask about a model."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from grpc import StatusCode

from gateway.dispatch import first_willing
from gateway.exchange import Exchange
from gateway.grpc import wire
from gateway.grpc.call import UnaryCall
from gateway.grpc.metadata import ClientMetadata
from gateway.grpc.requests import Requests, raw_triton
from gateway.grpc.statuses import GONE, INTERNAL, OK, Status, status_of
from gateway.http.client_response import NOBODY
from gateway.upstream.base import Engine, UpstreamError
from router.errors import ApiError
from router.fleet import FleetView
from router.kserve import MalformedError, query_view, read_infer, text_of
from router.plan import Attempt, Plan

logger = logging.getLogger(__name__)


_KEPT_OUT = frozenset({StatusCode.UNAUTHENTICATED, StatusCode.PERMISSION_DENIED})


@dataclass(slots=True, frozen=True)
class Query:
    """A question about a model, and how the client's name for it gets into the answer."""

    method: str
    named: Callable[[bytes, str], bytes]


QUERIES = (
    Query("ModelReady", lambda answer, _: answer),
    Query("ModelMetadata", lambda answer, name: answer + wire.name_field(name)),
    Query("ModelConfig", lambda answer, name: answer + wire.config_name(name)),
    Query("ModelStatistics", wire.statistics_named),
)


class Unary:
    """The handlers of unary calls."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    async def infer(self, message: bytes, context: Any) -> bytes:
        """`ModelInfer`."""
        metadata = self._requests.metadata(context, "ModelInfer")
        await metadata.settle()
        status = INTERNAL
        with Exchange(self._requests.live, metadata) as exchange:
            self._requests.begin(exchange, metadata)
            try:
                fleet = self._requests.access.view(metadata.caller)
                found = read_infer(message, stream=False, otherwise=self._requests.turn(), salt=fleet.salt)
                if fleet.limits is not None:
                    await self._requests.reserve(found.prompt, exchange, fleet.limits, fleet)
                decided = self._requests.plan(found.prompt, exchange, fleet)
                deadline = inf if decided.free > 0 else self._deadline(context)
                asked = found.prompt, metadata, fleet
                waiting = self._requests.enter(exchange, decided, *asked, len(message), deadline=deadline)
                if waiting is not None:
                    decided = await waiting
                answer = await self._ask(
                    "ModelInfer", message, decided, exchange, metadata, versioned=found.versioned, id_=found.id
                )
                _place(context, metadata, exchange)
                status = OK
                return answer + wire.name_field(found.prompt.model)
            except (ApiError, UpstreamError, MalformedError) as error:
                status = status_of(error)
            except asyncio.CancelledError:
                status = GONE
                raise
            except Exception:
                logger.exception("request %s failed", metadata.request_id)
            finally:
                self._requests.observe(exchange, status)
            return await refuse(context, status, metadata, exchange)

    def _deadline(self, context: Any) -> float:
        """The loop time at which an RPC's own deadline passes."""
        left: float | None = context.time_remaining()
        return self._requests.live.now() + left if left is not None else inf

    def query(self, query: Query) -> Callable[[bytes, Any], Any]:
        """The handler of a question about a model: any replica of the route answers it."""

        async def handle(message: bytes, context: Any) -> bytes:
            metadata = self._requests.metadata(context, query.method)
            await metadata.settle()
            with Exchange(self._requests.live, metadata) as exchange:
                try:
                    fleet = self._requests.access.view(metadata.caller)
                    name, versioned = text_of(message, 1), bool(text_of(message, 2))
                    if not name and query.method == "ModelStatistics":
                        return await self._all_statistics(metadata, fleet)
                    decided = self._requests.plan(query_view(name, self._requests.turn()), exchange, fleet)
                    answer = await self._ask(query.method, message, decided, exchange, metadata, versioned=versioned)
                    _place(context, metadata, exchange)
                    return query.named(answer, name)
                except (ApiError, UpstreamError, MalformedError) as error:
                    status = status_of(error)
                    told = isinstance(error, MalformedError) or status.code in _KEPT_OUT
                    if query.method == "ModelReady" and not told:
                        return b""  # not ready
                    if query.method == "ModelStatistics" and status.code is StatusCode.NOT_FOUND:
                        status = Status(StatusCode.INVALID_ARGUMENT, status.details)  # as Triton has it
                return await refuse(context, status, metadata, exchange)

        return handle

    async def _all_statistics(self, metadata: ClientMetadata, fleet: FleetView) -> bytes:
        """The statistics of every route that an engine can tell any of: their entries repeat, so answers add up."""
        answers = []
        for name in tuple(fleet.routes):
            with (
                contextlib.suppress(ApiError, UpstreamError),
                Exchange(self._requests.live, metadata) as exchange,
            ):
                decided = self._requests.plan(query_view(name, self._requests.turn()), exchange, fleet)
                answer = await self._ask("ModelStatistics", b"", decided, exchange, metadata, versioned=False)
                answers.append(wire.statistics_named(answer, name))
        return b"".join(answers)

    def _ask(
        self,
        method: str,
        message: bytes,
        decided: Plan,
        exchange: Exchange,
        metadata: ClientMetadata,
        *,
        versioned: bool,
        id_: str = "",
    ) -> Awaitable[bytes]:
        """An engine's answer; `id_` is the client's, of a request to infer.

        As few coroutines as can be lie between the RPC and gRPC's server: each is passed through twice per await.
        """

        fleet = self._requests.fleet

        def send(attempt: Attempt, engine: Engine) -> Awaitable[bytes]:
            raw = raw_triton(engine)
            renamed = message + wire.name_field(attempt.pool.spec.model)
            credentials = fleet.credentials(attempt, metadata.authorization)
            rpc = raw.unary(method, renamed, exchange.passed(metadata.passed) + credentials)
            exchange.call = call = UnaryCall(raw, rpc, versioned=versioned, request_id=id_)
            return call.response()

        only_asks = method != "ModelInfer"  # an answer to a question does not show that the model runs
        return first_willing(exchange, decided, fleet, metadata.request_id, send, relayed=only_asks)


def _place(context: Any, metadata: ClientMetadata, exchange: Exchange) -> None:
    """Tell the client who answers. It comes behind the answer, since gRPC's asyncio server sends metadata ahead of it
    only in an operation of its own."""
    attempt = exchange.attempt
    assert attempt is not None
    context.set_trailing_metadata(metadata.answer(attempt.endpoint.id, exchange.position))


async def refuse(context: Any, status: Status, metadata: ClientMetadata, exchange: Exchange) -> bytes:
    """End a call with a status. Raises always."""
    endpoint = exchange.attempt.endpoint.id if exchange.attempt is not None else NOBODY
    told = metadata.answer(endpoint, exchange.position)
    await context.abort(status.code, status.details, trailing_metadata=told)
    raise AssertionError("abort raises")
