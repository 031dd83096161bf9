"""One client request and everything it owns.

An `Exchange` is opened when a request comes in and closed once, whichever way it ends: answered, refused, cancelled by
the client, timed out, drained. Closing it releases the engine call (which stops the engine if it is still at work) and
the endpoint's in-flight count; both hang on it alone, so nothing can be counted twice or forgotten.

`LiveExchanges` knows the open ones and holds their deadlines: one sweep over all of them, at a quarter of the shortest
timeout in force, instead of a timer per request that every chunk would have to move.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from gateway.relay.accounting import Account
from gateway.upstream.base import Failure, LiveCall, UpstreamError
from router.fleet import Timeouts
from router.plan import Attempt

logger = logging.getLogger(__name__)

SWEEP_SHORTEST_S = 0.005
SWEEP_LONGEST_S = 1.0


class Client(Protocol):
    """Who an exchange is for, as far as deadlines are concerned."""

    paused_since: float
    """Loop time since when the client has not kept up; 0 if it does."""
    resumed_at: float
    """Loop time when it last caught up."""

    def abort(self) -> None:
        """End the client's connection or call: it does not read."""


class Exchange:
    """A request on its way. Use as a context manager."""

    __slots__ = ("_live", "account", "attempt", "attempt_started", "call", "client", "route", "started", "streamed")

    def __init__(self, live: "LiveExchanges", client: Client) -> None:
        self._live = live
        self.client = client
        self.route = ""
        self.streamed = False
        """The answer is a stream of events: its first byte is its first token."""
        self.started = live.now()
        self.attempt: Attempt | None = None
        self.attempt_started = 0.0
        self.call: LiveCall | None = None
        self.account: Account | None = None
        """What the answer says about itself, where that is known."""

    def __enter__(self) -> "Exchange":
        self._live.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_attempt()
        self._live.remove(self)

    def begin_attempt(self, attempt: Attempt) -> None:
        """Count the request at an endpoint, from before it is sent."""
        self.end_attempt()
        attempt.endpoint.state.in_flight += 1
        self.attempt = attempt
        self.attempt_started = self._live.now()

    def still_sending(self) -> None:
        """The engine has just taken more of the request: how long it may take to answer counts from now."""
        self.attempt_started = self._live.now()

    def end_attempt(self) -> None:
        """Release what the attempt holds. Idempotent."""
        attempt, self.attempt = self.attempt, None
        call, self.call = self.call, None
        if attempt is not None:
            attempt.endpoint.state.in_flight -= 1
        if call is not None:
            call.close()

    def enforce_deadlines(self, now: float) -> None:
        """Give up what is overdue: the engine's call, or a client that does not read."""
        attempt, call = self.attempt, self.call
        if attempt is None or call is None:
            return
        timeouts, paused_since = attempt.pool.timeouts, self.client.paused_since
        if now - self.started > timeouts.total:
            call.abort(_overdue("total", timeouts.total))
        elif not call.answering:
            if now - self.attempt_started > timeouts.first_byte:
                call.abort(_overdue("first_byte", timeouts.first_byte))
        elif paused_since:
            if now - paused_since > timeouts.idle:
                self.client.abort()
        elif now - max(call.last_read, self.client.resumed_at) > timeouts.idle:
            call.abort(_overdue("idle", timeouts.idle))


def _overdue(which: str, limit: float) -> UpstreamError:
    what = "The answer took" if which == "total" else "The engine was silent for"
    message = f"{what} longer than the pool's {which} timeout of {limit:g} s."
    return UpstreamError(Failure.TIMEOUT, message, 504, f"{which}_timeout")


class LiveExchanges:
    """The open exchanges and the sweep that holds their deadlines."""

    def __init__(self, pools_timeouts: Callable[[], Iterator[Timeouts]]) -> None:
        """`pools_timeouts` gives the deadlines in force."""
        self._open: set[Exchange] = set()
        self._timeouts = pools_timeouts
        self.now = asyncio.get_running_loop().time

    def __len__(self) -> int:
        return len(self._open)

    def add(self, exchange: Exchange) -> None:
        self._open.add(exchange)

    def remove(self, exchange: Exchange) -> None:
        self._open.discard(exchange)

    def abort(self, error: UpstreamError) -> None:
        """Give up every open exchange's engine: their clients are told."""
        for exchange in tuple(self._open):
            if exchange.call is not None:
                exchange.call.abort(error)

    async def sweep(self) -> None:
        """Enforce deadlines until cancelled."""
        while True:
            shortest = min((timeouts.shortest for timeouts in self._timeouts()), default=SWEEP_LONGEST_S)
            await asyncio.sleep(min(max(shortest / 4, SWEEP_SHORTEST_S), SWEEP_LONGEST_S))
            now = self.now()
            for exchange in tuple(self._open):
                try:
                    exchange.enforce_deadlines(now)
                except Exception:  # one request's trouble must not end everybody's deadlines
                    logger.exception("enforcing deadlines")
