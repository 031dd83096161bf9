"""A request may ask for other deadlines, as far as its pool allows."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ApiError
from router.spec.fleet import PoolSpec, TimeoutLimitSpec, TimeoutSpec
from router.timeouts import Timeouts, read_timeouts, timeout_limits

USUAL = TimeoutSpec(connect="2s", first_byte="300s", idle="60s", total="off")


def limits(spec: TimeoutLimitSpec | None) -> Timeouts:
    usual = Timeouts.of(USUAL)
    return timeout_limits(PoolSpec(protocol="openai", model="m", timeouts=USUAL, timeout_limits=spec), usual)


def test_a_header_is_read_in_the_words_of_the_fleet_file() -> None:
    assert read_timeouts("first_byte=10s, total=2m,idle=off") == {"first_byte": 10, "total": 120, "idle": inf}


@pytest.mark.parametrize("header", ["", "10s", "first_byte", "first_byte=10", "ttl=3s", "idle=0s", "idle=-1s", "a=b=c"])
def test_a_malformed_header_is_named(header: str) -> None:
    with pytest.raises(ApiError, match="x-headrace-timeouts") as refused:
        read_timeouts(header)
    assert refused.value.status == 400


def test_without_limits_a_request_may_wait_less_long_but_not_longer() -> None:
    asked = read_timeouts("first_byte=10s, idle=90s, total=1h")
    assert Timeouts.of(USUAL).asked(asked, limits(None)) == Timeouts(2, 10, 60, 3600)


def test_limits_let_a_request_wait_longer() -> None:
    bounds = limits(TimeoutLimitSpec(first_byte="20m", total="10m"))
    asked = read_timeouts("connect=9s, first_byte=1h, total=off")
    assert Timeouts.of(USUAL).asked(asked, bounds) == Timeouts(2, 1200, 60, inf)


def test_a_limit_below_the_usual_cuts_nobody_short() -> None:
    bounds = limits(TimeoutLimitSpec(first_byte="2s"))
    assert Timeouts.of(USUAL).asked(read_timeouts("first_byte=1h"), bounds).first_byte == 300


@given(st.dictionaries(st.sampled_from(["connect", "first_byte", "idle", "total"]), st.floats(0.001, 1e6)))
def test_nothing_asked_for_goes_beyond_the_limits(asked: dict[str, float]) -> None:
    bounds = limits(TimeoutLimitSpec(idle="2m"))
    found = Timeouts.of(USUAL).asked(asked, bounds)
    for name in ("connect", "first_byte", "idle", "total"):
        assert getattr(found, name) <= max(getattr(bounds, name), getattr(Timeouts.of(USUAL), name))
        if name not in asked:
            assert getattr(found, name) == getattr(Timeouts.of(USUAL), name)
