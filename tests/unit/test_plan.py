"""What the router's first layer promises: computable affinity, bounded loads, honest refusals."""

from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import health
from router.affinity import LOAD_FLOOR, load_bound, pool_preference, preference, within_bounds
from router.errors import ApiError
from router.fleet import Endpoint, EndpointState, FleetView, compile_view
from router.merge import merge
from router.plan import plan
from router.prompt import PromptView
from router.spec.documents import file_documents
from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, RouteSpec, WeightedPool

KEYS = st.integers(0, 2**64 - 1)


def request(model: str = "m", key: int = 1, needs: frozenset[str] = frozenset()) -> PromptView:
    return PromptView("chat.completions", model, True, False, needs, (), 0, key)


def fleet(sizes: dict[str, int], routes: dict[str, RouteSpec], *, ready: bool = True) -> FleetView:
    pools = {
        pool: PoolSpec(
            protocol="openai",
            model="x",
            endpoints=[EndpointSpec(id=f"{pool}-{n}", http=f"http://h:{n + 1}") for n in range(size)],
        )
        for pool, size in sizes.items()
    }
    spec = FleetSpec(fleet="f", pools=pools, routes=routes)
    view = compile_view(merge(file_documents(spec, content_hash="h")), FleetView())
    if ready:
        for endpoint in view.endpoints.values():
            endpoint.state.phase = "ready"
    return view


def endpoints(count: int) -> list[Endpoint]:
    return list(fleet({"p": count}, {"m": RouteSpec(pool="p")}).endpoints.values())


@given(KEYS, st.integers(1, 12), st.randoms())
def test_preference_depends_on_key_and_fleet_alone(key: int, count: int, random: Random) -> None:
    members = endpoints(count)
    shuffled = list(members)
    random.shuffle(shuffled)
    assert [e.id for e in preference(key, members)] == [e.id for e in preference(key, shuffled)]


@given(KEYS, st.integers(2, 12))
def test_only_conversations_that_preferred_a_lost_endpoint_move(key: int, count: int) -> None:
    members = endpoints(count)
    order = preference(key, members)
    without = [e for e in members if e is not order[1]]
    assert preference(key, without)[0] is order[0]


def test_keys_spread_evenly_over_endpoints() -> None:
    members = endpoints(4)
    homes = Counter(preference(key * 0x9E3779B97F4A7C15 % 2**64, members)[0].id for key in range(4000))
    assert min(homes.values()) > 850


def test_a_weighted_split_follows_its_weights() -> None:
    routes = {"m": RouteSpec(pools=[WeightedPool(pool="a", weight=2), WeightedPool(pool="b", weight=1)])}
    route = fleet({"a": 1, "b": 1}, routes).routes["m"]
    picked = Counter(pool_preference(key * 0x9E3779B97F4A7C15 % 2**64, route.pools)[0].name for key in range(6000))
    assert 1.8 < picked["a"] / picked["b"] < 2.2


@given(KEYS, st.lists(st.integers(0, 60), min_size=1, max_size=10))
def test_the_first_choice_is_always_within_the_load_bound(key: int, loads: list[int]) -> None:
    members = endpoints(len(loads))
    for endpoint, load in zip(members, loads, strict=True):
        endpoint.state.in_flight = load
    order = preference(key, members)
    chosen = within_bounds(order)
    assert chosen[0].state.in_flight + 1 <= load_bound(sum(loads), len(loads))
    assert sorted(e.id for e in chosen) == sorted(e.id for e in members)


def test_a_conversation_stays_home_until_home_is_over_the_bound_and_then_spills() -> None:
    view = fleet({"p": 3}, {"m": RouteSpec(pool="p")})
    home = plan(request(), view).attempts[0]
    assert home.reason == "affinity"
    home.endpoint.state.in_flight = LOAD_FLOOR - 1
    assert plan(request(), view).attempts[0].endpoint is home.endpoint
    home.endpoint.state.in_flight = LOAD_FLOOR
    spilled = plan(request(), view).attempts[0]
    assert (spilled.endpoint is home.endpoint, spilled.reason) == (False, "spill")


def test_a_pinned_conversation_goes_home_however_loaded_home_is_and_nowhere_else() -> None:
    view = fleet({"p": 3}, {"m": RouteSpec(pool="p")})
    home = plan(request(), view).attempts[0].endpoint
    home.state.in_flight = 1000
    pinned = msgspec.structs.replace(request(), pinned=True)
    assert [attempt.endpoint for attempt in plan(pinned, view).attempts] == [home]


def test_a_plan_lists_every_endpoint_that_can_serve_the_fallback_pools_last() -> None:
    view = fleet({"a": 2, "b": 2}, {"m": RouteSpec(pool="a", fallback=["b"])})
    attempts = plan(request(), view).attempts
    assert [attempt.pool.name for attempt in attempts] == ["a", "a", "b", "b"]
    assert [attempt.reason for attempt in attempts] == ["affinity", "fallback", "fallback", "fallback"]


def test_who_stands_in_for_a_pool_that_cannot_serve_is_called_so() -> None:
    view = fleet({"a": 2, "b": 2}, {"m": RouteSpec(pool="a", fallback=["b"])})
    for endpoint in view.pools["a"].endpoints:
        endpoint.state.phase = "unhealthy"
    assert {(attempt.pool.name, attempt.reason) for attempt in plan(request(), view).attempts} == {("b", "fallback")}


def test_an_endpoint_that_is_not_serving_gets_no_request() -> None:
    view = fleet({"a": 2, "b": 1}, {"m": RouteSpec(pool="a", fallback=["b"])})
    for phase in ("starting", "draining", "preempting", "unhealthy"):
        for endpoint in view.pools["a"].endpoints:
            endpoint.state.phase = phase
        assert [attempt.endpoint.id for attempt in plan(request(), view).attempts] == ["b-0"]


def test_a_request_goes_to_a_pool_that_can_do_what_it_asks() -> None:
    view = fleet({"a": 1, "b": 1}, {"m": RouteSpec(pool="a", fallback=["b"])})
    view.endpoints["a-0"].state.capabilities = frozenset({"messages"})
    needs = frozenset({"messages", "tools"})
    assert [a.endpoint.id for a in plan(request(needs=needs), view).attempts] == ["b-0"]
    assert plan(request(needs=frozenset({"messages"})), view).attempts[0].endpoint.id == "a-0"


def refusal(prompt: PromptView, view: FleetView) -> ApiError:
    with pytest.raises(ApiError) as refused:
        plan(prompt, view)
    return refused.value


def test_what_no_engine_can_do_is_refused_by_the_parameters_name() -> None:
    view = fleet({"a": 2}, {"m": RouteSpec(pool="a")})
    for endpoint in view.endpoints.values():
        endpoint.state.capabilities = frozenset({"messages"})
    error = refusal(request(needs=frozenset({"messages", "messages:image_url"})), view)
    assert (error.status, error.param, error.code) == (400, "messages", "unsupported_parameter")


def test_a_kserve_request_goes_to_tritons_only() -> None:
    view = fleet({"a": 1}, {"m": RouteSpec(pool="a")})
    kserve = PromptView("kserve", "m", True, False, frozenset(), (), 0, 1)
    assert refusal(kserve, view).status == 400


def test_an_unknown_model_is_404_and_a_fleet_that_is_down_503_with_retry_after() -> None:
    view = fleet({"a": 1}, {"m": RouteSpec(pool="a")}, ready=False)
    assert (refusal(request("nope"), view).status, refusal(request("nope"), view).param) == (404, "model")
    error = refusal(request(), view)
    assert (error.status, error.retry_after) == (503, 1)
    assert "a-0 starting" in error.message


def test_a_recompiled_view_forgets_neither_load_nor_phase_of_endpoints_that_stayed() -> None:
    spec = FleetSpec(
        fleet="f",
        pools={"p": PoolSpec(protocol="openai", model="x", endpoints=[EndpointSpec(id="e", http="http://h:1")])},
        routes={"m": RouteSpec(pool="p")},
    )
    documents = file_documents(spec, content_hash="h")
    before = compile_view(merge(documents), FleetView())
    before.endpoints["e"].state.in_flight = 3
    after = compile_view(merge(documents), before)
    assert after.endpoints["e"].state is before.endpoints["e"].state
    moved = FleetSpec(
        fleet="f",
        pools={"p": PoolSpec(protocol="openai", model="x", endpoints=[EndpointSpec(id="e", http="http://h:2")])},
    )
    other = compile_view(merge(file_documents(moved, content_hash="i")), after)
    assert other.endpoints["e"].state.in_flight == 0


def test_a_view_leaves_out_what_refers_to_nothing_and_says_so() -> None:
    view = fleet({"a": 1}, {"m": RouteSpec(pool="a", fallback=["gone"]), "n": RouteSpec(pool="gone")})
    assert set(view.routes) == {"m"}
    assert [problem for problem in view.problems if "'gone'" in problem] == list(view.problems) != []


def test_a_refused_connection_is_proof_at_once_and_timeouts_only_in_a_row() -> None:
    state = EndpointState()

    def phase() -> str:
        return state.phase

    health.probe_answered(state, ready=True, detail="ready")
    health.probe_failed(state, "timed out", refused=False, limit=3)
    health.probe_failed(state, "timed out", refused=False, limit=3)
    assert phase() == "ready"
    health.probe_answered(state, ready=True, detail="ready")
    health.probe_failed(state, "timed out", refused=False, limit=3)
    assert phase() == "ready"
    health.probe_failed(state, "refused", refused=True, limit=3)
    assert phase() == "unhealthy"


def test_an_endpoint_that_never_answered_is_starting_not_unhealthy() -> None:
    state = EndpointState()
    health.probe_failed(state, "refused", refused=True, limit=3)
    assert (state.phase, state.detail) == ("starting", "refused")


class TestFullEndpoints:
    def view(self, sizes: dict[str, int], routes: dict[str, RouteSpec], in_flight: dict[str, int]) -> FleetView:
        view = fleet(sizes, routes)
        for endpoint in view.endpoints.values():
            endpoint.state.max_in_flight = 4
            endpoint.state.in_flight = in_flight.get(endpoint.id, 0)
        return view

    @given(KEYS, st.lists(st.integers(0, 6), min_size=1, max_size=8))
    def test_a_full_endpoint_gets_nothing_while_another_has_room(self, key: int, loads: list[int]) -> None:
        in_flight = {f"p-{n}": load for n, load in enumerate(loads)}
        decided = plan(request(key=key), self.view({"p": len(loads)}, {"m": RouteSpec(pool="p")}, in_flight))
        full = [attempt.endpoint.state.in_flight >= 4 for attempt in decided.attempts]
        assert full == sorted(full)
        assert len(full) == len(loads)
        assert decided.free == sum(max(4 - load, 0) for load in loads)

    @given(KEYS)
    def test_a_fallback_with_room_goes_before_a_full_pool(self, key: int) -> None:
        routes = {"m": RouteSpec(pool="p", fallback=["q"])}
        decided = plan(request(key=key), self.view({"p": 2, "q": 1}, routes, {"p-0": 4, "p-1": 4, "q-0": 3}))
        assert [attempt.endpoint.pool for attempt in decided.attempts] == ["q", "p", "p"]
        assert {attempt.reason for attempt in decided.attempts} == {"fallback"}
        assert decided.free == 1

    def test_who_stands_in_for_a_full_home_is_no_fallback(self) -> None:
        view = self.view({"p": 2}, {"m": RouteSpec(pool="p")}, {})
        home = plan(request(), view).attempts[0].endpoint
        home.state.in_flight = 4
        first, second = plan(request(), view).attempts
        assert (first.reason, second.reason, second.endpoint) == ("spill", "fallback", home)

    def test_where_nobody_has_room_the_order_is_as_ever(self) -> None:
        view = self.view({"p": 3}, {"m": RouteSpec(pool="p")}, {})
        order = [attempt.endpoint.id for attempt in plan(request(), view).attempts]
        for endpoint in view.endpoints.values():
            endpoint.state.in_flight = 4
        decided = plan(request(), view)
        assert ([attempt.endpoint.id for attempt in decided.attempts], decided.free) == (order, 0)
        assert decided.attempts[0].reason == "affinity"

    def test_a_plan_says_whether_others_could_go_elsewhere(self) -> None:
        view = self.view({"p": 2}, {"m": RouteSpec(pool="p")}, {})
        assert not plan(request(needs=frozenset({"x"})), view).narrowed
        view.endpoints["p-0"].state.capabilities = frozenset()
        assert not plan(request(), view).narrowed
        decided = plan(request(needs=frozenset({"x"})), view)
        assert (decided.narrowed, decided.free, len(decided.attempts)) == (True, 4, 1)
        assert plan(request(), view).only(lambda endpoint: endpoint.id == "p-0").narrowed
