"""When a gateway is ready, and what only degrades it."""

import json
from dataclasses import replace

import msgspec
import pytest

from gateway.admin.readiness import readiness
from gateway.admin.view import Workers
from gateway.metrics import FleetCollector
from router.fleet import FleetView, compile_view
from router.merge import merge
from router.spec.documents import DiscoveryReport, file_documents
from router.spec.fleet import DiscoverSpec, FleetSpec
from router.state.follower import FleetStatus

CONNECTED = FleetStatus(connected=True)


def fleet(phase: str = "ready") -> FleetView:
    spec = msgspec.convert(
        {
            "fleet": "demo",
            "pools": {
                "p": {"protocol": "openai", "model": "m", "endpoints": [{"id": "a", "http": "http://127.0.0.1:1"}]}
            },
            "routes": {"r": {"pool": "p"}},
        },
        FleetSpec,
    )
    view = compile_view(merge(file_documents(spec, content_hash="h")), FleetView())
    view.endpoints["a"].state.phase = phase  # type: ignore[assignment]
    return view


def test_a_gateway_with_a_ready_endpoint_is_ready() -> None:
    answer = readiness("serving", fleet(), CONNECTED)
    assert (answer.status, answer.reasons, answer.degraded) == ("ready", [], [])
    assert answer.detail["endpoints"] == {"ready": 1}


@pytest.mark.parametrize("lifecycle", ["starting", "draining"])
def test_a_gateway_that_starts_or_drains_is_not_ready(lifecycle: str) -> None:
    answer = readiness(lifecycle, fleet(), CONNECTED)  # type: ignore[arg-type]
    assert answer.status == "not_ready"
    assert lifecycle in answer.reasons[0]


@pytest.mark.parametrize("phase", ["starting", "warming", "draining", "preempting", "unhealthy"])
def test_without_a_servable_route_a_gateway_is_not_ready(phase: str) -> None:
    answer = readiness("serving", fleet(phase), CONNECTED)
    assert answer.status == "not_ready"
    assert answer.detail["routes_without_ready_endpoint"] == ["r"]
    assert readiness("serving", FleetView(), CONNECTED).status == "not_ready"


def test_a_lost_redis_and_another_file_degrade_but_do_not_take_the_gateway_away() -> None:
    lost = FleetStatus(connected=False, lost_since=0.0, file_differs=True, error="Redis at x cannot be reached: no.")
    answer = readiness("serving", fleet(), lost)
    assert answer.status == "ready"
    assert [entry.partition(":")[0] for entry in answer.degraded] == ["redis", "file_differs"]
    assert answer.detail["redis"]["lost_since"] == "1970-01-01T00:00:00+00:00"
    assert json.loads(msgspec.json.encode(answer))["status"] == "ready"


def test_a_gateway_without_redis_is_not_degraded_by_that() -> None:
    assert readiness("serving", fleet(), FleetStatus(configured=False)).degraded == []


def degraded_metric(view: FleetView, state: FleetStatus) -> float:
    collector = FleetCollector(lambda: view, lambda: 0, lambda: True, lambda: state, dict)
    (family,) = (family for family in collector.collect() if family.name == "headrace_discovery_degraded")
    return family.samples[0].value


def test_a_discovery_that_is_silent_or_in_trouble_degrades_only_fleets_that_discover() -> None:
    troubled = FleetStatus(connected=True, discovery=DiscoveryReport(by="x", degraded=["nodes: forbidden"]))
    assert readiness("serving", fleet(), troubled).degraded == []
    assert degraded_metric(fleet(), troubled) == 0
    view = fleet()
    pool = view.pools["p"]
    discover = msgspec.structs.replace(pool.spec, discover=DiscoverSpec(selector="a=b"))
    view.pools["p"] = replace(pool, spec=discover)
    assert readiness("serving", view, troubled).degraded == ["discovery: nodes: forbidden"]
    assert "headrace discovery" in readiness("serving", view, CONNECTED).degraded[0]
    assert degraded_metric(view, troubled) == degraded_metric(view, CONNECTED) == 1
    answer = readiness("serving", view, FleetStatus(connected=True, discovery=DiscoveryReport(by="x")))
    assert (answer.status, answer.degraded) == ("ready", [])


def test_one_worker_is_enough_to_be_ready_and_fewer_than_configured_is_degraded() -> None:
    few = readiness("serving", fleet(), CONNECTED, Workers(configured=3, serving=1))
    assert (few.status, few.degraded) == ("ready", ["workers: 1 of 3 serve; the log says why."])
    none = readiness("serving", fleet(), CONNECTED, Workers(configured=3, serving=0))
    assert none.status == "not_ready" and none.reasons[0].startswith("No worker serves")
    shown = msgspec.json.decode(msgspec.json.encode(none))["detail"]["workers"]
    assert shown == {"configured": 3, "serving": 0, "draining": 0}
