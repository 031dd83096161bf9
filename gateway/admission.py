"""Who may be sent to an engine now, and who waits: the queues of the routes, wired to the gateway.

The decisions are `router.admission.queue`'s; here are what they are made about and what follows from them. A request
asks with the plan that was made for it, which says how much room there is (`Plan.free`). It starts at once, is refused,
or waits: then its exchange's call is its place in the queue, so that whatever gives an exchange up ends the wait too.
Whenever an exchange ends, and once a second besides, those who wait are offered what room there is. Whoever gets some
has a plan made anew, for the fleet may have changed, and holds its place at that endpoint from this moment on, so that
nobody can take it while its task is about to run.

**Lines.** A route has one queue for the requests that all of its serving endpoints can take, and one more for each
smaller set that some are confined to (by a sequence's home, by parameters that not every engine knows, by an API that
not all of them speak): among requests that can go to different places, who is next depends on where there is room. So
do routes that share endpoints. Lines with something waiting take turns.

The counts are this process's own: several gateways, or workers, have as many requests at an engine as they may
together. Where a limit is `off` there is no queue, and none of this happens.
"""

import asyncio
import logging
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from gateway.exchange import Exchange, LiveExchanges
from gateway.metrics import Metrics
from gateway.overload import OverloadWatch
from gateway.upstream.base import UpstreamError, closed
from router.admission.estimate import COMPLETION_TOKENS
from router.admission.queue import RouteQueue
from router.admission.standing import Standing
from router.admission.tickets import Arrival, Reason, Refusal, State, Ticket
from router.errors import ApiError
from router.fleet import Route
from router.plan import Plan

POSITION_HEADER: Final = "x-headrace-queue-position"
"""Of a request that had to wait: its place in the queue when it came."""
MOST_TOKENS = 128 * 1024
"""No request is taken to cost more of either kind, as long as its engine has not said so: what it costs stands in the
averages by which all are judged."""
_OFFER_EVERY_S = 1.0
_IDLE_S = 60.0
"""A line that nobody has used for so long is forgotten, and what it knew of its tenants with it."""
_ANY_NUMBER = 1 << 30

_Key = str | tuple[str, frozenset[str]]
"""A route, or a route and the ids of the endpoints that a line's requests are confined to."""

logger = logging.getLogger(__name__)


class Line:
    """A queue and those who wait in it."""

    __slots__ = ("key", "queue", "route", "used", "waiting")

    def __init__(self, key: _Key, route: Route, now: float) -> None:
        self.key = key
        self.route = route.name
        self.queue = RouteQueue(route.queue)
        self.waiting: dict[Ticket, Waiting] = {}
        """In order of arrival."""
        self.used = now


class Place:
    """What an exchange has of a line, from when it is let in or begins to wait to its end."""

    __slots__ = ("_admission", "_line", "_ticket")

    def __init__(self, admission: "Admission", line: Line, ticket: Ticket) -> None:
        self._admission = admission
        self._line = line
        self._ticket = ticket

    def leave(self, exchange: Exchange) -> None:
        """See `gateway.exchange.Admitted`."""
        line, now = self._line, self._admission.now()
        if line.waiting:
            self._admission.waits_no_more(line, self._ticket)
        line.used = now
        line.queue.end(self._ticket, now, _used(exchange))


class Waiting:
    """A request that waits; the `LiveCall` of its exchange."""

    __slots__ = ("again", "answering", "exchange", "last_read", "plan", "since", "timer")

    def __init__(self, exchange: Exchange, again: Callable[[], Plan], now: float) -> None:
        self.exchange = exchange
        self.again = again
        """Makes its plan anew. Raises ApiError."""
        self.plan: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
        self.since = now
        self.timer: asyncio.TimerHandle | None = None
        self.last_read = 0.0
        self.answering = False

    def fail(self, error: Exception) -> None:
        """Have whoever waits raise `error`."""
        if not self.plan.done():
            self.plan.set_exception(error)
            self.plan.exception()  # it may be that nobody looks at it any more

    def abort(self, error: UpstreamError) -> None:
        self.fail(error)

    def close(self) -> None:
        self.fail(closed())


class Admission:
    """The queues of one gateway process."""

    def __init__(self, live: LiveExchanges, metrics: Metrics, overload: OverloadWatch) -> None:
        self.now = live.now
        self._metrics = metrics
        self._overload = overload
        self._lines: dict[_Key, Line] = {}
        self._waiting: OrderedDict[Line, None] = OrderedDict()
        """The lines with something waiting, whose turn it is first."""
        live.ended = self.offer_room

    def enter(
        self,
        exchange: Exchange,
        decided: Plan,
        again: Callable[[], Plan],
        standing: Standing,
        *,
        size: int,
        kept: int,
        answer: int | None,
        deadline: float = math.inf,
    ) -> asyncio.Future[Plan] | None:
        """Let a request go on with the plan `decided`, which is to have been made just now, or have it wait: then for
        the plan that it gets, which `again` makes. The wait may be given up by ending the exchange.

        `size`: bytes of the request's body, of which `kept` are in memory while it waits. `answer`: the tokens it may
        have, if it says. `deadline`: loop time when it must have started, besides its timeouts. Raises ApiError (429 or
        503), here and from the future, for a request that does not get in, and UpstreamError for a cancelled one.
        """
        if exchange.cancelled is not None:
            raise exchange.cancelled
        if standing.priority == "batch":
            self._overload.admit_batch()
        free = decided.free
        if free == math.inf:
            return None
        first, now = decided.attempts[0], self.now()
        line = self._lines.get(decided.route.name) if not decided.narrowed else None
        if line is None:
            line = self._line(decided, now)
        line.queue.bounds = decided.route.queue
        if not line.queue.roomy(int(free)):  # else it starts now, and its patience does not matter
            timeouts = first.pool.timeouts
            if exchange.asked_timeouts is not None:
                timeouts = timeouts.asked(exchange.asked_timeouts, first.pool.timeout_limits)
            within = min(timeouts.first_byte, timeouts.total)
            deadline = min(exchange.started + within, now + decided.route.queue.wait_s, deadline)
        arrival = Arrival(
            standing.tenant,
            min(size / decided.route.bytes_per_token, MOST_TOKENS),
            COMPLETION_TOKENS if answer is None else min(max(answer, 0), MOST_TOKENS),
            standing.priority,
            standing.weight,
            kept,
            deadline,
            standing.if_available,
        )
        ticket = line.queue.offer(arrival, int(free), now, random.random())
        if isinstance(ticket, Refusal):
            raise self._refused(line.route, ticket.reason, ticket.retry_after)
        exchange.admitted = Place(self, line, ticket)
        if ticket.state is State.RUNNING:
            exchange.hold(first.endpoint.state)
            return None
        waiting = Waiting(exchange, again, now)
        exchange.call, exchange.waits_for, exchange.position = waiting, first.pool, ticket.position
        if exchange.trace is not None:
            exchange.trace.begin_wait()
        self._wait_in(line, ticket, waiting)
        return waiting.plan

    def fleet_changed(self) -> None:
        """Endpoints have come, gone or changed: who waits may have to go elsewhere, or have nowhere to go."""
        for line in tuple(self._waiting):
            for ticket, waiting in tuple(line.waiting.items()):
                self._plan_of(line, ticket, waiting)
        self.offer_room()

    def offer_room(self) -> None:
        """Start what can be started. To be called whenever there may be room."""
        passed = 0
        while passed < len(self._waiting):
            line = next(iter(self._waiting))
            self._waiting.move_to_end(line)
            passed = 0 if self._start_one(line) else passed + 1

    async def watch(self) -> None:
        """Offer what time alone has made free, and forget what nobody uses, until cancelled."""
        while True:
            await asyncio.sleep(_OFFER_EVERY_S)
            try:
                now = self.now()
                for line in tuple(self._waiting):
                    self._pass_deadline(line, now)
                self.offer_room()
                for key, line in tuple(self._lines.items()):
                    if not line.queue.in_flight and not line.waiting and now - line.used > _IDLE_S:
                        del self._lines[key]
            except Exception:  # one line's trouble must not end the watch over all
                logger.exception("offering room")

    def lengths(self) -> dict[str, tuple[int, int]]:
        """How many requests wait for each route that has a line, and how many bytes of theirs."""
        found: dict[str, tuple[int, int]] = {}
        for line in self._lines.values():
            requests, size = found.get(line.route, (0, 0))
            found[line.route] = requests + line.queue.waiting, size + line.queue.waiting_bytes
        return found

    def waits_no_more(self, line: Line, ticket: Ticket) -> Waiting | None:
        """Take a request from those who wait, whatever comes of it; None if it does not wait."""
        waiting = self._take_out(line, ticket)
        if waiting is not None:
            exchange = waiting.exchange
            exchange.waits_for = None
            waited, waits = self.now() - waiting.since, self._metrics.queue_wait.of((line.route,))
            waits.observe(waited)
            if exchange.trace is not None:
                exchange.trace.end_wait()
                waits.exemplify(waited, exchange.trace.shown_id)
        return waiting

    def _line(self, decided: Plan, now: float) -> Line:
        key = _key(decided)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key, decided.route, now)
        return line

    def _wait_in(self, line: Line, ticket: Ticket, waiting: Waiting) -> None:
        for displaced in ticket.displaced:
            self._put_out(line, displaced, "displaced")
        line.waiting[ticket] = waiting
        self._waiting.setdefault(line)
        deadline = ticket.arrival.deadline
        if deadline < math.inf:
            waiting.timer = asyncio.get_running_loop().call_at(deadline, self._pass_deadline, line, deadline)

    def _take_out(self, line: Line, ticket: Ticket) -> Waiting | None:
        waiting = line.waiting.pop(ticket, None)
        if waiting is not None and waiting.timer is not None:
            waiting.timer.cancel()
        if not line.waiting:
            self._waiting.pop(line, None)
        return waiting

    def _start_one(self, line: Line) -> bool:
        """Start the next of a line, if there is room for it."""
        room, now = self._room(line), self.now()
        ticket = line.queue.take(room, now)
        self._pass_deadline(line, now)
        if ticket is None:
            return False
        waiting = line.waiting[ticket]
        decided = self._plan_of(line, ticket, waiting)
        if decided is not None:
            self.waits_no_more(line, ticket)
            waiting.exchange.call = None
            waiting.exchange.hold(decided.attempts[0].endpoint.state)
            waiting.plan.set_result(decided)
        return True

    def _room(self, line: Line) -> int:
        """How much room there is for the requests of a line."""
        while line.waiting:
            decided = self._plan_of(line, *next(iter(line.waiting.items())))
            if decided is not None:
                return int(min(decided.free, _ANY_NUMBER))
        return 0

    def _plan_of(self, line: Line, ticket: Ticket, waiting: Waiting) -> Plan | None:
        """The plan, made anew, of a request of a line; None if it is not of the line any more: it has been given up, is
        told that nobody can serve it, or waits in the line to which it belongs as the fleet is now."""
        decided: Plan | None = None
        if not waiting.plan.done():
            try:
                decided = waiting.again()
            except Exception as error:
                waiting.fail(error)
            else:
                if _key(decided) == line.key:
                    return decided
        now = self.now()
        line.queue.end(ticket, now, (0, 0))
        if decided is None:
            self.waits_no_more(line, ticket)
            return None
        other = self._line(decided, now)
        other.queue.bounds = decided.route.queue
        moved = other.queue.offer(ticket.arrival, 0, now, random.random())
        if isinstance(moved, Refusal):
            self._put_out(line, ticket, moved.reason)
            return None
        self._take_out(line, ticket)
        waiting.exchange.admitted = Place(self, other, moved)
        self._wait_in(other, moved, waiting)
        return None

    def _pass_deadline(self, line: Line, now: float) -> None:
        """Tell those of a line who were not started in time."""
        for late in line.queue.overdue(max(now, self.now())):
            self._put_out(line, late, "deadline")

    def _put_out(self, line: Line, ticket: Ticket, reason: Reason) -> None:
        """Tell somebody who waits that it is over, as its queue knows already."""
        waiting = self.waits_no_more(line, ticket)
        if waiting is not None:
            waiting.fail(self._refused(line.route, reason, line.queue.retry_after(random.random())))

    def _refused(self, route: str, reason: Reason, retry_after: int) -> ApiError:
        self._metrics.queue_refusals.values[route, reason] += 1
        status, code, why = _REFUSALS[reason]
        message = f"{why.format(route=repr(route))} Try again in {retry_after} s."
        type_ = "rate_limit_error" if status == 429 else "server_error"
        return ApiError(status, message, type_, code=code, retry_after=retry_after)


_FULL = "Every endpoint of {route} has all the requests it may have, and "
_REFUSALS: Final[dict[Reason, tuple[int, str, str]]] = {
    "if_available": (503, "not_available", _FULL + "this one asks not to wait (Prefer: if-available)."),
    "queue_full": (503, "queue_full", _FULL + "the queue is full."),
    "tenant_share": (429, "queue_share", _FULL + "you have as many waiting as one tenant may."),
    "too_large": (503, "queue_too_large", _FULL + "this one is too large to wait."),
    "displaced": (429, "queue_displaced", _FULL + "the newest of those who have most waiting gave way to another."),
    "deadline": (503, "queue_deadline", _FULL + "this one will not be started before its deadline."),
}
"""Status and stable code of what is refused, and why."""


def _key(decided: Plan) -> _Key:
    """The line to which a request with such a plan belongs."""
    route = decided.route.name
    return (route, frozenset([attempt.endpoint.id for attempt in decided.attempts])) if decided.narrowed else route


def _used(exchange: Exchange) -> tuple[float, float] | None:
    """How many tokens of the prompt and of the answer a request has cost its engine; None if nobody knows."""
    account = exchange.account
    if not exchange.attempts:
        return (0, 0)
    if account is None or not (account.prompt_tokens or account.completion_tokens):
        return None
    return (max(account.prompt_tokens - account.cached_tokens, 0), account.completion_tokens)
