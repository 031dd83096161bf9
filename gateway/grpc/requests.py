"""What unary calls and streams have in common: planning, trying endpoints, and counting what came of it."""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from gateway.corridor import Corridor
from gateway.dispatch import first_willing
from gateway.exchange import Exchange
from gateway.grpc.metadata import ClientMetadata
from gateway.grpc.statuses import OK, Status
from gateway.kserve import API
from gateway.metrics import UNKNOWN_ROUTE
from gateway.upstream.base import Engine, Failure, UpstreamError
from gateway.upstream.triton.engine import TritonEngine
from gateway.upstream.triton.raw import RawTriton
from router.admission.limits import TenantLimits
from router.fleet import FleetView
from router.plan import Attempt, Plan, plan
from router.prompt import PromptView

_Sent = TypeVar("_Sent")


class Requests:
    """The gateway, as far as requests of this front need it."""

    def __init__(self, corridor: Corridor) -> None:
        self.fleet = corridor.fleet
        self.access = corridor.access
        self.live = corridor.live
        self._corridor = corridor
        self._turns = itertools.count()

    def turn(self) -> int:
        """A key for a request that prefers no endpoint: each has another, so they spread."""
        return next(self._turns)

    def metadata(self, context: Any, method: str) -> ClientMetadata:
        """What a client sent along with an RPC."""
        return ClientMetadata(context, self._corridor, method)

    def plan(self, prompt: PromptView, exchange: Exchange, view: FleetView) -> Plan:
        """Where a request goes in the fleet as its caller sees it; the exchange is told of both. Raises ApiError."""
        self._corridor.overload.admit()
        exchange.tenant = view.tenant
        if prompt.model in view.routes:
            exchange.route = prompt.model
        return exchange.decide(prompt, view)

    async def reserve(self, prompt: PromptView, exchange: Exchange, limits: TenantLimits, view: FleetView) -> None:
        """Take from the limits of its caller what a request will need. Raises ApiError for one that is over them."""
        if prompt.model in view.routes:
            exchange.tenant, exchange.route = view.tenant, prompt.model
            await self._corridor.limiter.reserve(exchange, limits, prompt, view.routes[prompt.model])

    def enter(
        self,
        exchange: Exchange,
        decided: Plan,
        prompt: PromptView,
        metadata: ClientMetadata,
        view: FleetView,
        size: int,
        *,
        deadline: float = math.inf,
    ) -> asyncio.Future[Plan] | None:
        """As `gateway.admission.Admission.enter`, for a request of `size` bytes."""

        def again() -> Plan:
            return plan(prompt, self.access.view(metadata.caller))

        standing = view.standing.asking(metadata.priority, metadata.prefers)
        return self._corridor.admission.enter(
            exchange, decided, again, standing, size=size, kept=size, answer=None, deadline=deadline
        )

    def raw(self, attempt: Attempt) -> RawTriton:
        """The server of an attempt. Raises UpstreamError if it takes no requests any more."""
        return raw_triton(self.fleet.engine(attempt.endpoint))

    async def first_willing(
        self,
        exchange: Exchange,
        decided: Plan,
        request_id: str,
        send: Callable[[Attempt, RawTriton], Awaitable[_Sent]],
    ) -> _Sent:
        """As `gateway.dispatch.first_willing`."""

        async def send_raw(attempt: Attempt, engine: Engine) -> _Sent:
            return await send(attempt, raw_triton(engine))

        return await first_willing(exchange, decided, self.fleet, request_id, send_raw)

    def begin(self, exchange: Exchange, metadata: ClientMetadata) -> None:
        """A request has come by an RPC."""
        if self.live.observer is not None:
            headers = dict(metadata.context.invocation_metadata() or ())
            self.live.observer.begin_rpc(exchange, metadata.origin(), headers)

    def observe(self, exchange: Exchange, status: Status, first_write: float = 0.0) -> None:
        """Count a request that has ended; `first_write` is the loop time of a stream's first message."""
        exchange.status = status.http
        started = exchange.started
        ttft = first_write - started if first_write else None
        route, took = exchange.route or UNKNOWN_ROUTE, self.live.now() - started
        self._corridor.metrics.answered(API, route, status.http, took, ttft)
        if self.live.observer is not None:
            exchange.streamed = bool(first_write)
            exchange.told(status.code.name.lower() if status is not OK else None)
            self.live.observer.end(exchange, API, status.http, ttft)


def raw_triton(engine: Engine) -> RawTriton:
    """The server behind an engine; the plan of a KServe request holds no other than Triton's. Raises UpstreamError
    for one that is reached over HTTP only."""
    assert isinstance(engine, TritonEngine)
    if engine.raw is None:
        raise UpstreamError(Failure.BUSY, "The engine has no gRPC address.", 503, "no_grpc")
    return engine.raw
