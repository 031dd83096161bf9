"""Who is served next in one priority class, and who has had more than its share.

A *flow* is what one tenant asks of one class. Each has a virtual token counter (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024): the tokens it was served, output tokens counting twice, divided by its weight. The
waiting flow with the smallest counter is served next, so flows that always have something waiting get tokens in
proportion to their weights, however many requests each of them sends and however long they are. The length of an answer
is not known when a request starts, so it is charged an estimate, and what that missed by when it ends.

A flow that was away must neither be punished for what it used when nobody else wanted it, nor save up its absence and
then shut everybody out. The paper lifts the counter of a flow that begins to wait to the least of those waiting; here
it is lifted to the *virtual time*, the counter of the flow served latest (start-time fair queueing, Goyal, Vin and
Cheng 1996), less a credit of one round, an average request for each slot. The virtual time is known without looking at
all flows, and the credit lets a flow that uses less than its share send a few requests at once without each waiting for
a turn of a greedy one. Flows that are behind the virtual time are served in the order in which their requests came,
which is what keeps their longest waits short.

Order alone does not protect them. A request cannot be taken back once an engine has it, so a flow that keeps every slot
busy makes each of the others' requests wait for one to end, however far in front it is. Therefore *head-room*, as
telephone networks reserve trunks: of the slots, 1.25 √R are kept free of flows whose share of the slots in use is above
their fair one, with R the slots that the flows which have nothing waiting use on average (square-root staffing: what R
fluctuates by). It costs some throughput of whoever is over its share, and only while there are others: if all flows
have something waiting, or all but one are quiet, every slot is used. With eight slots, requests of equal length, and
nine flows that use 60 % of the slots beside one that wants five times as many as there are, the p99 of the nine's waits
grows by an eighth, where it doubles without head-room. The more the lengths differ, the less it protects.

What a flow uses is an average over 16 service times: long enough that a well-behaved flow's ordinary bursts do not make
it look greedy, since to hold those back costs more latency than head-room saves.

Nothing here grows with the number of tenants ever seen. A flow that is gone for 8 service times no longer counts; its
counter is kept as long as it says anything (it is ahead of what a new flow would get), and `MAX_IDLE` at most.
"""

import math
from collections import OrderedDict

from router.admission.heap import Heap
from router.admission.tickets import Flow, Usage

MAX_IDLE = 1024
"""Flows with nothing waiting and nothing in flight whose counters a class remembers."""
USAGE_SERVICE_TIMES = 16
"""What a flow uses is averaged over this many service times."""
GONE_SERVICE_TIMES = 8
"""A flow counts for this many service times after its last request has ended."""
OVER_SHARE = 1.25
"""A flow that uses more than this many times its fair share is kept out of the head-room."""
HEAD_ROOM = 1.25
"""Head-room in square roots of the slots that it is kept for."""
_NEWEST_COST = 1 / 32
"""Weight of the newest request in the average cost."""


class PriorityClass:
    """The flows of one class."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}
        self.ready: Heap[Flow] = Heap()
        """Flows with something waiting, in the order in which they are served."""
        self.held: Heap[Flow] = Heap()
        """Those of them that were found to be over their share when it mattered."""
        self.heaviest: Heap[Flow] = Heap()
        """Flows with something waiting, those that fill most of the queue first."""
        self.waiting = 0
        """Requests."""
        self.passed_over = 0
        """Requests of higher classes taken since one of this class was, while some were waiting here."""
        self.weight = 0.0
        """Of all flows that count."""
        self.absent = Usage()
        """Of all flows that count and have nothing waiting."""
        self.virtual_time = 0.0
        self.credit = 0.0
        self._cost = 0.0
        self._idle: Heap[Flow] = Heap()
        self._away: OrderedDict[Flow, None] = OrderedDict()
        """Flows that count though they have nothing waiting or in flight, longest away first."""

    def flow(self, tenant: str, weight: float, now: float, span: float) -> Flow:
        """The flow of `tenant`, with its counter lifted if nothing of it is waiting; it counts from now on."""
        flow = self.flows.get(tenant)
        least = self.virtual_time - self.credit
        if flow is not None and flow.usage.in_flight and flow.weight == weight:  # it counts and is not away
            if not flow.waiting and flow.counter < least:
                flow.counter = least
            return flow
        if flow is None:
            flow = self.flows[tenant] = Flow(tenant, weight, least)
        elif not flow.waiting:
            flow.counter = max(flow.counter, least)
        self._idle.discard(flow)
        self._away.pop(flow, None)
        if flow.counts:
            self.weight += weight - flow.weight
        else:
            flow.counts = True
            flow.usage = Usage()
            flow.usage.advance(now, span)
            self.weight += weight
        flow.weight = weight
        return flow

    def leave_if_quiet(self, flow: Flow, now: float, span: float) -> None:
        """To be called when something of `flow` has ended: it may be the last."""
        if flow.counts and not flow.waiting and not flow.usage.in_flight:
            flow.away_since = now
            self._away[flow] = None
            self.forget(now, span)

    def forget(self, now: float, span: float) -> None:
        """Let go of what nobody will miss."""
        gone = now - span * (GONE_SERVICE_TIMES / USAGE_SERVICE_TIMES)
        while self._away:
            flow = next(iter(self._away))
            if flow.away_since > gone and len(self._away) <= MAX_IDLE:
                break
            del self._away[flow]
            flow.usage.advance(now, span)
            self.absent.advance(now, span)
            self.absent.mean = max(0.0, self.absent.mean - flow.usage.mean)
            flow.counts = False
            self.weight -= flow.weight
            self._idle.put(flow, flow.counter)
        least = self.virtual_time - self.credit
        while (first := self._idle.first()) and (first[0][0] <= least or len(self._idle) > MAX_IDLE):
            self._idle.discard(first[1])
            del self.flows[first[1].tenant]

    def begin_waiting(self, flow: Flow, now: float, span: float) -> None:
        """The first request of `flow` is going to wait."""
        self._move(flow, -1, now, span)

    def end_waiting(self, flow: Flow, now: float, span: float) -> None:
        """The last request of `flow` waits no longer."""
        self._move(flow, 1, now, span)
        for heap in (self.ready, self.held, self.heaviest):
            heap.discard(flow)

    def _move(self, flow: Flow, sign: int, now: float, span: float) -> None:
        flow.usage.advance(now, span)
        self.absent.advance(now, span)
        self.absent.in_flight += sign * flow.usage.in_flight
        self.absent.mean = max(0.0, self.absent.mean + sign * flow.usage.mean)

    def line_up(self, flow: Flow, *, anew: bool) -> None:
        """Put a flow with something waiting where it belongs; `anew` if its first request has become that just now."""
        if anew:
            flow.joined = self.virtual_time
            self.held.discard(flow)
        heap = self.held if flow in self.held else self.ready
        heap.put(flow, max(flow.counter, flow.joined), next(iter(flow.waiting)))

    def start(self, flow: Flow, cost: float, slots: int, now: float, span: float) -> None:
        """A request of `flow` starts, in one of `slots`, that will cost `cost` tokens, by estimate."""
        flow.usage.occupy(1, now, span)
        if not flow.waiting:
            self.absent.occupy(1, now, span)
        if flow.counter > self.virtual_time:
            self.virtual_time = flow.counter
        cost /= flow.weight
        flow.counter += cost
        self._cost += (cost - self._cost) * _NEWEST_COST if self._cost else cost
        self.credit = self._cost * slots

    def finish(self, flow: Flow, cost: float, now: float, span: float) -> None:
        """A request of `flow` ends that has cost `cost` tokens more (or fewer) than it was charged."""
        flow.usage.occupy(-1, now, span)
        flow.counter += cost / flow.weight
        if flow.waiting:
            self.line_up(flow, anew=False)
            return
        self.absent.occupy(-1, now, span)
        if not flow.usage.in_flight:
            self.leave_if_quiet(flow, now, span)


def head_room(expected: float, slots: int) -> int:
    """How many of `slots` to keep free for flows with nothing waiting that use `expected` of them on average.

    Never more than half, so that nobody is shut out.
    """
    return min(round(HEAD_ROOM * math.sqrt(expected)), slots // 2)
