"""The bounded queue of one route: who starts now, who waits, who is told to come back, and what they are told.

A request waits only while every endpoint that could take it is full; what is free is counted by the caller and passed
in as `free`, so that the queue holds no opinion about engines. One queue serves one set of candidate endpoints.
Whenever something may have become free, the caller takes requests until there is none to take; it does so once a second
besides, because head-room and deadlines lapse with time alone.

Order: classes are strict, `interactive` before `standard` before `batch`, except that a class that has been passed over
`MAX_PASSED_OVER` times gets one turn: batch work goes on at about 5 % of the slots instead of timing out as a whole
behind a busy day. Inside a class tenants share by tokens (`router.admission.flows`, which also says when a slot is left
free for those who are not over their share).

Limits: entries, bytes of the bodies that wait, and the part of both that one tenant may have. A full queue is no reason
to refuse the smaller party: the newest request of whoever fills most of it gives way, in the lowest class first, so
that neither batch work nor any number of greedy tenants can keep others out.

Time: a request that will not start before its deadline is refused when it comes, before it costs anything, and one
whose deadline passes is never started. How long a wait will be follows from Little's law: slots in use, divided by how
long requests hold one, is the rate at which slots come free. It is an estimate for the mean request; while nothing has
ended yet there is none, and nobody is refused for it.

While there is plenty of room and nobody waits, who uses what decides nothing. Then what starts and ends is only written
down, and entered into the books in one go, with the times at which it happened, before anything is decided by them:
code that runs many times in a row costs a tenth of what it does between other things, with none of it in the caches.

Every operation is O(log n) amortised in the number of waiting requests and tenants. Not thread-safe; times are seconds
on any clock that does not go back.
"""

import math

import msgspec

from router.admission.flows import OVER_SHARE, USAGE_SERVICE_TIMES, PriorityClass, head_room
from router.admission.heap import Heap
from router.admission.tickets import PRIORITIES, Arrival, Flow, Reason, Refusal, State, Ticket, token_cost
from router.spec.fleet import QueueSpec
from router.spec.units import seconds, share, size_bytes

MAX_PASSED_OVER = 20
"""Requests of higher classes after which a waiting class gets a turn."""
FIRST_SERVICE_S = 1.0
"""How long requests are taken to hold a slot until one has ended."""
RETRY_AFTER_MAX_S = 60
_MOST_NOTED = 256
"""Starts and ends that are entered in one go."""
_NEWEST_SERVICE = 1 / 32
"""Weight of the newest request in the average time that a slot is held."""


class Bounds(msgspec.Struct, frozen=True):
    """How much may wait."""

    entries: int = 1024
    bytes: int = 256 * 1024 * 1024
    tenant_share: float = 0.5
    """The part of both that one tenant may have, in each class."""
    wait_s: float = math.inf
    """How long a request waits at most. It is for the caller to make that part of its deadline."""

    @classmethod
    def of(cls, spec: QueueSpec) -> "Bounds":
        return cls(spec.size, size_bytes(spec.bytes), share(spec.tenant_share), seconds(spec.timeout))


class RouteQueue:
    """The queue of one route's requests for one set of endpoints, and the count of those it has let in."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.waiting = 0
        self.waiting_bytes = 0
        self.in_flight = 0
        self._classes = tuple(PriorityClass() for _ in PRIORITIES)
        self._deadlines: Heap[Ticket] = Heap()
        self._late: list[Ticket] = []
        self._noted: list[tuple[Ticket, float, bool, tuple[float, float] | None]] = []
        """What is not in the books yet: who, when, whether that was the start, and at the end the tokens. While
        requests wait, there is nothing."""
        self._numbers = 0
        self._slots = 0
        self._service_s = FIRST_SERVICE_S
        self._span = FIRST_SERVICE_S * USAGE_SERVICE_TIMES
        """What averages are over, in seconds."""
        self._measured = False

    @property
    def flows(self) -> int:
        """How many tenants' counters are kept, over all classes."""
        self._enter()
        return sum(len(cls.flows) for cls in self._classes)

    def roomy(self, free: int) -> bool:
        """Whether one of `free` slots is for anybody who comes: nobody waits, and head-room is never that much."""
        return not self.waiting and free > (self.in_flight + free) // 2

    def offer(self, arrival: Arrival, free: int, now: float, jitter: float) -> Ticket | Refusal:
        """Start the request, let it wait, or refuse it; `jitter` is a random number from 0 to 1."""
        self._slots = self.in_flight + max(free, 0)
        rank = PRIORITIES.index(arrival.priority)
        self._numbers += 1
        ticket = Ticket(arrival, rank, self._numbers, now)
        if self.roomy(free) and now < arrival.deadline:
            ticket.state = State.RUNNING
            self.in_flight += 1
            self._noted.append((ticket, now, True, None))
            return ticket
        self._enter()
        flow = ticket.flow = self._classes[rank].flow(arrival.tenant, arrival.weight, now, self._span)
        if now >= arrival.deadline:
            return self._refuse(ticket, "deadline", now, jitter)
        if free > 0 and not flow.waiting and self._may_start(rank, flow, free, now):
            self._start(ticket, now)
            return ticket
        if arrival.if_available:
            return self._refuse(ticket, "if_available", now, jitter)
        ticket.position = self._ahead(rank, flow) + 1
        if now + self._wait(ticket.position) > arrival.deadline:
            return self._refuse(ticket, "deadline", now, jitter)
        size = arrival.bytes
        if size > self.bounds.bytes * self.bounds.tenant_share:
            return self._refuse(ticket, "too_large", now, jitter)
        if self._part(len(flow.waiting) + 1, flow.bytes + size) > max(self.bounds.tenant_share, self._part(1, 0)):
            return self._refuse(ticket, "tenant_share", now, jitter)
        displaced = self._make_room(ticket, now)
        if displaced is None:
            return self._refuse(ticket, "queue_full", now, jitter)
        ticket.displaced = displaced
        self._insert(ticket, now)
        return ticket

    def take(self, free: int, now: float) -> Ticket | None:
        """The waiting request that starts in one of `free` slots, or None if none is to start now."""
        self._slots = self.in_flight + max(free, 0)
        if free <= 0 or not self.waiting:
            return None
        self._pass_deadlines(now)
        for rank in self._turns():
            cls = self._classes[rank]
            flow = self._next(rank, free, now)
            if flow is None:
                continue
            ticket = next(iter(flow.waiting.values()))
            self._remove(ticket, now)
            self._start(ticket, now)
            cls.passed_over = 0
            for lower in self._classes[rank + 1 :]:
                lower.passed_over += lower.waiting > 0
            return ticket
        return None

    def end(self, ticket: Ticket, now: float, tokens: tuple[float, float] | None = None) -> None:
        """The request is over, whichever way: cancelled, failed, or answered. Idempotent.

        `tokens`: how many of the prompt and of the answer were computed; None if that is not known, and its estimate
        then stands. One that was waiting has cost nothing.
        """
        if ticket.state is State.WAITING:
            self._remove(ticket, now)
            ticket.state = State.OVER
            self._classes[ticket.rank].leave_if_quiet(ticket.flow, now, self._span)
        elif ticket.state is State.RUNNING:
            ticket.state = State.OVER
            self.in_flight -= 1
            self._noted.append((ticket, now, False, tokens))
            if self.waiting or len(self._noted) >= _MOST_NOTED:
                self._enter()

    def overdue(self, now: float) -> list[Ticket]:
        """Those whose deadline has passed while they waited, each once: they are over, and must be told."""
        self._pass_deadlines(now)
        late, self._late = self._late, []
        return late

    def retry_after(self, jitter: float) -> int:
        """Seconds after which somebody who is refused now may find room: when what waits will have started, and up to
        half as long again, so that those refused together do not come back together."""
        wait = max(self._wait(self.waiting + 1), 1.0)
        return min(math.ceil(wait * (1 + jitter / 2)), RETRY_AFTER_MAX_S)

    def _wait(self, position: int) -> float:
        """How long the request at `position` will wait; 0 while nothing is known."""
        return position * self._service_s / max(self.in_flight, 1) if self._measured else 0.0

    def _ahead(self, rank: int, flow: Flow) -> int:
        """About how many requests will start before one that `flow` lets wait now: all of higher classes, its own, and
        of every other flow as many as of its own, itself included, since they take turns."""
        cls = self._classes[rank]
        own = len(flow.waiting)
        others = len(cls.ready) + len(cls.held) - (own > 0)
        higher = sum(above.waiting for above in self._classes[:rank])
        return higher + own + min(cls.waiting - own, (own + 1) * others)

    def _refuse(self, ticket: Ticket, reason: Reason, now: float, jitter: float) -> Refusal:
        ticket.state = State.OVER
        self._classes[ticket.rank].leave_if_quiet(ticket.flow, now, self._span)
        return Refusal(reason, self.retry_after(jitter))

    # The books

    def _enter(self) -> None:
        """Enter what has been noted."""
        noted, self._noted = self._noted, []
        for ticket, now, started, tokens in noted:
            cls, arrival = self._classes[ticket.rank], ticket.arrival
            if started:
                ticket.flow = cls.flow(arrival.tenant, arrival.weight, now, self._span)
                cls.start(ticket.flow, ticket.cost, self._slots, now, self._span)
                continue
            self._service_s += (now - ticket.since - self._service_s) * (_NEWEST_SERVICE if self._measured else 1.0)
            self._measured = True
            self._span = max(self._service_s, 1e-3) * USAGE_SERVICE_TIMES
            cls.finish(ticket.flow, token_cost(*tokens) - ticket.cost if tokens is not None else 0.0, now, self._span)

    # Who starts

    def _may_start(self, rank: int, flow: Flow, free: int, now: float) -> bool:
        """Whether one of `free` slots is for `flow`: all but the head-room is for everybody."""
        if free > self._slots // 2:
            return True  # head-room is never more
        span = self._span
        weight = expected = 0.0
        for cls in self._classes[: rank + 1]:
            cls.forget(now, span)
            cls.absent.advance(now, span)
            weight += cls.weight
            expected += cls.absent.mean
        flow.usage.advance(now, span)
        if not flow.waiting:
            expected = max(0.0, expected - flow.usage.mean)
        fair = self._slots * flow.weight / weight
        return free > head_room(expected, self._slots) or flow.usage.mean <= OVER_SHARE * fair

    def _next(self, rank: int, free: int, now: float) -> Flow | None:
        """The flow of a class to serve next. Those over their share are set aside in `held` when head-room keeps them
        out, so that each is looked at once and not at every slot that comes free."""
        cls = self._classes[rank]
        held = cls.held.first()
        if held is not None and self._may_start(rank, held[1], free, now):
            cls.held.discard(held[1])
            cls.ready.put(held[1], *held[0])
        while (ready := cls.ready.first()) is not None:
            if self._may_start(rank, ready[1], free, now):
                return ready[1]
            cls.ready.discard(ready[1])
            cls.held.put(ready[1], *ready[0])
        return None

    def _turns(self) -> list[int]:
        """The classes with something waiting, in the order in which they are served now."""
        waiting = [rank for rank, cls in enumerate(self._classes) if cls.waiting]
        return sorted(waiting, key=lambda rank: self._classes[rank].passed_over < MAX_PASSED_OVER)

    def _start(self, ticket: Ticket, now: float) -> None:
        """Into a slot. It is not in the queue, or not any more."""
        cls = self._classes[ticket.rank]
        ticket.state = State.RUNNING
        ticket.since = now
        self.in_flight += 1
        cls.start(ticket.flow, ticket.cost, self._slots, now, self._span)
        if ticket.flow.waiting:
            cls.line_up(ticket.flow, anew=True)

    # Who waits

    def _part(self, entries: int, size: int) -> float:
        """How much of the queue that is: of its entries or its bytes, whichever is more."""
        return max(entries / max(self.bounds.entries, 1), size / max(self.bounds.bytes, 1))

    def _insert(self, ticket: Ticket, now: float) -> None:
        cls, flow, size = self._classes[ticket.rank], ticket.flow, ticket.arrival.bytes
        first = not flow.waiting
        if first:
            cls.begin_waiting(flow, now, self._span)
        flow.waiting[ticket.number] = ticket
        flow.bytes += size
        cls.waiting += 1
        self.waiting += 1
        self.waiting_bytes += size
        if first:
            cls.line_up(flow, anew=True)
        cls.heaviest.put(flow, -self._part(len(flow.waiting), flow.bytes))
        if ticket.arrival.deadline < math.inf:
            self._deadlines.put(ticket, ticket.arrival.deadline)

    def _remove(self, ticket: Ticket, now: float) -> None:
        cls, flow, size = self._classes[ticket.rank], ticket.flow, ticket.arrival.bytes
        first = next(iter(flow.waiting)) == ticket.number
        del flow.waiting[ticket.number]
        flow.bytes -= size
        cls.waiting -= 1
        self.waiting -= 1
        self.waiting_bytes -= size
        self._deadlines.discard(ticket)
        if not flow.waiting:
            cls.end_waiting(flow, now, self._span)
            if not cls.waiting:
                cls.passed_over = 0
        else:
            cls.heaviest.put(flow, -self._part(len(flow.waiting), flow.bytes))
            if first:
                cls.line_up(flow, anew=True)

    def _make_room(self, newcomer: Ticket, now: float) -> tuple[Ticket, ...] | None:
        """Those who give way to `newcomer`, over already; None if it has to be refused, and nobody gives way then."""
        size = newcomer.arrival.bytes
        own = self._part(len(newcomer.flow.waiting) + 1, newcomer.flow.bytes + size)
        leaving: list[Ticket] = []
        while self.waiting + 1 > self.bounds.entries or self.waiting_bytes + size > self.bounds.bytes:
            victim = self._heaviest(newcomer.rank, own)
            if victim is None:
                for ticket in reversed(leaving):
                    self._insert(ticket, now)
                return None
            leaving.append(victim)
            self._remove(victim, now)
        for ticket in leaving:
            ticket.state = State.OVER
            self._classes[ticket.rank].leave_if_quiet(ticket.flow, now, self._span)
        return tuple(leaving)

    def _heaviest(self, rank: int, own: float) -> Ticket | None:
        """The newest request of whoever fills most of the queue, if that is a lower class, or more than `own`."""
        for lower in range(len(PRIORITIES) - 1, rank - 1, -1):
            first = self._classes[lower].heaviest.first()
            if first is not None and (lower > rank or -first[0][0] > own):
                return next(reversed(first[1].waiting.values()))
        return None

    def _pass_deadlines(self, now: float) -> None:
        while (first := self._deadlines.first()) is not None and first[0][0] <= now:
            ticket = first[1]
            self._remove(ticket, now)
            ticket.state = State.OVER
            self._classes[ticket.rank].leave_if_quiet(ticket.flow, now, self._span)
            self._late.append(ticket)
