"""What ejecting endpoints promises: enough of a pool is always left, each back-off is longer, and nobody stays out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import health, outlier
from router.fleet import EndpointState, FleetView, Pool, compile_view
from router.merge import merge
from router.outlier import SAME_INCIDENT_S, Outlier
from router.plan import SERVING
from router.spec.documents import file_documents
from router.spec.fleet import EndpointSpec, FleetSpec, OutlierSpec, PoolSpec

LIMIT = 3


def pool(size: int, max_ejected: str = "50%") -> Pool:
    spec = PoolSpec(
        protocol="openai",
        model="x",
        endpoints=[EndpointSpec(id=f"e{n}", http=f"http://h:{n + 1}") for n in range(size)],
        outlier=OutlierSpec(failures=LIMIT, base_ejection="30s", max_ejection="300s", max_ejected=max_ejected),
    )
    view = compile_view(merge(file_documents(FleetSpec(fleet="f", pools={"p": spec}), content_hash="h")), FleetView())
    for endpoint in view.endpoints.values():
        endpoint.state.phase = "ready"
    return view.pools["p"]


def fail(members: Pool, which: int, now: float, *, connection: bool = False) -> float | None:
    """A request fails; if there is one on trial at the endpoint, that one."""
    endpoint = members.endpoints[which]
    request = endpoint.state.outlier.trial or object()
    return health.request_failed(endpoint, members, request, "it broke", now, connection=connection, jitter=0.5)


def eject(members: Pool, which: int, now: float) -> float:
    lasts = None
    while lasts is None:
        lasts = fail(members, which, now)
    return lasts


class _Request:
    """Stands for an attempt: a trial is known by identity."""


def try_out(state: EndpointState) -> _Request:
    request = _Request()
    outlier.put_on_trial(state.outlier)
    outlier.begin_trial(state.outlier, request)
    return request


events = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["fail", "lose", "trial", "answer", "leave", "succeed", "down", "up"]),
        st.floats(0.0, 40.0),
    ),
    max_size=120,
)


@given(st.integers(1, 6), st.sampled_from(["0%", "34%", "50%", "100%"]), events)
def test_whatever_happens_some_of_a_pool_that_could_serve_does(
    size: int, max_ejected: str, script: list[tuple[int, str, float]]
) -> None:
    members = pool(size, max_ejected)
    now = 1000.0
    for which, what, pause in script:
        endpoint = members.endpoints[which % size]
        record = endpoint.state.outlier
        now += pause
        if what in ("fail", "lose"):
            fail(members, which % size, now, connection=what == "lose")
        elif what == "trial" and record.ejected and not record.on_trial:
            outlier.put_on_trial(record)
        elif what == "trial" and record.on_trial and record.trial is None:
            outlier.begin_trial(record, _Request())
        elif what == "answer":
            outlier.answered(record, record.trial or _Request(), now, limit=LIMIT)
        elif what == "leave":
            if record.trial is not None:
                outlier.end_trial(record)
        elif what == "succeed":
            outlier.succeeded(record)
        else:
            endpoint.state.phase = "ready" if what == "up" else "unhealthy"
            health.spare_the_last(members, now)
        ejected = [e for e in members.endpoints if e.state.outlier.ejected]
        assert len(ejected) <= float(max_ejected[:-1]) / 100 * size
        if any(e.state.phase == "ready" for e in members.endpoints):
            assert any(e.phase in SERVING and not e.state.outlier.ejected for e in members.endpoints)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_each_ejection_in_a_row_is_longer_up_to_a_limit(jitters: list[float]) -> None:
    record, now, before = Outlier(), 1000.0, 0.0
    for jitter in jitters:
        lasts = outlier.eject(record, now, base=30, longest=300, jitter=jitter, reason="")
        assert lasts > before or lasts >= 270
        assert lasts <= 300
        before = lasts
        now += lasts
        outlier.put_on_trial(record)
        request = _Request()
        outlier.begin_trial(record, request)


def test_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    members = pool(2)
    record = members.endpoints[0].state.outlier
    for _ in range(10):
        assert [fail(members, 0, 1000.0) for _ in range(LIMIT - 1)] == [None] * (LIMIT - 1)
        outlier.succeeded(record)
    assert eject(members, 0, 1000.0) == pytest.approx(30 * 0.95)
    assert members.endpoints[0].phase == "unhealthy"
    assert "3 failed requests in a row, the last: it broke" in members.endpoints[0].detail


def test_a_probe_does_not_readmit_an_ejected_endpoint() -> None:
    members = pool(2)
    eject(members, 0, 1000.0)
    health.probe_answered(members.endpoints[0].state, ready=True, detail="ready")
    assert members.endpoints[0].phase == "unhealthy"
    assert members.endpoints[0].detail.startswith("ejected for 28 s: ")


def test_on_trial_one_request_at_a_time_goes_there_and_its_answer_readmits() -> None:
    members = pool(2)
    endpoint = members.endpoints[0]
    record = endpoint.state.outlier
    eject(members, 0, 1000.0)
    outlier.put_on_trial(record)
    phases: list[str] = [endpoint.phase]
    request = _Request()
    outlier.begin_trial(record, request)
    phases.append(endpoint.phase)
    outlier.end_trial(record)  # its client left
    phases.append(endpoint.phase)
    outlier.begin_trial(record, request)
    outlier.answered(record, _Request(), 1040.0, limit=LIMIT)  # one that was sent before the ejection
    phases.append(endpoint.phase)
    outlier.answered(record, request, 1040.0, limit=LIMIT)
    phases.append(endpoint.phase)
    assert phases == ["ready", "unhealthy", "ready", "unhealthy", "ready"]
    assert not record.ejected


def test_a_trial_that_fails_or_whose_answer_breaks_off_ejects_for_twice_as_long() -> None:
    members = pool(2)
    record = members.endpoints[0].state.outlier
    first = eject(members, 0, 1000.0)
    try_out(members.endpoints[0].state)
    second = fail(members, 0, 1030.0)
    assert second == pytest.approx(2 * first)
    request = try_out(members.endpoints[0].state)
    outlier.answered(record, request, 1090.0, limit=LIMIT)
    assert fail(members, 0, 1091.0, connection=True) == pytest.approx(4 * first)


def test_an_endpoint_that_did_well_for_as_long_as_it_was_out_starts_anew() -> None:
    members = pool(2)
    record = members.endpoints[0].state.outlier
    first = eject(members, 0, 1000.0)
    outlier.answered(record, try_out(members.endpoints[0].state), 1030.0, limit=LIMIT)
    assert eject(members, 0, 1030.0 + 2 * first) == first


def test_a_death_that_takes_many_requests_with_it_counts_once() -> None:
    members = pool(2)
    assert [fail(members, 0, 1000.0, connection=True) for _ in range(50)] == [None] * 50
    assert members.endpoints[0].state.outlier.failures == 1
    lasting = [fail(members, 0, 1000.0 + n * 2 * SAME_INCIDENT_S, connection=True) for n in range(1, LIMIT)]
    assert lasting[-1] is not None


def test_what_was_sent_before_an_ejection_changes_it_no_more() -> None:
    members = pool(2)
    record = members.endpoints[0].state.outlier
    eject(members, 0, 1000.0)
    assert [fail(members, 0, 1001.0) for _ in range(20)] == [None] * 20
    outlier.succeeded(record)
    assert record.ejected


def test_the_last_endpoint_is_never_ejected_and_an_ejected_one_is_spared_when_it_becomes_the_last() -> None:
    alone = pool(1, "100%")
    assert [fail(alone, 0, 1000.0) for _ in range(50)] == [None] * 50
    members = pool(2, "100%")
    eject(members, 0, 1000.0)
    assert [fail(members, 1, 1000.0) for _ in range(50)] == [None] * 50
    health.down(members.endpoints[1].state, "refused")
    assert health.spare_the_last(members, 1001.0) == [members.endpoints[0]]
    assert members.endpoints[0].phase == "ready"


def test_only_its_trial_judges_an_endpoint_that_is_on_trial() -> None:
    members = pool(4)
    lasts = eject(members, 0, 1000.0)
    record = members.endpoints[0].state.outlier
    outlier.put_on_trial(record)
    trial = object()
    outlier.begin_trial(record, trial)
    older = health.request_failed(
        members.endpoints[0], members, object(), "it broke", 1000.0 + lasts, connection=True, jitter=0.5
    )
    assert older is None
    assert record.trial is trial
    outlier.answered(record, trial, 1001.0 + lasts, limit=LIMIT)
    assert not record.ejected
