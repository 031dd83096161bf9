"""What limits promise: never more than the limit over all gateways, exact accounts, and service without the store.

The store is the model of its script (`tests.lease_store`), which a contract test holds equal to the real one.
"""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.leases import LEASE_S, PERMITS_EXPIRE_S, PERMITS_RENEW_S
from router.admission.limits import Ask, Denial, Limits, Meter, Reservation, Short, Use, admit, rate_limit_headers
from tests.lease_store import LeaseStore

MINUTE = 60.0


class Gateway:
    """A gateway's meter and its line to the store, which can be cut."""

    def __init__(self, name: str, limits: Limits, store: LeaseStore, now: float = 0.0) -> None:
        self.name = name
        self.meter = Meter(limits, now)
        self.store = store
        self.connected = True
        self.asks = 0

    def exchange(self, use: Use | None, now: float) -> None:
        ask = self.meter.ask(use, now)
        self.asks += 1
        if self.connected:
            self.meter.granted(ask, self.store.grant(self.name, ask, now), now)
        else:
            self.meter.failed(ask, 4, now)

    def admit(self, use: Use, now: float) -> Reservation | Denial:
        for _ in range(4):
            decision = admit((self.meter,), use, now)
            if not isinstance(decision, Short):
                return decision
            self.exchange(use, now)
        raise AssertionError("asked again and again")

    def tick(self, now: float) -> None:
        """What the gateway does besides requests: renew, give back, look for the store if it was gone."""
        if self.meter.due(now) or any(lease.alone for lease in self.meter.rates.values()):
            self.exchange(None, now)


def fleet(limits: Limits, size: int = 4) -> list[Gateway]:
    store = LeaseStore()
    return [Gateway(f"gw-{number}", limits, store) for number in range(size)]


def load(
    gateways: list[Gateway], per_second: float, seconds: float, *, start: float = 0.0, tokens: int = 0, seed: int = 1
) -> Counter[int]:
    """Requests admitted in each minute since `start`, at random gateways, each settled with what it reserved."""
    rng = random.Random(seed)
    admitted: Counter[int] = Counter()
    at, ticked = start, start
    while (at := at + rng.expovariate(per_second)) < start + seconds:
        while ticked + 0.25 < at:
            ticked += 0.25
            for gateway in gateways:
                gateway.tick(ticked)
        decision = rng.choice(gateways).admit(Use(tokens, tokens), at)
        if isinstance(decision, Reservation):
            decision.settle(Use(tokens, tokens))
            admitted[int((at - start) // MINUTE)] += 1
    return admitted


@pytest.mark.parametrize("limit", [60.0, 600.0, 6000.0])
def test_four_gateways_together_admit_what_the_limit_allows_and_no_more(limit: float) -> None:
    admitted = load(fleet(Limits(requests=limit)), 3 * limit / MINUTE, 4 * MINUTE)
    assert sum(admitted.values()) <= limit + 4 * limit
    for minute in (1, 2, 3):
        assert 0.95 * limit <= admitted[minute] <= 1.02 * limit


def test_tokens_are_limited_over_gateways_as_requests_are() -> None:
    limits = Limits(prompt_tokens=600_000, completion_tokens=300_000)
    admitted = load(fleet(limits), 50, 4 * MINUTE, tokens=500)
    for minute in (1, 2, 3):
        assert 0.95 * 600 <= admitted[minute] <= 1.02 * 600


def test_demand_below_the_limit_is_never_refused() -> None:
    gateways = fleet(Limits(requests=6000))
    admitted = load(gateways, 80, 3 * MINUTE)
    refused = load(gateways, 80, MINUTE, start=3 * MINUTE, seed=2)
    assert sum(admitted.values()) == pytest.approx(80 * 180, rel=0.03)
    assert sum(refused.values()) == pytest.approx(80 * 60, rel=0.04)


def test_most_requests_do_not_ask_the_store() -> None:
    gateways = fleet(Limits(requests=60_000))
    load(gateways, 400, MINUTE)
    assert sum(gateway.asks for gateway in gateways) < 0.1 * 400 * MINUTE


def test_without_the_store_gateways_overshoot_by_no_more_than_the_leases_they_held() -> None:
    limit = 6000.0
    gateways = fleet(Limits(requests=limit))
    load(gateways, 3 * limit / MINUTE, 2 * MINUTE)
    for gateway in gateways:
        gateway.connected = False
    alone = load(gateways, 3 * limit / MINUTE, 3 * MINUTE, start=2 * MINUTE)
    lease = limit * LEASE_S / MINUTE
    assert sum(alone.values()) <= 3 * limit + 4 * lease
    assert all(0.9 * limit <= alone[minute] <= limit + 4 * lease for minute in range(3))


@pytest.mark.parametrize("away", [0.5 * MINUTE, 10 * MINUTE])
def test_what_was_used_while_the_store_was_away_is_settled_when_it_is_back(away: float) -> None:
    limit = 6000.0
    gateways = fleet(Limits(requests=limit))
    load(gateways, 2 * limit / MINUTE, 2 * MINUTE)
    for gateway in gateways:
        gateway.connected = False
    load(gateways, 2 * limit / MINUTE, away, start=2 * MINUTE)
    for gateway in gateways:
        gateway.connected = True
    back = load(gateways, 2 * limit / MINUTE, 2 * MINUTE, start=2 * MINUTE + away)
    assert 0.9 * limit <= back[0] <= 1.06 * limit
    assert 0.95 * limit <= back[1] <= 1.02 * limit


def test_a_gateway_that_never_saw_the_store_begins_with_one_lease_and_goes_on_at_its_share() -> None:
    meter = Meter(Limits(requests=6000), 0.0)
    meter.failed(None, 4, 0.0)
    at_once = sum(isinstance(admit((meter,), Use(0, 0), 0.0), Reservation) for _ in range(1000))
    assert at_once == 6000 * LEASE_S / MINUTE
    later = sum(isinstance(admit((meter,), Use(0, 0), 10.0), Reservation) for _ in range(1000))
    assert later == 6000 / 4 * 10 / MINUTE


def test_a_dead_gateways_lease_is_lost_and_nothing_else() -> None:
    limit = 6000.0
    gateways = fleet(Limits(requests=limit))
    load(gateways, 2 * limit / MINUTE, MINUTE)
    left = load(gateways[1:], 2 * limit / MINUTE, 2 * MINUTE, start=MINUTE)
    assert limit - 2 * limit * LEASE_S / MINUTE <= left[1] <= 1.02 * limit


def test_what_is_not_used_goes_back_and_the_meter_can_be_forgotten() -> None:
    gateways = fleet(Limits(requests=6000, streams=64))
    load(gateways, 50, 10)
    for step in range(40):
        for gateway in gateways:
            gateway.tick(10 + step / 4)
    assert all(gateway.meter.quiet for gateway in gateways)
    assert not gateways[0].store.permits


def test_streams_are_counted_over_all_gateways_while_they_are_open() -> None:
    gateways = fleet(Limits(streams=10))
    taken = [gateways[number % 4].admit(Use(0, 0), number / 100) for number in range(40)]
    held = [one for one in taken if isinstance(one, Reservation)]
    assert 7 <= len(held) <= 10
    denied = next(one for one in taken if isinstance(one, Denial))
    assert (denied.of, denied.limit) == ("streams", 10)
    for one in held:
        one.release()
    for step in range(20):
        for gateway in gateways:
            gateway.tick(1 + step / 4)
    assert sum(isinstance(gateways[0].admit(Use(0, 0), 10.0), Reservation) for _ in range(20)) == 10


def test_a_dead_gateways_streams_are_not_counted_for_ever() -> None:
    dead, alive, *_ = fleet(Limits(streams=4))
    assert all(isinstance(dead.admit(Use(0, 0), 0.0), Reservation) for _ in range(4))
    assert isinstance(alive.admit(Use(0, 0), 1.0), Denial)
    assert isinstance(alive.admit(Use(0, 0), 1.0 + PERMITS_EXPIRE_S), Reservation)


def test_open_streams_stay_counted_as_long_as_their_gateway_lives() -> None:
    holder, other, *_ = fleet(Limits(streams=4))
    assert all(isinstance(holder.admit(Use(0, 0), 0.0), Reservation) for _ in range(4))
    for step in range(1, 60):
        holder.tick(step * PERMITS_RENEW_S / 2)
        assert isinstance(other.admit(Use(0, 0), step * PERMITS_RENEW_S / 2 + 0.2), Denial)


def test_without_the_store_a_gateway_opens_its_share_of_the_streams_but_one_at_least() -> None:
    for limit, share in ((40, 10), (2, 1), (0, 0)):
        meter = Meter(Limits(streams=limit), 0.0)
        meter.failed(None, 4, 0.0)
        assert sum(isinstance(admit((meter,), Use(0, 0), 0.0), Reservation) for _ in range(50)) == share


def test_a_request_larger_than_the_limit_is_denied_without_asking() -> None:
    gateway = Gateway("gw", Limits(prompt_tokens=1000), LeaseStore())
    denied = gateway.admit(Use(1001, 0), 0.0)
    assert isinstance(denied, Denial)
    assert (denied.of, denied.retry_after, gateway.asks) == ("prompt_tokens", math.inf, 0)
    assert isinstance(gateway.admit(Use(1000, 0), 0.0), Reservation)


def test_the_denial_says_when_to_come_back() -> None:
    gateway = Gateway("gw", Limits(requests=60, prompt_tokens=6000), LeaseStore())
    gateway.admit(Use(6000, 0), 0.0)
    denied = gateway.admit(Use(3000, 0), 0.0)
    assert isinstance(denied, Denial)
    assert denied.of == "prompt_tokens"
    assert denied.retry_after == pytest.approx(30.0)
    assert isinstance(gateway.admit(Use(3000, 0), 30.0), Reservation)


def test_at_the_limit_a_gateway_asks_at_intervals_and_not_for_each_request() -> None:
    gateway = Gateway("gw", Limits(requests=60), LeaseStore())
    for number in range(2000):
        gateway.admit(Use(0, 0), number / 1000)
    assert gateway.asks <= 60 + 2.0 / 0.1 + 2


def test_a_request_takes_of_all_its_meters_or_of_none() -> None:
    tenant, route = Meter(Limits(requests=60), 0.0), Meter(Limits(requests=60), 0.0)
    store = LeaseStore()
    ask = tenant.ask(Use(0, 0), 0.0)
    tenant.granted(ask, store.grant("gw", ask, 0.0), 0.0)
    assert admit((tenant, route), Use(0, 0), 0.0) == Short((route,))
    assert tenant.rates["requests"].held == 1


def test_headers_show_the_limit_of_which_least_is_left() -> None:
    store = LeaseStore()
    wide = Gateway("gw", Limits(requests=600, prompt_tokens=100_000), LeaseStore())
    tight = Gateway("gw", Limits(requests=60, completion_tokens=6000), store)
    for gateway in (wide, tight):
        gateway.admit(Use(1000, 3000), 0.0)
    assert rate_limit_headers((wide.meter, tight.meter), 0.0) == (
        ("x-ratelimit-limit-requests", "60"),
        ("x-ratelimit-remaining-requests", "59"),
        ("x-ratelimit-reset-requests", "1s"),
        ("x-ratelimit-limit-tokens", "6000"),
        ("x-ratelimit-remaining-tokens", "3000"),
        ("x-ratelimit-reset-tokens", "30s"),
    )
    assert dict(rate_limit_headers((tight.meter,), 0.98))["x-ratelimit-reset-requests"] == "20ms"
    assert rate_limit_headers((Meter(Limits(), 0.0),), 0.0) == ()


def test_a_changed_limit_holds_at_once_and_keeps_open_streams() -> None:
    gateway = Gateway("gw", Limits(requests=60, streams=4), LeaseStore())
    held = gateway.admit(Use(0, 0), 0.0)
    gateway.meter.change(Limits(requests=0, prompt_tokens=5, streams=1), 1.0)
    denied = gateway.admit(Use(6, 0), 1.0)
    assert isinstance(denied, Denial)
    assert isinstance(held, Reservation)
    held.settle(Use(3, 0))
    assert gateway.meter.streams is not None
    assert gateway.meter.streams.open == 0


def test_a_meter_with_something_reserved_is_not_forgotten() -> None:
    gateway = Gateway("gw", Limits(completion_tokens=6000), LeaseStore())
    reservation = gateway.admit(Use(0, 100), 0.0)
    assert isinstance(reservation, Reservation)
    assert gateway.meter.rates["completion_tokens"].held == 0
    assert not gateway.meter.quiet
    reservation.settle(Use(0, 4000))
    assert not gateway.meter.quiet
    gateway.tick(LEASE_S)
    assert gateway.store.levels["completion_tokens"] == 2100  # it has filled for a second
    assert gateway.meter.quiet


def test_a_limit_of_streams_that_comes_later_counts_those_that_are_open() -> None:
    gateway = Gateway("gw", Limits(requests=600), LeaseStore())
    held = gateway.admit(Use(0, 0), 0.0)
    gateway.meter.change(Limits(requests=600, streams=1), 1.0)
    assert isinstance(gateway.admit(Use(0, 0), 1.0), Denial)
    assert isinstance(held, Reservation)
    held.release()
    assert isinstance(gateway.admit(Use(0, 0), 2.0), Reservation)


def test_a_limit_that_comes_while_the_store_is_away_is_shared_like_the_others() -> None:
    meter = Meter(Limits(requests=6000), 0.0)
    meter.failed(None, 4, 0.0)
    meter.change(Limits(requests=6000, prompt_tokens=6000, streams=8), 0.0)
    assert (meter.rates["prompt_tokens"].alone, meter.streams and meter.streams.alone) == (4, 4)
    assert isinstance(admit((meter,), Use(100, 0), 0.0), Reservation)
    assert isinstance(admit((meter,), Use(1, 0), 0.0), Denial)


def test_without_a_store_a_limit_begins_full_fills_by_itself_and_is_forgotten_when_it_is_full() -> None:
    meter = Meter(Limits(requests=60, streams=4), 0.0)
    meter.own(0.0)
    assert meter.full(0.0)
    taken = [admit((meter,), Use(0, 0), 0.0) for _ in range(4)]
    assert all(isinstance(one, Reservation) for one in taken)
    assert isinstance(admit((meter,), Use(0, 0), 0.0), Denial)
    for one in taken:
        assert isinstance(one, Reservation)
        one.settle(Use(0, 0))
    assert not meter.full(3.9)
    assert meter.full(4.0)


def test_a_lowered_limit_takes_away_what_is_held_beyond_it() -> None:
    meter = Meter(Limits(requests=6000), 0.0)
    meter.own(0.0)
    meter.change(Limits(requests=2), 0.0)
    assert sum(isinstance(admit((meter,), Use(0, 0), 0.0), Reservation) for _ in range(10)) == 2


def test_one_ask_may_be_for_several_requests() -> None:
    meter, store = Meter(Limits(requests=60, prompt_tokens=6000, streams=8), 0.0), LeaseStore()
    ask = meter.ask(Use(100, 0) + Use(200, 0) + Use(300, 0), 0.0)
    meter.granted(ask, store.grant("gw", ask, 0.0), 0.0)
    assert all(isinstance(admit((meter,), Use(tokens, 0), 0.0), Reservation) for tokens in (300, 200, 100))


def test_who_has_asked_enough_is_told_no() -> None:
    meter = Meter(Limits(requests=60), 0.0)
    assert isinstance(admit((meter,), Use(0, 0), 0.0), Short)
    assert isinstance(admit((meter,), Use(0, 0), 0.0, asked_enough=True), Denial)


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "settle", "release", "tick", "cut", "mend"]),
        st.integers(0, 3),
        st.integers(0, 300),
        st.sampled_from([0.0, 0.05, 0.7, 4.0, 70.0]),
    ),
    max_size=120,
)


@given(steps)
@settings(deadline=None)
def test_accounts_come_out_even_in_whatever_order_things_happen(
    script: list[tuple[str, int, int, float]],
) -> None:
    limits = Limits(requests=120, prompt_tokens=3000, completion_tokens=3000, streams=6)
    gateways = fleet(limits)
    store = gateways[0].store
    open_: list[tuple[Reservation, int]] = []
    now = 0.0
    for what, which, tokens, pause in script:
        now += pause
        gateway = gateways[which]
        if what == "admit":
            decision = gateway.admit(Use(tokens, tokens // 2), now)
            if isinstance(decision, Reservation):
                open_.append((decision, tokens))
        elif what in ("settle", "release") and open_:
            reservation, reserved = open_.pop(tokens % len(open_))
            for _ in range(2):  # the second time does nothing
                if what == "settle":
                    reservation.settle(Use(2 * reserved, tokens))
                else:
                    reservation.release()
        elif what == "tick":
            gateway.tick(now)
        elif what in ("cut", "mend"):
            gateway.connected = what == "mend"
    assert sum(gateway.meter.streams.open for gateway in gateways if gateway.meter.streams) == len(open_)
    for reservation, _ in open_:
        reservation.release()
    for gateway in gateways:
        gateway.connected = True
    for _ in range(3):
        now += 300.0
        for gateway in gateways:
            gateway.exchange(None, now)
    assert all(gateway.meter.quiet for gateway in gateways)
    assert not store.permits
    assert all(level == getattr(limits, kind) for kind, level in store.levels.items())


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2000), st.sampled_from([0.0, 0.01, 0.3, 2.0])), max_size=200)
)
@settings(deadline=None)
def test_gateways_never_spend_more_than_the_bucket_has_yielded(script: list[tuple[int, int, float]]) -> None:
    gateways = fleet(Limits(prompt_tokens=6000))
    now, spent = 0.0, 0
    for which, tokens, pause in script:
        now += pause
        gateways[which].tick(now)
        if isinstance(gateways[which].admit(Use(tokens, 0), now), Reservation):
            spent += tokens
        assert spent <= 6000 + now * 100 + 1e-6


def test_an_answer_that_does_not_come_costs_units_and_never_makes_them() -> None:
    gateway = Gateway("gw", Limits(requests=600), LeaseStore())
    for number in range(20):
        gateway.admit(Use(0, 0), number / 100)
    before = gateway.meter.rates["requests"].held
    ask: Ask = gateway.meter.ask(None, 5.0)
    assert ask.rates[0][1].back == before
    gateway.meter.failed(ask, 1, 5.0)
    assert gateway.meter.rates["requests"].held == 0


def test_what_is_owed_stays_owed_until_the_store_has_heard_of_it() -> None:
    gateway = Gateway("gw", Limits(completion_tokens=6000), LeaseStore())
    reservation = gateway.admit(Use(0, 100), 0.0)
    assert isinstance(reservation, Reservation)
    reservation.settle(Use(0, 1100))
    gateway.connected = False
    gateway.exchange(None, 1.0)
    assert gateway.meter.rates["completion_tokens"].held == -1000
    gateway.connected = True
    gateway.exchange(None, 1.0)
    assert gateway.store.levels["completion_tokens"] == 5000


def test_looking_for_the_store_costs_a_gateway_nothing_of_its_share() -> None:
    gateway = Gateway("gw", Limits(requests=6000), LeaseStore())
    gateway.connected = False
    for step in range(240):
        gateway.exchange(None, step / 4)
    assert gateway.meter.rates["requests"].level(60.0) == pytest.approx(6000 / 4, rel=0.01)
