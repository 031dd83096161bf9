"""What the retry budget promises: a share of the live requests, a small rate besides, and never more."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from router.retry import HOLD_S, RetryBudget, RetryPlace
from router.spec.units import share

steps = st.lists(
    st.tuples(st.floats(0, 0.7), st.integers(1, 200), st.sampled_from(["take", "answer", "unused"])), max_size=80
)


def test_a_share_is_read_as_it_is_written() -> None:
    assert (share("10%"), share("0%"), share("12.5%"), share("off")) == (0.1, 0.0, 0.125, float("inf"))


@given(steps, st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 5))
def test_retries_within_the_share_are_always_allowed_and_beyond_it_only_at_the_rate(
    script: list[tuple[float, int, str]], allowed: float, rate: int
) -> None:
    budget = RetryBudget(allowed, rate)
    now = 1000.0
    places: list[RetryPlace] = []
    beyond = 0
    for pause, live, what in script:
        now += pause
        if what == "take":
            within = budget.in_use(now) + 1 <= allowed * live
            place = budget.take(live, now)
            assert place is not None or not within
            if place is not None:
                place.used = True
                places.append(place)
                beyond += not within
        elif places:
            place = places.pop()
            place.used = what == "answer"
            budget.give_back(place, now)
        assert budget.in_use(now) >= len(places)
        assert beyond <= rate + rate * (now - 1000.0) + 1e-6
    for place in places:
        budget.give_back(place, now)
    assert budget.in_use(now + HOLD_S) == 0


def taken(budget: RetryBudget, live: int, now: float) -> Iterator[RetryPlace]:
    while (place := budget.take(live, now)) is not None:
        place.used = True
        yield place


def test_engines_that_fail_at_once_free_no_place_before_a_second_has_passed() -> None:
    budget = RetryBudget(0.1, 3)
    sent = 0
    for place in taken(budget, 100, 0.0):
        sent += 1
        budget.give_back(place, 0.0)
    assert sent == 10 + 3
    assert budget.take(100, 0.2) is None
    assert budget.take(100, HOLD_S) is not None


def test_a_place_is_free_again_once_the_retry_is_answered_however_long_the_answer() -> None:
    budget = RetryBudget(0.1, 0)
    (place,) = taken(budget, 10, 0.0)
    assert budget.take(10, 5.0) is None
    budget.give_back(place, 5.0)
    assert budget.take(10, 5.0) is not None


def test_a_place_that_was_not_used_counts_no_longer() -> None:
    budget = RetryBudget(0.1, 0)
    place = budget.take(10, 0.0)
    assert place is not None
    budget.give_back(place, 0.0)
    assert budget.in_use(0.0) == 0


def test_a_budget_can_be_lifted_and_retries_turned_off() -> None:
    assert len([budget.take(1, 0.0) for budget in [RetryBudget(share("off"), 0)] for _ in range(1000)]) == 1000
    assert all(RetryBudget(0.0, 0).take(1000, now) is None for now in (0.0, 100.0))
