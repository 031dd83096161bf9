"""One leader at a time, whatever clocks say."""

from hypothesis import given, settings
from hypothesis import strategies as st

from k8s.election import DURATION_S, RENEW_DEADLINE_S, Candidate, LeaseSpec

TEXT = "2026-11-30T20:00:00.000000Z"


def taken(by: str, transitions: int = 1, renewed: str = TEXT) -> LeaseSpec:
    return LeaseSpec(
        holder_identity=by, lease_duration_seconds=15, acquire_time=TEXT, renew_time=renewed,
        lease_transitions=transitions,
    )  # fmt: skip


def test_the_first_to_come_takes_a_lease_that_is_not_there_or_given_back() -> None:
    for free in (None, LeaseSpec(), LeaseSpec(holder_identity="", lease_transitions=3)):
        one = Candidate("one")
        claim = one.claim(free, 5.0, TEXT)
        assert claim is not None
        assert (claim.holder_identity, claim.acquire_time) == ("one", TEXT)
        assert claim.lease_transitions == ((free.lease_transitions if free else None) or 0) + 1
        assert not one.leads(5.0), "a claim is nothing until the API server has written it"
        one.claimed(5.0)
        assert one.leads(5.0 + RENEW_DEADLINE_S - 0.1)
        assert not one.leads(5.0 + RENEW_DEADLINE_S)


def test_a_lease_is_anothers_until_it_has_not_moved_for_as_long_as_it_lasts() -> None:
    two = Candidate("two")
    assert two.claim(taken("one"), 100.0, "x") is None
    assert two.claim(taken("one"), 114.0, "x") is None
    assert two.claim(taken("one", renewed="later"), 114.5, "x") is None
    assert two.claim(taken("one", renewed="later"), 129.0, "x") is None
    claim = two.claim(taken("one", renewed="later"), 129.6, "now")
    assert claim is not None
    assert (claim.holder_identity, claim.acquire_time, claim.lease_transitions) == ("two", "now", 2)


def test_who_holds_it_renews_it_and_who_lost_it_leads_no_more() -> None:
    one = Candidate("one")
    one.claim(None, 0.0, TEXT)
    one.claimed(0.0)
    claim = one.claim(taken("one"), 2.0, "renewed")
    assert claim == taken("one", renewed="renewed")
    one.claimed(2.0)
    assert one.leads(11.0)
    assert one.claim(taken("two", 2), 11.0, "x") is None
    assert not one.leads(11.0)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 20), st.sampled_from(["all", "read", "none"])), max_size=60)
)
def test_never_do_two_lead(moves: list[tuple[int, float, str]]) -> None:
    """Each replica acts when it may, after any time, on clocks of its own; an answer may be lost after the write."""
    candidates = [Candidate(str(number)) for number in range(3)]
    lease: LeaseSpec | None = None
    now = 0.0
    for number, pause, comes_through in moves:
        now += pause
        one, own_clock = candidates[number], 1000.0 * number + now
        if comes_through != "none":
            claim = one.claim(lease, own_clock, f"{now}")
            if claim is not None:
                lease = claim
                if comes_through == "all":
                    one.claimed(own_clock)
        assert sum(each.leads(1000.0 * index + now) for index, each in enumerate(candidates)) <= 1
    assert RENEW_DEADLINE_S < DURATION_S
