"""One client request and everything it owns.

An `Exchange` is opened when a request comes in and closed once, whichever way it ends: answered, refused, cancelled by
the client, timed out, drained. Closing it releases the engine call (which stops the engine if it is still at work), the
endpoint's in-flight count or trial, the places in the route's queue and in the retry budget, and what was reserved of
the tenant's limits; all hang on it alone, so nothing can be counted twice or forgotten.

`LiveExchanges` knows the open ones, holds their deadlines and sends their signs of life: one sweep over all of them, at
a quarter of the shortest time in force, instead of a timer per request that every chunk would have to move.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from gateway.metrics import CLIENT_GONE
from gateway.relay.accounting import Account
from gateway.telemetry.record import Record
from gateway.telemetry.trace import Trace
from gateway.upstream.base import TOTAL_TIMEOUT, Failure, Headers, LiveCall, UpstreamError
from router import outlier
from router.admission import estimate
from router.admission.limits import Reservation
from router.fleet import EndpointState, FleetView, Pool
from router.plan import Attempt, Plan, plan
from router.prompt import PromptView
from router.retry import RetryBudget, RetryPlace
from router.timeouts import Asked, Timeouts

if TYPE_CHECKING:
    from gateway.telemetry.observer import Observer

logger = logging.getLogger(__name__)

SWEEP_SHORTEST_S = 0.005
SWEEP_LONGEST_S = 1.0


class Origin(Struct, frozen=True):
    """Where a request came from."""

    protocol: Literal["http", "grpc"]
    path: str
    """Without its query; over gRPC, the RPC."""
    request_id: str
    address: str


class Client(Protocol):
    """Who an exchange is for, as far as deadlines and operators are concerned."""

    paused_since: float
    """Loop time since when the client has not kept up; 0 if it does."""
    resumed_at: float
    """Loop time when it last caught up."""

    def abort(self) -> None:
        """End the client's connection or call: it does not read."""

    def origin(self) -> Origin: ...

    def refuse(self, error: UpstreamError) -> None:
        """Have the reading of a request that is still coming in end with `error`."""


class Admitted(Protocol):
    """A request's place among those of its route, waiting or not (`gateway.admission`)."""

    def leave(self, exchange: "Exchange") -> None:
        """Give the place up: the request is over."""


class Exchange:
    """A request on its way. Use as a context manager."""

    __slots__ = (
        "_held", "_live", "_place", "account", "admitted", "asked_timeouts", "attempt", "attempt_started", "attempts",
        "call", "cancelled", "client", "failure", "number", "ping", "pinged", "position", "record", "reservation",
        "route", "started", "status", "streamed", "tenant", "timeouts", "trace", "waits_for",
    )  # fmt: skip

    def __init__(self, live: "LiveExchanges", client: Client) -> None:
        self._live = live
        self.client = client
        self.route = ""
        self.tenant = ""
        """Whose request it is; empty for nobody's in particular."""
        self.streamed = False
        """The answer is a stream of events: its first byte is its first token."""
        self.started = live.now()
        self.attempt: Attempt | None = None
        self.attempt_started = 0.0
        self.call: LiveCall | None = None
        self.attempts = 0
        self.failure: UpstreamError | None = None
        """Why an endpoint did not take the request that it was sent outside of dispatch."""
        self._place: RetryPlace | None = None
        self._held: EndpointState | None = None
        self.admitted: Admitted | None = None
        self.position = 0
        """Its place in the queue when it began to wait; 0 if it never had to."""
        self.waits_for: Pool | None = None
        """Where it would go, while it waits; `call` then ends the wait."""
        self.timeouts: Timeouts | None = None
        """Those of the attempt."""
        self.asked_timeouts: Asked | None = None
        """What the client asked for, to be set before the first attempt."""
        self.ping: Callable[[], None] | None = None
        """Sends a stream's client a sign of life while the engine is silent."""
        self.pinged = self.started
        self.account: Account | None = None
        """What the answer says about itself, where that is known."""
        self.record: Record | None = None
        """For those who are told of requests; None if nobody is."""
        self.trace: Trace | None = None
        """None of a request that is not traced."""
        self.reservation: Reservation | None = None
        """What it holds of its tenant's limits."""
        self.status = 0
        """The HTTP status of its answer, to be set before it is closed; 0 is a failure."""
        self.number = 0
        """By which operators know it; 0 as long as none has seen it (`gateway.live_requests`)."""
        self.cancelled: UpstreamError | None = None
        """Why it is not to be sent anywhere any more."""

    def __enter__(self) -> "Exchange":
        self._live.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_attempt()
        self.settle_retry()
        if self.reservation is not None:
            self._settle(self.reservation)
        admitted, self.admitted = self.admitted, None
        if admitted is not None:
            admitted.leave(self)
        self._live.remove(self)

    def hold(self, state: EndpointState) -> None:
        """Count the request at the endpoint that it is about to be sent to, until an attempt begins: nobody else is to
        get its room meanwhile."""
        state.in_flight += 1
        self._held = state

    def begin_attempt(self, attempt: Attempt) -> None:
        """Count the request at an endpoint, from before it is sent. Raises UpstreamError for a cancelled one."""
        self.end_attempt()
        if self.cancelled is not None:
            raise self.cancelled
        state = attempt.endpoint.state
        state.in_flight += 1
        if state.outlier.on_trial:
            outlier.begin_trial(state.outlier, attempt)
        self.attempt = attempt
        self.attempts += 1
        if self._place is not None:
            self._place.used = True
        self.timeouts = attempt.pool.timeouts
        if self.asked_timeouts is not None:
            self.timeouts = self.timeouts.asked(self.asked_timeouts, attempt.pool.timeout_limits)
            self._live.hurry(self.timeouts.shortest)
        self.attempt_started = self._live.now()
        if self.trace is not None:
            self.trace.begin_attempt(attempt)

    def still_sending(self) -> None:
        """The engine has just taken more of the request: how long it may take to answer counts from now."""
        self.attempt_started = self._live.now()

    def end_attempt(self) -> None:
        """Release what the attempt holds, or what is held for it. Idempotent."""
        attempt, self.attempt = self.attempt, None
        call, self.call = self.call, None
        held, self._held = self._held, None
        if held is not None:
            held.in_flight -= 1
        if attempt is not None:
            state = attempt.endpoint.state
            state.in_flight -= 1
            if state.outlier.trial is attempt:
                outlier.end_trial(state.outlier)
        if call is not None:
            call.close()

    def may_retry(self) -> bool:
        """Whether the request may be sent to an endpoint now. The first time it always may, then it needs a place in
        the retry budget, which it holds until `settle_retry`."""
        if not self.attempts or (self._place is not None and not self._place.used):
            return True
        self.settle_retry()
        self._place = self._live.retries.take(len(self._live), self._live.now())
        return self._place is not None

    def settle_retry(self) -> None:
        """An engine answers, or has failed: the request is no retry in flight any more. Idempotent."""
        place, self._place = self._place, None
        if place is not None:
            self._live.retries.give_back(place, self._live.now())

    def failed(self, error: UpstreamError) -> None:
        """The attempt failed."""
        if self.trace is not None:
            self.trace.failed(error)

    def passed(self, headers: Headers) -> Headers:
        """What of a client's `headers` goes to the attempt's engine."""
        return headers if self.trace is None else self.trace.passed(headers)

    def decide(self, prompt: PromptView, view: FleetView) -> Plan:
        """As `router.plan.plan`."""
        if self.trace is None:
            return plan(prompt, view)
        began = time.monotonic()
        try:
            return plan(prompt, view)
        finally:
            self.trace.decided = began, time.monotonic()

    def told(self, code: str | None) -> None:
        """The client is told of an error with this code."""
        if self.record is not None:
            self.record.code = code or ""

    def _settle(self, reservation: Reservation) -> None:
        """The request has taken of its limits what it used; nothing, if it came to nothing. Idempotent."""
        account = self.account
        left = self.status == CLIENT_GONE and self.attempts > 0  # the engine was at work for it
        if not (200 <= self.status < 400 or left):
            reservation.release()
        elif account is None:
            reservation.settle(reservation.use)
        else:
            reservation.settle(
                estimate.used(
                    reservation.use, account.prompt_tokens, account.completion_tokens, account.body_bytes,
                    streamed=self.streamed,
                )
            )  # fmt: skip

    def enforce_deadlines(self, now: float) -> None:
        """Give up what is overdue: the engine's call, or a client that does not read."""
        attempt, call, timeouts = self.attempt, self.call, self.timeouts
        if attempt is None or call is None or timeouts is None:
            if self.waits_for is not None:  # until when, its queue knows
                self._ping(now, self.started, self.waits_for)
            return
        paused_since = self.client.paused_since
        if now - self.started > timeouts.total:
            call.abort(_overdue(TOTAL_TIMEOUT, timeouts.total))
        elif not call.answering:
            if now - self.attempt_started > timeouts.first_byte:
                usual = attempt.pool.timeouts.first_byte
                call.abort(_overdue("first_byte_timeout", timeouts.first_byte, usual))
            else:
                self._ping(now, self.started, attempt.pool)
        elif paused_since:
            if now - paused_since > timeouts.idle:
                self.client.abort()
        elif now - max(call.last_read, self.client.resumed_at) > timeouts.idle:
            call.abort(_overdue("idle_timeout", timeouts.idle, attempt.pool.timeouts.idle))
        else:
            self._ping(now, call.last_read, attempt.pool)

    def _ping(self, now: float, silent_since: float, pool: Pool) -> None:
        if self.ping is not None and now - max(silent_since, self.pinged) >= pool.ping:
            self.pinged = now
            self.ping()


def _overdue(code: str, limit: float, usual: float = 0.0) -> UpstreamError:
    """The error for a deadline of `limit` seconds, where requests have `usual`."""
    what = "The answer took" if code == TOTAL_TIMEOUT else "The engine was silent for"
    message = f"{what} longer than the {code.removesuffix('_timeout')} timeout of {limit:g} s."
    return UpstreamError(Failure.TIMEOUT, message, 504, code, own_deadline=limit < usual)


def _nobody_waits() -> None:
    """What follows from the end of an exchange where there are no queues."""


class LiveExchanges:
    """The open exchanges and the sweep that holds their deadlines."""

    def __init__(self, pools: Callable[[], Iterable[Pool]], retries: RetryBudget) -> None:
        """`pools` gives those whose deadlines are in force."""
        self._open: set[Exchange] = set()
        self.observer: Observer | None = None
        """Who is told of requests; None if nobody is."""
        self.ended: Callable[[], None] = _nobody_waits
        """Called whenever an exchange has ended: there may be room for another."""
        self.retries = retries
        self._pools = pools
        self.now = asyncio.get_running_loop().time
        self._pause = SWEEP_LONGEST_S
        self._hurry = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Exchange]:
        """The open ones; none may come or go meanwhile."""
        return iter(self._open)

    def add(self, exchange: Exchange) -> None:
        self._open.add(exchange)

    def remove(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        self.ended()

    def hurry(self, shortest: float) -> None:
        """A request has come with deadlines of its own, the shortest of which is `shortest` seconds."""
        if max(shortest / 4, SWEEP_SHORTEST_S) < self._pause:
            self._hurry.set()

    def abort(self, error: UpstreamError) -> None:
        """Give up every open exchange's engine: their clients are told."""
        for exchange in tuple(self._open):
            if exchange.call is not None:
                exchange.call.abort(error)

    async def sweep(self) -> None:
        """Enforce deadlines until cancelled."""
        while True:
            self._hurry.clear()
            self._pause = min(max(self._shortest() / 4, SWEEP_SHORTEST_S), SWEEP_LONGEST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause):
                    await self._hurry.wait()
            now = self.now()
            for exchange in tuple(self._open):
                try:
                    exchange.enforce_deadlines(now)
                except Exception:  # one request's trouble must not end everybody's deadlines
                    logger.exception("enforcing deadlines")

    def _shortest(self) -> float:
        """The shortest time that has to be kept."""
        in_force = min((min(pool.timeouts.shortest, pool.ping) for pool in self._pools()), default=SWEEP_LONGEST_S)
        own = (exchange.timeouts for exchange in self._open if exchange.asked_timeouts is not None)
        return min([in_force, *(timeouts.shortest for timeouts in own if timeouts is not None)])
