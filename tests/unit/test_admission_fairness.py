"""What the queue of a route promises a tenant that shares an engine with a greedy one, by simulation.

A discrete-event simulation on a clock of its own: an engine with a number of slots and a given service time, tenants
whose requests arrive at random (Poisson, from a fixed seed), and one that always has requests waiting. Time to first
token is the wait in the queue plus a prefill; goodput counts the requests that were answered.
"""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from router.admission.queue import Bounds, RouteQueue
from router.admission.tickets import Arrival, Refusal, State, Ticket
from router.spec.fleet import Priority

SLOTS = 8
SERVICE_S = 1.0
NINE = [f"tenant-{number}" for number in range(9)]
GREEDY = "greedy"


@dataclass
class Seen:
    """What happened, by tenant."""

    served: Counter[str] = field(default_factory=Counter)
    waits: dict[str, list[float]] = field(default_factory=dict)
    slot_seconds: float = 0.0

    def wait_p99(self, tenants: list[str]) -> float:
        waits = sorted(wait for tenant in tenants for wait in self.waits.get(tenant, []))
        return waits[int(0.99 * len(waits))]


@dataclass
class Source:
    """A tenant's requests: `rate` a second, at random."""

    tenant: str
    rate: float
    prompt_tokens: int = 100
    completion_tokens: int = 100
    priority: Priority = "standard"
    weight: float = 1.0
    service_s: float = SERVICE_S
    since: float = 0.0
    until: float = float("inf")


def simulate(
    sources: list[Source], seconds: float, *, slots: int = SLOTS, warm_up: float = 20.0, seed: int = 7
) -> Seen:
    """Runs `sources` against one engine; what happens after `warm_up` counts."""
    rng = random.Random(seed)
    queue = RouteQueue(Bounds())
    seen = Seen()
    events: list[tuple[float, int, object]] = []
    numbers = iter(range(10**9))
    born: dict[Ticket, float] = {}
    for source in sources:
        own = random.Random(f"{seed} {source.tenant}")
        at = source.since + own.expovariate(source.rate)
        while at < min(seconds, source.until):
            events.append((at, next(numbers), source))
            at += own.expovariate(source.rate)
    heapq.heapify(events)
    services = {source.tenant: source for source in sources}

    def started(ticket: Ticket, now: float) -> None:
        tenant = ticket.arrival.tenant
        if born[ticket] >= warm_up:
            seen.waits.setdefault(tenant, []).append(now - born[ticket])
        heapq.heappush(events, (now + services[tenant].service_s, next(numbers), ticket))

    while events and events[0][0] < seconds:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Ticket):
            queue.end(event, now, (event.arrival.prompt_tokens, event.arrival.completion_tokens))
            seen.slot_seconds += now - event.since
            del born[event]
            seen.served[event.arrival.tenant] += now >= warm_up
        elif isinstance(event, Source):
            arrival = Arrival(
                event.tenant, event.prompt_tokens, event.completion_tokens, event.priority, event.weight, bytes=1000
            )
            ticket = queue.offer(arrival, slots - queue.in_flight, now, rng.random())
            if isinstance(ticket, Refusal):
                continue
            born[ticket] = now
            for gone in ticket.displaced:
                del born[gone]
            if ticket.state is State.RUNNING:
                started(ticket, now)
        while (taken := queue.take(slots - queue.in_flight, now)) is not None:
            started(taken, now)
        assert queue.in_flight <= slots
    return seen


def nine_at(load: float, slots: int = SLOTS) -> list[Source]:
    """Nine tenants who use `load` of the capacity together."""
    return [Source(tenant, load * slots / SERVICE_S / 9) for tenant in NINE]


def greedy(slots: int = SLOTS) -> Source:
    """One at fifty times its share, a tenth of the capacity."""
    return Source(GREEDY, 50 * 0.1 * slots / SERVICE_S)


@pytest.fixture(scope="module")
def alone() -> Seen:
    return simulate(nine_at(0.6), 2000)


@pytest.fixture(scope="module")
def beside() -> Seen:
    return simulate([*nine_at(0.6), greedy()], 2000)


def test_beside_a_tenant_at_fifty_times_its_share_the_others_keep_their_goodput(alone: Seen, beside: Seen) -> None:
    for tenant in NINE:
        assert beside.served[tenant] >= 0.95 * alone.served[tenant]


@pytest.mark.parametrize("prefill_s", [SERVICE_S, 0.1 * SERVICE_S])
def test_beside_a_tenant_at_fifty_times_its_share_the_others_keep_their_time_to_first_token(
    alone: Seen, beside: Seen, prefill_s: float
) -> None:
    assert prefill_s + beside.wait_p99(NINE) <= 1.2 * (prefill_s + alone.wait_p99(NINE))


def test_a_greedy_tenant_still_gets_more_than_its_fair_share_if_the_others_leave_it(beside: Seen) -> None:
    assert beside.served[GREEDY] > 0.15 * 1980 * SLOTS / SERVICE_S


def test_head_room_costs_nothing_when_nobody_else_is_there() -> None:
    seen = simulate([greedy()], 100)
    assert seen.served[GREEDY] >= 0.999 * 79 * SLOTS / SERVICE_S


def test_the_slots_are_all_in_use_again_soon_after_the_others_have_gone() -> None:
    gone = [Source(source.tenant, source.rate, until=50.0) for source in nine_at(0.6)]
    seen = simulate([*gone, greedy()], 150, warm_up=62.0)
    assert seen.served[GREEDY] >= 0.99 * 87 * SLOTS / SERVICE_S


def test_tenants_who_always_want_more_share_tokens_by_weight_however_they_cut_them() -> None:
    short = Source("short", 20.0, prompt_tokens=100, completion_tokens=50, service_s=0.5)
    long = Source("long", 20.0, prompt_tokens=1000, completion_tokens=500, service_s=5.0)
    double = Source("double", 20.0, prompt_tokens=100, completion_tokens=50, service_s=0.5, weight=2.0)
    seen = simulate([short, long, double], 500, warm_up=50.0)
    tokens = {
        source.tenant: seen.served[source.tenant] * (source.prompt_tokens + 2 * source.completion_tokens)
        for source in (short, long, double)
    }
    assert tokens["long"] == pytest.approx(tokens["short"], rel=0.05)
    assert tokens["double"] == pytest.approx(2 * tokens["short"], rel=0.05)
    assert seen.slot_seconds >= 0.99 * 490 * SLOTS


def test_a_tenant_that_comes_back_is_served_at_once_but_has_saved_up_no_more_than_a_round() -> None:
    steady, back = Source("steady", 20.0), Source("back", 20.0, since=100.0)
    seen = simulate([steady, back], 300, warm_up=100.0)
    assert min(seen.waits["back"]) < SERVICE_S
    assert abs(seen.served["back"] - seen.served["steady"]) <= 2 * SLOTS


def test_batch_work_goes_on_behind_a_busy_interactive_class_at_a_small_share() -> None:
    busy = Source("busy", 50.0, priority="interactive")
    batch = Source("batch", 50.0, priority="batch")
    seen = simulate([busy, batch], 500)
    share = seen.served["batch"] / (seen.served["batch"] + seen.served["busy"])
    assert 0.03 <= share <= 0.06
