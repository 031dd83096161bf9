"""When a process protects itself, and when it stops to."""

from hypothesis import given
from hypothesis import strategies as st

from router.overload import CALM_S, MARGIN, Change, Measure, Overload

SHED, CLOSE, REFUSE = Measure.SHED_BATCH, Measure.STOP_KEEP_ALIVE, Measure.REFUSE
CALM = {"cpu": 0.2, "loop": 0.0, "memory": 0.2, "files": 0.1}


def taken(*steps: dict[str, float], every_s: float = 1.0) -> list[set[Measure]]:
    """The measures in force after each of `steps`, `every_s` seconds apart."""
    overload, seen = Overload(), []
    for number, step in enumerate(steps):
        overload.update({**CALM, **step}, number * every_s)
        seen.append(set(overload.taken))
    return seen


def test_each_measure_is_for_the_resources_that_it_relieves() -> None:
    assert taken({"memory": 0.79}, {"memory": 0.8}, {"memory": 1.0}) == [set(), {SHED, CLOSE}, {SHED, CLOSE, REFUSE}]
    assert taken({"files": 0.8}, {"files": 2.0}) == [{SHED, CLOSE}, {SHED, CLOSE, REFUSE}]
    assert taken({"loop": 0.79}, {"loop": 0.99}, {"loop": 1.0}) == [set(), {SHED}, {SHED, REFUSE}]
    assert taken({"cpu": 0.99}, {"cpu": 7.0}) == [set(), {SHED}]


def test_a_change_names_the_resource_that_it_is_for() -> None:
    overload = Overload()
    assert overload.update({**CALM, "loop": 1.2}, 0) == [
        Change(SHED, True, "loop", 1.2),
        Change(REFUSE, True, "loop", 1.2),
    ]
    assert overload.update({**CALM, "loop": 0.85}, 1) == []


def test_a_measure_is_given_up_after_a_while_of_calm() -> None:
    steps = taken({"memory": 1.0}, *[{"memory": 0.5}] * 10)
    calm = int(CALM_S)
    assert steps == [{SHED, CLOSE, REFUSE}] * (calm + 1) + [set()] * (10 - calm)


def test_a_pressure_just_below_the_threshold_gives_nothing_up() -> None:
    steps = taken({"memory": 1.0}, *[{"memory": 0.95 if number % 4 else 0.5} for number in range(40)])
    assert all(REFUSE in step for step in steps)


@given(st.lists(st.floats(0, 2), max_size=60))
def test_what_is_refused_is_refused_for_a_reason_not_long_past(pressures: list[float]) -> None:
    last = float("-inf")
    for second, (pressure, measures) in enumerate(
        zip(pressures, taken(*({"memory": pressure} for pressure in pressures)), strict=True)
    ):
        if pressure >= 1.0 - MARGIN:
            last = second
        assert pressure < 1.0 or REFUSE in measures
        assert REFUSE not in measures or second - last <= CALM_S + 1
