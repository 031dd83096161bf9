"""Several workers' reports read as one gateway, and what they are told travels whole."""

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry

from gateway.metrics import Metrics
from headrace.workers.channel import MESSAGE_LIMIT, Channel, ChannelClosedError, EndpointReport, Failed, Report, Stop
from headrace.workers.totals import Totals, take_over
from router.fleet import FleetView, Phase, compile_view
from router.merge import merge
from router.spec.documents import file_documents
from router.spec.fleet import EndpointSpec
from tests.harness import one_pool


def fleet() -> FleetView:
    spec = one_pool(EndpointSpec(id="e", http="http://127.0.0.1:1"))
    return compile_view(merge(file_documents(spec, content_hash="h")), FleetView())


def report(phase: Phase = "ready", detail: str = "", in_flight: int = 0, answered: int = 0) -> Report:
    metrics = Metrics()
    for _ in range(answered):
        metrics.answered("completions", "m", 200, 1.0, None)
    endpoints = {"e": EndpointReport(phase, detail, in_flight, False)}
    if answered:
        metrics.exemplify("completions", "m", 1.0, None, f"{answered:x}")
    return Report(
        serving=True,
        live_requests=0,
        cut=0,
        redis_connected=None,
        endpoints=endpoints,
        queues={},
        rows=metrics.rows(),
        examples=metrics.examples(),
        degraded=[],
    )


def test_an_endpoint_is_as_good_as_the_best_worker_sees_it_and_the_detail_names_the_others() -> None:
    view = fleet()
    state = view.endpoints["e"].state
    take_over(view, [(report("unhealthy", "refused"), True), (report("ready"), True), (report("ready"), True)])
    assert (state.phase, state.detail) == ("ready", "unhealthy for 1 of 3 workers: refused")
    take_over(view, [(report("unhealthy", "refused"), True), (report("unhealthy", "refused"), True)])
    assert (state.phase, state.detail) == ("unhealthy", "refused")


def test_a_worker_that_does_not_serve_has_no_say_on_phases_but_its_requests_count() -> None:
    view = fleet()
    state = view.endpoints["e"].state
    take_over(view, [(report("ready", in_flight=3), False), (report("unhealthy", "refused", in_flight=2), True)])
    assert (state.phase, state.in_flight) == ("unhealthy", 5)
    take_over(view, [])
    assert (state.phase, state.in_flight) == ("starting", 0)


def test_sums_do_not_fall_when_a_worker_ends_and_start_anew_when_their_route_is_gone() -> None:
    reports = [report(answered=2), report(answered=3)]
    totals = Totals(lambda: reports)
    registry = CollectorRegistry()
    registry.register(totals)

    def answered() -> float | None:
        return registry.get_sample_value(
            "headrace_requests_total", {"api": "completions", "route": "m", "status": "200"}
        )

    assert answered() == 5
    totals.ended(reports.pop())
    assert answered() == 5
    reports.append(report(answered=1))
    assert answered() == 6
    reports.clear()
    totals.followed(fleet(), FleetView())
    assert answered() is None


def test_the_last_trace_of_a_latency_is_shown_whichever_worker_had_it_and_when_that_has_ended() -> None:
    reports = [report(answered=10), report(answered=11)]
    totals = Totals(lambda: reports)

    def shown() -> set[str]:
        samples = [sample for family in totals.collect() for sample in family.samples]
        return {sample.exemplar.labels["trace_id"] for sample in samples if sample.exemplar is not None}

    assert shown() == {"b"}
    totals.ended(reports.pop())
    assert shown() == {"b"}
    reports.append(report(answered=12))
    assert shown() == {"c"}


async def test_messages_arrive_whole_and_a_closed_end_is_told() -> None:
    one, other = [await Channel.over(end) for end in socket.socketpair()]
    sent = report(answered=3)
    for message in (sent, Failed("http", "in use"), Stop()):
        one.send(message)
    assert [await other.receive() for _ in range(3)] == [sent, Failed("http", "in use"), Stop()]
    await one.close()
    with pytest.raises(ChannelClosedError):
        await other.receive()
    await other.close()


@pytest.mark.parametrize("sent", [(MESSAGE_LIMIT + 1).to_bytes(4), b"\0\0\0\x01\xc1", b"\0\0\0\x09abc"])
async def test_what_is_no_message_closes_the_channel(sent: bytes) -> None:
    near, far = socket.socketpair()
    channel = await Channel.over(near)
    with far:
        far.sendall(sent)
    async with asyncio.timeout(5):
        with pytest.raises(ChannelClosedError):
            await channel.receive()
    await channel.close()
