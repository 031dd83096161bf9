"""What a request may say about its own place among those that wait."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.standing import Standing
from router.admission.tickets import PRIORITIES
from router.errors import ApiError
from router.spec.fleet import Priority

OWN = Standing("t", 2.0, "standard")


@pytest.mark.parametrize(("own", "asked"), list(itertools.product(PRIORITIES, PRIORITIES)))
def test_a_request_may_stand_back_and_never_push_forward(own: Priority, asked: Priority) -> None:
    standing = Standing("t", 2.0, own).asking(asked, None)
    assert PRIORITIES.index(standing.priority) == max(PRIORITIES.index(own), PRIORITIES.index(asked))
    assert (standing.tenant, standing.weight) == ("t", 2.0)


@given(st.text())
def test_a_class_that_there_is_not_is_refused(text: str) -> None:
    if text.strip().lower() in PRIORITIES:
        return
    with pytest.raises(ApiError) as told:
        OWN.asking(text, None)
    assert (told.value.status, told.value.code) == (400, "invalid_header")


@pytest.mark.parametrize(
    ("prefer", "if_available"),
    [
        ("if-available", True),
        ("If-Available", True),
        ("respond-async, if-available", True),
        ("if-available; x=1", True),
        ("respond-async", False),
        ("not-if-available", False),
        ("", False),
    ],
)
def test_a_preference_is_found_among_others(prefer: str, if_available: bool) -> None:
    assert OWN.asking(None, prefer).if_available is if_available


def test_who_asks_for_nothing_costs_nothing() -> None:
    assert OWN.asking(None, None) is OWN
