"""What the queue of a route promises: order, limits, deadlines, and that nothing is lost or left behind."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from router.admission.flows import MAX_IDLE
from router.admission.heap import Heap
from router.admission.queue import MAX_PASSED_OVER, RETRY_AFTER_MAX_S, Bounds, RouteQueue
from router.admission.tickets import PRIORITIES, Arrival, Refusal, State, Ticket
from router.spec.fleet import Priority

ROOMY = Bounds()


def arrival(tenant: str = "acme", priority: Priority = "standard", **more: float) -> Arrival:
    return Arrival(tenant, 100, 50, priority, **more)  # type: ignore[arg-type]


def offered(queue: RouteQueue, what: Arrival, free: int = 0, now: float = 0.0) -> Ticket:
    ticket = queue.offer(what, free, now, 0.0)
    assert isinstance(ticket, Ticket)
    return ticket


def refused(queue: RouteQueue, what: Arrival, free: int = 0, now: float = 0.0) -> Refusal:
    refusal = queue.offer(what, free, now, 0.0)
    assert isinstance(refusal, Refusal)
    return refusal


def busy(slots: int = 4, bounds: Bounds = ROOMY, held: float = 1.0) -> tuple[RouteQueue, list[Ticket]]:
    """A queue whose slots are all in use, by requests of a tenant `first`; they are known to take `held` seconds."""
    queue = RouteQueue(bounds)
    queue.end(offered(queue, arrival("first"), slots, -held), 0.0)
    return queue, [offered(queue, arrival("first"), slots - number) for number in range(slots)]


def test_a_request_starts_at_once_while_a_slot_is_free_and_waits_when_none_is() -> None:
    queue = RouteQueue(Bounds())
    assert offered(queue, arrival(), free=1).state is State.RUNNING
    waiting = offered(queue, arrival())
    assert (waiting.state, waiting.position) == (State.WAITING, 1)
    assert queue.take(0, 0.0) is None
    assert queue.take(1, 0.0) is waiting
    assert (queue.waiting, queue.in_flight) == (0, 2)


def test_prefer_if_available_is_refused_instead_of_waiting() -> None:
    queue, _ = busy()
    assert refused(queue, Arrival("acme", 1, 1, if_available=True)).reason == "if_available"
    assert offered(queue, Arrival("acme", 1, 1, if_available=True), free=4).state is State.RUNNING


def test_a_higher_class_goes_first_however_long_the_lower_has_waited() -> None:
    queue, _ = busy()
    batch, standard, interactive = (offered(queue, arrival("acme", priority)) for priority in reversed(PRIORITIES))
    assert [queue.take(1, 9.0) for _ in range(3)] == [interactive, standard, batch]


def test_a_class_that_was_passed_over_often_enough_gets_one_turn() -> None:
    queue, _ = busy()
    batch = [offered(queue, arrival("night", "batch")) for _ in range(2)]
    for _ in range(3 * MAX_PASSED_OVER):
        offered(queue, arrival("day", "interactive"))
    taken = [queue.take(1, 0.0) for _ in range(2 * MAX_PASSED_OVER + 2)]
    assert [taken.index(ticket) for ticket in batch] == [MAX_PASSED_OVER, 2 * MAX_PASSED_OVER + 1]


def test_of_tenants_that_have_had_alike_each_gets_its_turn_but_for_a_round_of_credit() -> None:
    queue, _ = busy(slots=4)
    for tenant in ("a", "b", "c"):
        for _ in range(12):
            offered(queue, arrival(tenant))
    order = [ticket.arrival.tenant for _ in range(24) if (ticket := queue.take(4, 0.0)) is not None]
    for length in range(24):
        counts = [order[:length].count(tenant) for tenant in ("a", "b", "c")]
        assert max(counts) - min(counts) <= 4 + 1
    assert sorted(order[-3:]) == ["a", "b", "c"]


def test_what_an_answer_cost_beyond_its_estimate_is_charged_when_it_ends() -> None:
    queue = RouteQueue(Bounds())
    long, short = (offered(queue, arrival(tenant), free=2) for tenant in ("long", "short"))
    waiting = {tenant: [offered(queue, arrival(tenant)) for _ in range(3)] for tenant in ("long", "short")}
    queue.end(long, 1.0, (100, 5000))
    queue.end(short, 1.0, (100, 50))
    assert [queue.take(2, 1.0) for _ in range(3)] == waiting["short"]


def test_a_request_that_cannot_start_in_time_is_refused_when_it_comes() -> None:
    queue, _ = busy(slots=4, held=2.0)  # a slot comes free every half second
    for number in range(6):
        offered(queue, arrival(f"tenant-{number}"))
    refusal = refused(queue, Arrival("late", 1, 1, deadline=3.0))
    assert refusal.reason == "deadline"
    assert refusal.retry_after == 4
    assert offered(queue, Arrival("patient", 1, 1, deadline=4.0)).position == 7


def test_nobody_is_refused_for_a_wait_that_is_not_known_yet() -> None:
    queue = RouteQueue(Bounds())
    offered(queue, arrival(), free=1)
    assert offered(queue, Arrival("acme", 1, 1, deadline=0.1)).state is State.WAITING


def test_a_request_whose_deadline_has_passed_is_told_so_once_and_never_started() -> None:
    queue, _ = busy(held=0.01)
    late, other = offered(queue, Arrival("acme", 1, 1, deadline=1.0)), offered(queue, arrival())
    assert queue.overdue(0.9) == []
    assert queue.take(1, 1.0) is other
    assert queue.overdue(1.0) == [late]
    assert late.state is State.OVER
    assert queue.overdue(2.0) == []
    assert refused(queue, Arrival("acme", 1, 1, deadline=1.0), free=1, now=2.0).reason == "deadline"


def test_one_tenant_has_no_more_than_its_part_of_the_queue() -> None:
    queue, _ = busy(bounds=Bounds(entries=10, bytes=1000, tenant_share=0.5))
    for _ in range(5):
        offered(queue, arrival("many"))
    assert refused(queue, arrival("many")).reason == "tenant_share"
    offered(queue, arrival("large", bytes=400))
    assert refused(queue, arrival("large", bytes=101)).reason == "tenant_share"
    assert refused(queue, arrival("huge", bytes=501)).reason == "too_large"


def test_in_a_full_queue_the_newest_request_of_whoever_fills_most_of_it_gives_way() -> None:
    queue, _ = busy(bounds=Bounds(entries=4))
    mine = [offered(queue, arrival("greedy")) for _ in range(2)]
    others = [offered(queue, arrival("also")) for _ in range(2)]
    small = offered(queue, arrival("small"))
    assert small.displaced in ((mine[1],), (others[1],))
    assert small.displaced[0].state is State.OVER
    smaller = offered(queue, arrival("smaller"))
    assert {*small.displaced, *smaller.displaced} == {mine[1], others[1]}
    assert refused(queue, arrival("one too many")).reason == "queue_full"
    assert queue.waiting == 4


def test_in_a_full_queue_a_lower_class_gives_way_to_a_higher() -> None:
    queue, _ = busy(bounds=Bounds(entries=2))
    batch = [offered(queue, arrival(tenant, "batch")) for tenant in ("a", "b")]
    interactive = [offered(queue, arrival(tenant, "interactive")) for tenant in ("c", "d")]
    assert {gone for ticket in interactive for gone in ticket.displaced} == set(batch)
    assert refused(queue, arrival("e", "batch")).reason == "queue_full"


def test_nobody_gives_way_to_a_request_that_is_refused_all_the_same() -> None:
    queue, _ = busy(bounds=Bounds(entries=10, bytes=100))
    heavy = [offered(queue, arrival("heavy", bytes=9)) for _ in range(5)]
    light = [offered(queue, arrival("light", bytes=size)) for size in (20, 10)]
    offered(queue, arrival("lighter", bytes=25))
    assert refused(queue, arrival("new", bytes=34)).reason == "queue_full"
    assert [ticket.state for ticket in (*heavy, *light)] == [State.WAITING] * 7
    assert list(heavy[0].flow.waiting.values()) == heavy


def test_retry_after_grows_with_the_queue_and_differs_between_those_refused_together() -> None:
    queue, _ = busy(slots=2, held=4.0)
    waits = []
    for _ in range(10):
        waits.append(queue.retry_after(0.0))
        offered(queue, arrival())
    assert waits == sorted(waits)
    assert waits[0] == 2
    assert queue.retry_after(0.0) == 22
    assert queue.retry_after(0.99) == 33
    for _ in range(100):
        offered(queue, arrival())
    assert queue.retry_after(0.5) == RETRY_AFTER_MAX_S


def test_counters_of_tenants_that_are_gone_are_forgotten() -> None:
    queue = RouteQueue(Bounds())
    now = 0.0
    for number in range(5 * MAX_IDLE):
        now += 0.01
        queue.end(offered(queue, arrival(f"tenant-{number}"), 8, now), now + 0.001)
        refused(queue, Arrival(f"nobody-{number}", 1, 1, if_available=True), now=now)
        assert queue.flows <= 2 * MAX_IDLE + 2
    for _ in range(3):
        now += 60.0
        queue.end(offered(queue, arrival("last"), 8, now), now + 0.001)
    assert queue.flows <= MAX_IDLE + 1


class Everything(RuleBasedStateMachine):
    """Requests come, start, end, give up and pass their deadlines in any order, on an engine of two slots."""

    SLOTS = 2

    def __init__(self) -> None:
        super().__init__()
        self.queue = RouteQueue(Bounds(entries=8, bytes=100, tenant_share=0.5))
        self.now = 100.0
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []

    def free(self) -> int:
        return self.SLOTS - len(self.running)

    def pump(self) -> None:
        while (ticket := self.queue.take(self.free(), self.now)) is not None:
            assert ticket.arrival.deadline > self.now
            assert all(
                other.flow is not ticket.flow or other.number > ticket.number
                for other in self.waiting
                if other is not ticket and other.state is State.WAITING
            )
            self.waiting.remove(ticket)
            self.running.append(ticket)
        for ticket in self.queue.overdue(self.now):
            assert ticket.arrival.deadline <= self.now
            self.waiting.remove(ticket)

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from(PRIORITIES),
        size=st.integers(0, 40),
        patience=st.sampled_from([0.0, 0.5, math.inf, math.inf, math.inf]),
        if_available=st.sampled_from([False, False, False, True]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
    )
    def comes(
        self, tenant: str, priority: Priority, size: int, patience: float, if_available: bool, weight: float
    ) -> None:
        what = Arrival(tenant, 10, 10, priority, weight, size, self.now + patience, if_available)
        got = self.queue.offer(what, self.free(), self.now, 0.5)
        if isinstance(got, Ticket):
            assert got.state is State.RUNNING or not if_available
            (self.running if got.state is State.RUNNING else self.waiting).append(got)
            for gone in got.displaced:
                assert gone.rank >= got.rank
                self.waiting.remove(gone)
        else:
            assert 1 <= got.retry_after <= RETRY_AFTER_MAX_S
        self.pump()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.sampled_from([None, (0, 0), (10, 10), (10, 500)]))
    def ends(self, data: st.DataObject, tokens: tuple[float, float] | None) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        self.queue.end(ticket, self.now, tokens)
        self.queue.end(ticket, self.now, tokens)
        self.pump()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def gives_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ticket)
        self.queue.end(ticket, self.now)
        self.queue.end(ticket, self.now)
        self.pump()

    @rule(seconds=st.sampled_from([0.01, 0.4, 2.0, 50.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.pump()

    @invariant()
    def counts_are_true_and_within_bounds(self) -> None:
        queue = self.queue
        assert queue.waiting == len(self.waiting) <= queue.bounds.entries
        assert queue.waiting_bytes == sum(ticket.arrival.bytes for ticket in self.waiting) <= queue.bounds.bytes
        assert queue.in_flight == len(self.running) <= self.SLOTS
        assert all(ticket.state is State.WAITING for ticket in self.waiting)

    @invariant()
    def what_flows_add_up_to_is_kept_true(self) -> None:
        for cls in self.queue._classes:
            counting = [flow for flow in cls.flows.values() if flow.counts]
            assert abs(cls.weight - sum(flow.weight for flow in counting)) < 1e-9
            assert cls.absent.in_flight == sum(flow.usage.in_flight for flow in counting if not flow.waiting)
            assert cls.waiting == sum(len(flow.waiting) for flow in counting)
            assert len(cls.ready) + len(cls.held) == sum(bool(flow.waiting) for flow in counting)

    @invariant()
    def slots_stay_free_only_as_head_room(self) -> None:
        if self.waiting:
            assert self.free() <= self.SLOTS // 2

    def teardown(self) -> None:
        for ticket in (*self.waiting, *self.running):
            self.queue.end(ticket, self.now)
        queue = self.queue
        assert (queue.waiting, queue.waiting_bytes, queue.in_flight) == (0, 0, 0)
        assert queue._deadlines.first() is None
        queue._enter()
        for cls in queue._classes:
            cls.forget(self.now + 1e6, 1.0)
            cls.absent.advance(self.now + 1e6, 1.0)
            assert (cls.waiting, cls.absent.in_flight) == (0, 0)
            assert abs(cls.weight) + abs(cls.absent.mean) < 1e-9
            assert not len(cls.ready) + len(cls.held) + len(cls.heaviest)


def test_nothing_is_lost_served_twice_or_left_behind_whatever_happens() -> None:
    run_state_machine_as_test(Everything, settings=settings(max_examples=100, stateful_step_count=50, deadline=None))


def test_work_is_conserved_when_everybody_has_something_waiting() -> None:
    queue, running = busy(slots=4)
    now = 0.0
    for _ in range(20):
        for tenant in ("a", "b", "c"):
            offered(queue, arrival(tenant), now=now)
    for ticket in running:
        queue.end(ticket, 1.0)
    running = []
    for step in range(12):
        now = 20.0 + step
        while (taken := queue.take(4 - queue.in_flight, now)) is not None:
            running.append(taken)
        assert queue.in_flight == 4
        for ticket in running[-4:]:
            queue.end(ticket, now + 1.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-5, 5), st.booleans()), max_size=200))
def test_a_heap_gives_the_smallest_and_forgets_what_was_taken_out(script: list[tuple[int, int, bool]]) -> None:
    heap: Heap[int] = Heap()
    model: dict[int, tuple[int, int]] = {}
    for turn, (item, key, out) in enumerate(script):
        if out:
            heap.discard(item)
            model.pop(item, None)
        else:
            heap.put(item, key)
            model[item] = (key, turn)
        first = heap.first()
        assert (first[1] if first else None) == min(model, key=lambda item: model[item], default=None)
        assert len(heap) == len(model)
        assert len(heap._heap) <= 2 * len(model) + 33
