"""When a process protects itself, and when it stops to."""

from hypothesis import given
from hypothesis import strategies as st

from router.overload import CALM_S, ENTERED_AT, Overload, Stage


def test_the_worst_resource_decides_at_once() -> None:
    overload = Overload()
    assert overload.update({"loop": 0.1, "memory": 0.79}, 0) is None
    change = overload.update({"loop": 0.1, "memory": 0.8}, 1)
    assert change is not None
    assert (change.before, change.now, change.resource) == (Stage.NORMAL, Stage.STOP_KEEP_ALIVE, "memory")
    change = overload.update({"loop": 7.0, "memory": 0.8}, 2)
    assert change is not None
    assert (change.now, change.resource) == (Stage.REFUSE, "loop")


def test_a_loop_that_lags_costs_nobody_a_connection() -> None:
    overload = Overload()
    stages = []
    for pressure in (0.99, 1.0):
        overload.update({"loop": pressure}, 0)
        stages.append(overload.stage)
    assert stages == [Stage.SHED_BATCH, Stage.REFUSE]


def test_a_core_in_full_use_costs_batch_work_only() -> None:
    overload = Overload()
    stages = []
    for second, pressure in enumerate([0.99, 1.5, *[0.95] * 20, *[0.85] * 20]):
        overload.update({"cpu": pressure}, second)
        stages.append(overload.stage)
    calm = int(CALM_S)
    assert stages == [Stage.NORMAL, *[Stage.SHED_BATCH] * (21 + calm), *[Stage.NORMAL] * (20 - calm)]


def test_a_stage_is_left_after_a_while_of_calm_one_at_a_time() -> None:
    overload = Overload()
    overload.update({"memory": 1.0}, 0)
    stages = []
    for second in range(1, 24):
        overload.update({"memory": 0.5}, second)
        stages.append(overload.stage)
    calm = int(CALM_S)
    assert stages[: 3 * calm + 4] == [
        *[Stage.REFUSE] * calm, *[Stage.STOP_KEEP_ALIVE] * calm, *[Stage.SHED_BATCH] * calm, *[Stage.NORMAL] * 4,
    ]  # fmt: skip


def test_what_is_told_of_a_stage_that_is_left_is_the_greatest_pressure() -> None:
    overload = Overload()
    overload.update({"files": 0.2, "memory": 1.0}, 0)
    overload.update({"files": 0.6, "memory": 0.3}, 1)
    change = overload.update({"files": 0.6, "memory": 0.3}, 1 + CALM_S)
    assert change is not None
    assert (change.now, change.resource, change.pressure) == (Stage.STOP_KEEP_ALIVE, "files", 0.6)


def test_a_pressure_just_below_the_threshold_leaves_nothing() -> None:
    overload = Overload()
    overload.update({"memory": 1.0}, 0)
    for second in range(1, 100):
        assert overload.update({"memory": 0.95 if second % 4 else 0.5}, second) is None


@given(st.lists(st.floats(0, 2), max_size=60))
def test_what_is_refused_is_refused_for_a_reason_not_long_past(pressures: list[float]) -> None:
    overload, last_high = Overload(), float("-inf")
    for second, pressure in enumerate(pressures):
        overload.update({"memory": pressure}, second)
        if pressure >= ENTERED_AT[Stage.REFUSE]:
            assert overload.stage is Stage.REFUSE
        if pressure > 0.9:
            last_high = second
        assert overload.stage is not Stage.REFUSE or last_high >= 0
        if pressure < ENTERED_AT[Stage.STOP_KEEP_ALIVE]:
            assert overload.stage is Stage.NORMAL or max(pressures[: second + 1]) >= ENTERED_AT[Stage.STOP_KEEP_ALIVE]
