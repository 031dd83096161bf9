"""Limits on the request path under faults: nothing stays reserved, nothing is made up, nobody waits for ever.

The store is the model of its script (`tests.lease_store`), with time standing still, so that the books can be checked
to the unit; what a real one does when it dies is in the contract tests.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from redis.exceptions import RedisError

from gateway import limits as gateway_limits
from gateway.exchange import Exchange, LiveExchanges
from gateway.limits import Limiter
from gateway.metrics import CLIENT_GONE, Metrics
from gateway.relay.accounting import Account
from router.admission.limits import KINDS, Ask, Grant, Kind, Limits, TenantLimits
from router.errors import ApiError
from router.fleet import FleetView, Route
from router.prompt import read_fields, read_prompt
from router.retry import RetryBudget
from router.state.limits import LimitStore
from tests.lease_store import LeaseStore
from tests.no_client import NoClient

PROMPT = read_prompt("chat.completions", read_fields(b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'))
MANY = 10**9
ROUTE = Route("m", (), ())


class FaultyStore(LimitStore):
    """The model as a store that fails as its `dice` fall: before or after it has done what was asked, or in part."""

    def __init__(self, dice: random.Random, failing: float) -> None:
        self.address = "model"
        self.hashes: dict[str, LeaseStore] = {}
        self.dice = dice
        self.failing = failing
        self.down = False
        self.takes = 1
        """Turns of the event loop."""
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.asks: Counter[str] = Counter()

    async def present(self) -> int:
        await asyncio.sleep(0)
        if self.down or self._falls():
            raise RedisError("no")
        return 1

    async def grant(self, asks: Sequence[tuple[str, Ask]]) -> list[Grant | None]:
        await self.hangs.wait()
        for _ in range(self.takes):
            await asyncio.sleep(0)
        if self.down or self._falls():
            raise RedisError("before")
        found: list[Grant | None] = []
        for name, ask in asks:
            self.asks[name] += 1
            store = self.hashes.setdefault(name, LeaseStore())
            found.append(None if self._falls() else store.grant("gw", ask, 0.0))
        if self._falls():
            raise RedisError("after")
        return found

    async def close(self) -> None: ...

    def describe(self, error: BaseException) -> str:
        return f"The model fails: {error}."

    def level(self, name: str, kind: Kind, limit: float) -> float:
        return self.hashes[name].levels.get(kind, limit) if name in self.hashes else limit

    def _falls(self) -> bool:
        return self.dice.random() < self.failing


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """A limiter with its store, and the exchanges that use it."""

    def __init__(self, limits: TenantLimits, failing: float = 0.0, *, redis: bool = True, seed: int = 7) -> None:
        self.dice = random.Random(seed)
        self.clock = Clock()
        self.metrics = Metrics()
        self.store = FaultyStore(self.dice, failing)
        fleet = FleetView(tenants={"t": FleetView(tenant="t", limits=limits)})
        self.limiter = Limiter(self.store if redis else None, self.metrics, lambda: fleet, self.clock)
        self.live = LiveExchanges(lambda: (), RetryBudget(0.1, 3))
        self.limits = limits
        self.used: Counter[tuple[str, Kind]] = Counter()

    async def request(self, status: int = 200, usage: tuple[int, int] = (9, 40), route: str = "m") -> str:
        """One request; how it went: `admitted`, or the code of its refusal."""
        with Exchange(self.live, NoClient()) as exchange:
            exchange.route = route
            try:
                await self.limiter.reserve(exchange, self.limits, PROMPT, Route(route, (), ()))
            except ApiError as error:
                exchange.status = error.status
                return str(error.code)
            await asyncio.sleep(0)
            exchange.attempts = 1
            exchange.status = status
            exchange.account = Account(shows_usage=False)
            exchange.account.count(*usage, 0)
        if 200 <= status < 400 or status == CLIENT_GONE:
            for name in ("t", f"t:{route}"):
                for kind, amount in zip(KINDS, (1, *usage), strict=True):
                    self.used[name, kind] += amount
        return "admitted"

    def open(self) -> int:
        return sum(meter.open for meter in self.limiter._meters.values())


@contextlib.asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    task = asyncio.create_task(world.limiter.run())
    try:
        yield world
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_forgotten(world: World) -> None:
    """Let time pass until no meter is left: each has given back what it held."""
    async with asyncio.timeout(20):
        while len(world.limiter):
            world.clock.now += 2.0
            await asyncio.sleep(0.002)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def frequent_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_limits, "SWEEP_S", 0.001)


@pytest.mark.parametrize(("failing", "requests"), [(0.0, 20_000), (0.005, 100_000)])
async def test_nothing_stays_reserved_however_requests_end(failing: float, requests: int) -> None:
    every = Limits(requests=MANY, prompt_tokens=MANY, completion_tokens=MANY, streams=150)
    world = World(TenantLimits("t", every, {"m": every, "n": every}), failing)
    dice, outcomes = world.dice, Counter[str]()

    async def client() -> None:
        for _ in range(requests // 200):
            world.clock.now += dice.random() / 1000
            route = dice.choice(("m", "n"))
            status = dice.choice((200, 200, 200, 400, 502, 0, CLIENT_GONE))
            usage = (dice.randrange(1, 50), dice.randrange(2000))
            if dice.random() < 0.1:  # it leaves while it waits, if it has to, or while it is answered
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        await world.request(0, usage, route)
                outcomes["left"] += 1
            else:
                outcomes[await world.request(status, usage, route)] += 1
            if dice.random() < 0.1:
                await asyncio.sleep(0)

    async with running(world):
        await asyncio.gather(*(client() for _ in range(200)))
        assert sum(outcomes.values()) == requests
        assert outcomes["admitted"] > requests / 5 and outcomes["left"] > requests / 20
        assert len(world.live) == world.open() == 0
        assert all(meter.streams is None or not meter.streams.open for meter in world.limiter._meters.values())
        world.store.failing = 0.0
        await until_forgotten(world)
    assert not any(store.permits for store in world.store.hashes.values())
    for name in ("t", "t:m", "t:n"):
        for kind in KINDS:
            left = world.store.level(name, kind, MANY)
            used = sum(world.used[one, kind] for one in ("t:m", "t:n")) if name == "t" else world.used[name, kind]
            if failing:
                assert left <= MANY - used + 1e-3  # what is in doubt is given up, never made
            else:
                assert left == MANY - used


async def test_requests_that_wait_go_on_with_the_share_when_the_store_fails() -> None:
    world = World(TenantLimits("t", Limits(requests=6000), {}))
    world.store.hangs.clear()
    async with running(world):
        waiting = [asyncio.create_task(world.request()) for _ in range(20)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        world.store.down = True
        world.store.hangs.set()
        async with asyncio.timeout(5):
            assert await asyncio.gather(*waiting) == ["admitted"] * 20
            assert await world.request() == "admitted"  # without asking
    assert world.metrics.lease_asks.values["failed",] >= 1


async def test_the_store_is_taken_up_again_when_it_is_back() -> None:
    world = World(TenantLimits("t", Limits(requests=6000), {}))
    world.store.down = True
    async with running(world):
        await until(lambda: world.limiter._lost)
        assert await world.request() == "admitted"
        assert world.store.asks["t"] == 0
        world.store.down = False
        await until(lambda: not any(meter.alone for meter in world.limiter._meters.values()))
        assert world.store.level("t", "requests", 6000) < 6000
        await until_forgotten(world)
    assert world.store.level("t", "requests", 6000) <= 5999


async def test_a_gateway_that_stops_gives_back_its_permits() -> None:
    world = World(TenantLimits("t", Limits(streams=8), {}))
    async with running(world):
        assert await world.request() == "admitted"
    assert world.store.hashes["t"].permits
    await world.limiter.close()
    assert not world.store.hashes["t"].permits


async def test_requests_that_come_at_once_wait_for_one_answer() -> None:
    world = World(TenantLimits("t", Limits(requests=60), {}))
    async with running(world):
        assert Counter(await asyncio.gather(*(world.request() for _ in range(100)))) == {
            "admitted": 60,
            "rate_limit_exceeded": 40,
        }
        assert world.store.asks["t"] <= 3
    assert world.metrics.limit_refusals.values["m", "requests"] == 40


async def test_nobody_is_refused_far_below_the_limit_however_many_come_while_others_wait() -> None:
    world = World(TenantLimits("t", Limits(requests=MANY, prompt_tokens=MANY, streams=MANY), {}))
    world.store.takes = 3

    async def client(number: int) -> Counter[str]:
        for _ in range(number):
            await asyncio.sleep(0)
        return Counter([await world.request() for _ in range(3)])

    async with running(world):
        outcomes = sum(await asyncio.gather(*(client(number) for number in range(100))), Counter[str]())
    assert outcomes == {"admitted": 300}


async def test_a_request_takes_of_its_tenant_and_of_its_route_or_of_neither() -> None:
    world = World(TenantLimits("t", Limits(requests=100), {"m": Limits(requests=2)}))
    async with running(world):
        assert [await world.request() for _ in range(3)] == ["admitted", "admitted", "rate_limit_exceeded"]
        assert [await world.request(route="n") for _ in range(98)] == ["admitted"] * 98
        assert await world.request(route="n") == "rate_limit_exceeded"


async def test_without_a_store_a_process_has_the_whole_limit_at_once() -> None:
    world = World(TenantLimits("t", Limits(requests=60), {}), redis=False)
    async with running(world):
        assert [await world.request() for _ in range(61)] == ["admitted"] * 60 + ["rate_limit_exceeded"]
        world.clock.now += 10
        assert Counter([await world.request() for _ in range(20)])["admitted"] == 10
        world.clock.now += 60
        await until_forgotten(world)
        assert [await world.request() for _ in range(60)] == ["admitted"] * 60


async def test_a_changed_limit_holds_for_the_next_request() -> None:
    world = World(TenantLimits("t", Limits(requests=60), {}))
    async with running(world):
        assert await world.request() == "admitted"
        world.limits = TenantLimits("t", Limits(requests=60, streams=0), {})
        assert await world.request() == "rate_limit_exceeded"
        world.limits = TenantLimits("t", Limits(requests=60), {})
        assert await world.request() == "admitted"


async def test_there_is_a_most_of_meters_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_limits, "MAX_METERS", 10)
    monkeypatch.setattr(gateway_limits, "SWEEP_S", 1000.0)
    routes = {str(number): Limits(requests=60) for number in range(100)}
    world = World(TenantLimits("t", None, routes))
    async with running(world):
        with Exchange(world.live, NoClient()) as exchange:
            exchange.route = "0"
            await world.limiter.reserve(exchange, world.limits, PROMPT, Route("0", (), ()))
            for route in routes:
                assert await world.request(route=route) == "admitted"
            assert len(world.limiter) == 10
            assert world.open() == 1
        assert world.open() == 0


async def test_a_prompt_that_alone_is_over_the_limit_is_refused_for_good() -> None:
    world = World(TenantLimits("t", Limits(prompt_tokens=100), {}))
    long = read_prompt("completions", read_fields(b'{"model":"m","prompt":"%b"}' % (b"word" * 101)))
    with Exchange(world.live, NoClient()) as exchange:
        with pytest.raises(ApiError, match="too large: tenant t may have 100 prompt tokens a minute") as caught:
            await world.limiter.reserve(exchange, world.limits, long, ROUTE)
    assert (caught.value.status, caught.value.retry_after) == (429, None)
