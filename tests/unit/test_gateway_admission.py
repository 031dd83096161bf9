"""What holds of the queues of a gateway process whatever happens to the requests in them.

Exchanges are driven by hand, without clients and engines: thousands of requests in seconds.
"""

import asyncio
import math
import random
from collections.abc import Callable

import pytest

from gateway.admission import Admission
from gateway.exchange import Exchange, LiveExchanges
from gateway.metrics import Metrics
from gateway.overload import OverloadWatch
from gateway.relay.accounting import Account
from gateway.upstream.base import Failure, UpstreamError
from router.admission.standing import Standing
from router.admission.tickets import PRIORITIES
from router.errors import ApiError
from router.fleet import FleetView, compile_view
from router.merge import merge
from router.overload import Measure
from router.plan import Plan, plan
from router.prompt import PromptView
from router.retry import RetryBudget
from router.spec.documents import file_documents
from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, QueueSpec, RouteSpec
from router.spec.gateway import OverloadSpec
from tests.no_client import NoClient

ANYBODY = Standing()
STOPPING = UpstreamError(Failure.BUSY, "stopping", 503)


class Desk:
    """A gateway's admission in front of a fleet: the routes `m` and `n` share the pool `p`; `n` has `q`, too."""

    def __init__(self, limit: int = 2, endpoints: int = 2, queue: QueueSpec | None = None) -> None:
        self.view = fleet(endpoints, queue)
        for endpoint in self.view.endpoints.values():
            endpoint.state.phase = "ready"
            endpoint.state.max_in_flight = limit
        self.metrics = Metrics()
        self.overload = OverloadWatch(OverloadSpec(), self.metrics)
        self.live = LiveExchanges(self.view.pools.values, RetryBudget(math.inf, 0))
        self.admission = Admission(self.live, self.metrics, self.overload)

    def ask(
        self, route: str = "m", standing: Standing = ANYBODY, *, key: int = 0, asked: float | None = None,
        size: int = 100, pinned: bool = False, needs: frozenset[str] = frozenset(), exchange: Exchange | None = None,
    ) -> "Asked":  # fmt: skip
        prompt = PromptView("chat.completions", route, True, False, needs, (), 0, key, pinned)
        one = exchange or Exchange(self.live, NoClient())
        return Asked(self, one, lambda: plan(prompt, self.view), standing, asked, size)

    @property
    def in_flight(self) -> int:
        return sum(endpoint.state.in_flight for endpoint in self.view.endpoints.values())

    def count(self, reason: str) -> float:
        return sum(n for (_, one), n in self.metrics.queue_refusals.values.items() if one == reason)


class Asked:
    """One request, as far as its exchange."""

    def __init__(
        self,
        desk: Desk,
        exchange: Exchange,
        again: Callable[[], Plan],
        standing: Standing,
        asked: float | None,
        size: int,
    ) -> None:
        self.exchange = exchange.__enter__()
        if asked is not None:
            self.exchange.asked_timeouts = {"first_byte": asked}
        self.refused: ApiError | None = None
        self.waiting: asyncio.Future[Plan] | None = None
        try:
            self.decided = again()
            self.waiting = desk.admission.enter(
                self.exchange, self.decided, again, standing, size=size, kept=size, answer=10
            )
        except ApiError as error:
            self.refused = error

    @property
    def waits(self) -> bool:
        return self.waiting is not None and not self.waiting.done()

    @property
    def going(self) -> bool:
        """It may be sent to an engine."""
        if self.waiting is None:
            return self.refused is None
        return self.waiting.done() and not self.waiting.cancelled() and self.waiting.exception() is None

    @property
    def told(self) -> str | None:
        """The code of its refusal."""
        error = self.refused
        if error is None and self.waiting is not None and self.waiting.done():
            found = self.waiting.exception()
            error = found if isinstance(found, ApiError) else None
        return error.code if error is not None else None

    def send(self) -> None:
        decided = self.waiting.result() if self.waiting is not None else self.decided
        self.exchange.begin_attempt(decided.attempts[0])

    def end(self) -> None:
        self.exchange.__exit__()


def fleet(endpoints: int, queue: QueueSpec | None = None) -> FleetView:
    pools = {
        pool: PoolSpec(
            protocol="openai",
            model="x",
            endpoints=[EndpointSpec(id=f"{pool}-{n}", http=f"http://{pool}:{n + 1}") for n in range(endpoints)],
        )
        for pool in ("p", "q")
    }
    routes = {"m": RouteSpec(pool="p", queue=queue or QueueSpec()), "n": RouteSpec(pool="p", fallback=["q"])}
    spec = FleetSpec(fleet="f", pools=pools, routes=routes)
    return compile_view(merge(file_documents(spec, content_hash="h")), FleetView())


async def test_a_request_waits_only_while_every_endpoint_is_full_and_starts_when_one_is_not() -> None:
    desk = Desk()
    first = [desk.ask(key=key) for key in range(4)]
    assert all(one.going for one in first)
    assert desk.in_flight == 4
    last = desk.ask()
    assert last.waits
    assert last.exchange.position == 1
    first[2].send()
    first[2].end()
    assert last.going
    assert desk.in_flight == 4
    for one in (*first, last):
        one.end()
    assert desk.in_flight == 0


async def test_a_route_says_how_much_may_wait_and_other_bounds_hold_for_the_next_request() -> None:
    desk = Desk(limit=1, endpoints=1, queue=QueueSpec(size=0))
    running, refused = desk.ask(), desk.ask()
    assert refused.told == "queue_full"
    desk.view = fleet(1, QueueSpec(size=2, tenant_share="100%"))
    desk.view.endpoints["p-0"].state.phase = "ready"
    desk.view.endpoints["p-0"].state.max_in_flight = 0
    waiting = [desk.ask(), desk.ask()]
    assert [one.waits for one in waiting] == [True, True]
    assert desk.ask().told == "queue_share"
    assert desk.ask(standing=Standing("other"), size=10**9).told == "queue_too_large"
    for one in (running, *waiting):
        one.end()


async def test_who_has_waited_as_long_as_the_route_lets_one_wait_is_told() -> None:
    desk = Desk(limit=1, endpoints=1, queue=QueueSpec(timeout="10ms"))
    running, waiting = desk.ask(), desk.ask()
    assert waiting.waiting is not None
    async with asyncio.timeout(5):
        await asyncio.wait([waiting.waiting])
    assert waiting.told == "queue_deadline"
    running.end()
    waiting.end()


async def test_who_was_slow_to_send_starts_while_most_slots_are_free_and_is_told_otherwise() -> None:
    desk = Desk(limit=4, endpoints=1)
    asked: list[Asked] = []
    for _ in range(5):
        exchange = Exchange(desk.live, NoClient())
        exchange.started -= 1_000_000  # seconds: longer than any deadline
        asked.append(desk.ask(exchange=exchange))
    assert [one.going for one in asked[:2]] == [True, True]
    assert asked[-1].told == "queue_deadline"
    for one in asked:
        one.end()


async def test_who_was_cancelled_before_it_came_to_the_queue_does_not_wait_in_it() -> None:
    desk = Desk(limit=1, endpoints=1)
    first = desk.ask()
    first.send()
    with Exchange(desk.live, NoClient()) as exchange:
        exchange.cancelled = UpstreamError(Failure.CANCELLED, "ended", 410)
        decided = plan(PromptView("chat.completions", "m", True, False, frozenset(), (), 0, 0), desk.view)
        with pytest.raises(UpstreamError, match="ended"):
            desk.admission.enter(exchange, decided, lambda: decided, ANYBODY, size=1, kept=1, answer=1)
    assert desk.admission.lengths() == {"m": (0, 0)}
    first.end()
    assert desk.in_flight == 0


async def test_room_is_kept_for_whoever_was_given_it() -> None:
    """Between being woken and being sent, somebody who comes first to the gateway does not come first to the engine."""
    desk = Desk(limit=1, endpoints=1)
    running, waiting = desk.ask(), desk.ask(standing=Standing("a"))
    running.end()
    late = desk.ask(standing=Standing("b"))
    assert (waiting.going, late.waits) == (True, True)
    waiting.send()
    assert desk.in_flight == 1
    waiting.end()
    assert late.going
    late.end()


async def test_routes_that_share_endpoints_take_turns() -> None:
    desk = Desk(limit=1, endpoints=1)
    desk.view.endpoints["q-0"].state.phase = "unhealthy"
    going = [desk.ask()]
    many = [desk.ask("m") for _ in range(6)]
    few = [desk.ask("n") for _ in range(2)]
    order: list[Asked] = []
    while going:
        going[0].end()
        going = [one for one in (*many, *few) if one.going and one not in order]
        assert len(going) <= 1
        order += going
    assert [one in few for one in order[:4]].count(True) == 2
    assert len(order) == 8


async def test_what_must_go_to_a_full_endpoint_holds_up_nobody_who_need_not() -> None:
    desk = Desk(limit=1)
    home = desk.ask(key=7, pinned=True)
    pinned = [desk.ask(key=7, pinned=True) for _ in range(3)]
    assert all(one.waits for one in pinned)
    other = desk.ask(key=7)
    assert other.going
    other.end()
    assert all(one.waits for one in pinned)
    home.end()
    assert [one.going for one in pinned] == [True, False, False]
    for one in pinned:
        one.end()
    assert desk.in_flight == 0


async def test_who_waits_for_endpoints_that_are_lost_is_told_at_once() -> None:
    desk = Desk(limit=1, endpoints=1)
    running = desk.ask()
    waiting = [desk.ask() for _ in range(3)]
    desk.view.endpoints["p-0"].state.phase = "unhealthy"
    desk.admission.fleet_changed()
    assert [one.told for one in waiting] == ["no_capacity"] * 3
    for one in (running, *waiting):
        one.end()
    assert desk.in_flight == 0
    assert desk.admission.lengths() == {"m": (0, 0)}


async def test_whoever_waits_is_told_when_the_deadline_passes() -> None:
    desk = Desk(limit=1, endpoints=1)
    running, waiting = desk.ask(), desk.ask(asked=0.02)
    assert waiting.waiting is not None
    with pytest.raises(ApiError) as told:
        await asyncio.wait_for(asyncio.shield(waiting.waiting), 5)
    assert (told.value.status, told.value.code) == (503, "queue_deadline")
    assert desk.count("deadline") == 1
    assert sum(desk.metrics.queue_wait.of(("m",)).counts) == 1
    for one in (running, waiting):
        one.end()


@pytest.mark.parametrize(
    ("fill", "code", "status"),
    [
        (lambda desk: [], "not_available", 503),
        (lambda desk: [desk.ask(standing=Standing("greedy")) for _ in range(512)], "queue_share", 429),
        (lambda desk: [desk.ask(standing=Standing(f"t{n}")) for n in range(1024)], "queue_full", 503),
    ],
)
async def test_who_does_not_get_in_is_told_why_and_when_to_come_back(
    fill: Callable[[Desk], list[Asked]], code: str, status: int
) -> None:
    desk = Desk(limit=1, endpoints=1)
    everybody = [desk.ask(), *fill(desk)]
    standing = Standing("greedy" if code == "queue_share" else "last", if_available=code == "not_available")
    last = desk.ask(standing=standing)
    assert last.refused is not None
    assert (last.refused.code, last.refused.status) == (code, status)
    assert last.refused.retry_after is not None and last.refused.retry_after >= 1
    assert f"Try again in {last.refused.retry_after} s." in last.refused.message
    for one in (*everybody, last):
        one.end()
    assert desk.in_flight == 0


async def test_the_newest_of_the_greediest_gives_way_when_the_queue_is_full() -> None:
    desk = Desk(limit=1, endpoints=1)
    running = desk.ask()
    crowd = [desk.ask(standing=Standing(f"t{n % 4}")) for n in range(1024)]
    assert all(one.waits for one in crowd)
    newcomer = desk.ask(standing=Standing("new"))
    assert newcomer.waits
    gone = [one for one in crowd if not one.waits]
    assert [one.told for one in gone] == ["queue_displaced"]
    for one in (running, *crowd, newcomer):
        one.end()
    assert desk.admission.lengths() == {"m": (0, 0)}


async def test_batch_is_refused_while_the_process_is_busy_and_nobody_else() -> None:
    desk = Desk()
    desk.overload._overload.taken.add(Measure.SHED_BATCH)
    batch, standard = desk.ask(standing=Standing(priority="batch")), desk.ask()
    assert (batch.told, standard.going) == ("overloaded", True)
    for one in (batch, standard):
        one.end()


async def test_without_a_limit_nobody_waits_and_nothing_is_counted() -> None:
    desk = Desk()
    for endpoint in desk.view.endpoints.values():
        endpoint.state.max_in_flight = math.inf
    asked = [desk.ask() for _ in range(1000)]
    assert all(one.going for one in asked)
    assert desk.admission.lengths() == {}
    for one in asked:
        one.end()


async def test_what_a_request_cost_follows_from_the_usage_that_its_engine_reports() -> None:
    """Two tenants with requests of the same length; one of them turns out to get ten times as long answers."""
    desk = Desk(limit=1, endpoints=1)
    running: Asked | None = desk.ask(standing=Standing("x"))
    served = {"long": 0, "short": 0}
    queued = [(name, desk.ask(standing=Standing(name))) for _ in range(200) for name in served]
    while running is not None and sum(served.values()) < 110:
        running.send()
        running.exchange.account = account = Account(shows_usage=False)
        name = next((name for name, one in queued if one is running), "x")
        account.count(25, 1000 if name == "long" else 100, 0)
        running.end()
        running = next((one for _, one in queued if one.going and one.exchange.account is None), None)
        for name, one in queued:
            if one is running:
                served[name] += 1
    for _, one in queued:
        one.end()
    assert served["short"] >= 7 * served["long"]


async def test_a_hundred_thousand_requests_with_faults_leave_nothing_behind() -> None:
    """Cancelled, given up, refused, lost and answered in any order, over a fleet that changes: no endpoint ever gets
    more than it may have, and in the end every count is zero."""
    rng = random.Random(20)
    desk = Desk(limit=3)
    endpoints = list(desk.view.endpoints.values())
    endpoints[0].state.capabilities = frozenset({"a"})
    endpoints[2].state.capabilities = frozenset({"a", "b"})
    endpoints[1].state.capabilities = endpoints[3].state.capabilities = frozenset({"a", "b", "c"})
    opened: list[Asked] = []
    most = started = given_up = 0
    for number in range(100_000):
        standing = Standing(
            f"t{int(rng.expovariate(0.3))}", rng.choice((0.5, 1.0, 2.0)), rng.choice(PRIORITIES), rng.random() < 0.05
        )
        needs = frozenset(rng.sample(("a", "b", "c"), rng.choice((0, 0, 0, 1, 2))))
        asked = rng.choice((None, None, None, 0.001, 5.0))
        one = desk.ask(
            rng.choice("mmn"), standing, key=rng.randrange(50), asked=asked, size=rng.choice((10, 1000, 400_000)),
            pinned=rng.random() < 0.1, needs=needs,
        )  # fmt: skip
        opened.append(one)
        while len(opened) > 60 or (opened and rng.random() < 0.4):
            picked = rng.randrange(len(opened))
            if opened[picked].waits and rng.random() < 0.85:
                continue
            one = opened.pop(picked)
            if one.waits:
                assert one.waiting is not None
                if rng.random() < 0.5:
                    one.waiting.cancel()
                elif one.exchange.call is not None:
                    one.exchange.call.abort(STOPPING)
                given_up += 1
            elif one.going:
                one.send()
                started += 1
                if rng.random() < 0.5:
                    one.exchange.account = account = Account(shows_usage=False)
                    account.count(rng.randrange(100), rng.randrange(100), rng.randrange(100))
            one.end()
        most = max(most, desk.in_flight)
        assert all(endpoint.state.in_flight <= 3 for endpoint in endpoints)
        if rng.random() < 0.002:
            endpoint = rng.choice(endpoints)
            endpoint.state.phase = "unhealthy" if endpoint.state.phase == "ready" else "ready"
            desk.admission.fleet_changed()
        if number % 500 == 0:
            await asyncio.sleep(0.002)
    lines = list(desk.admission._lines.values())
    rng.shuffle(opened)
    for one in opened:
        one.end()
    assert most > 6
    assert (desk.in_flight, len(desk.live)) == (0, 0)
    assert started > 20_000 and given_up > 5_000
    assert len(lines) > 4
    assert [(line.queue.in_flight, line.queue.waiting, line.queue.waiting_bytes) for line in lines] == [
        (0, 0, 0)
    ] * len(lines)
    assert not any(line.waiting for line in lines)
    assert not desk.admission._waiting
    assert all(desk.count(reason) for reason in ("if_available", "deadline"))
