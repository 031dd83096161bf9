"""Traces of a running gateway: what is recorded, what it looks like, and that it costs a request nothing.

The collector is a fake, see `tests.otlp_collector`, but where it says that it is real; the engines are scripted, since
no real one dies to order.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from gateway.telemetry import tracing
from router.spec.fleet import EndpointSpec, FleetSpec
from router.spec.gateway import TracingSpec
from tests.harness import (
    CHAT,
    DONE,
    ONE,
    STREAM,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    free_port,
    one_pool,
    running_gateway,
)
from tests.otlp_collector import Collector, attributes, collector, real_collector

USED = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
USAGE = b"data: %b\n\n" % msgspec.json.encode({"choices": [], "usage": USED})
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OTHER = f"00-{'a' * 32}-{SPAN}-01"
RECORDED, NOT_RECORDED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are exported at once, and a collector that is away is soon given up."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


@pytest.fixture
async def collecting() -> AsyncIterator[Collector]:
    async with collector() as running:
        yield running


def traced(fleet: FleetSpec, endpoint: str | None, protocol: Any = "grpc", sample: str = "100%") -> FleetSpec:
    spec = TracingSpec(endpoint=endpoint, protocol=protocol, sample=sample)
    return msgspec.structs.replace(fleet, gateway=msgspec.structs.replace(fleet.gateway, tracing=spec))


async def answers(connection: EngineConnection) -> None:
    if b"die" in connection.body:
        await connection.events(ONE)
        connection.reset()
        return
    await connection.stream(ONE, STOP, USAGE, DONE)


async def refuses(connection: EngineConnection) -> None:
    await connection.head("content-length: 0", status="503 Service Unavailable")


async def ask(running: RunningGateway, body: dict[str, Any] = STREAM, **headers: str) -> int:
    async with aiohttp.ClientSession() as session:
        url = f"{running.url}/v1/chat/completions"
        async with session.post(url, json=body, headers=headers) as response:
            await response.read()
            return response.status


def attempts(collecting: Collector) -> list[Span]:
    return [span for span in collecting.spans if span.kind == Span.SPAN_KIND_CLIENT]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_collector_gets_the_span_tree_of_a_request_over_either_protocol(
    collecting: Collector, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=sesame")
    url = collecting.grpc_url if protocol == "grpc" else collecting.http_url
    async with ScriptedEngine(answers) as engine:
        async with running_gateway(traced(one_pool(engine.endpoint()), url, protocol)) as running:
            assert await ask(running, traceparent=RECORDED, tracestate="vendor=1") == 200
            await collecting.until(lambda: len(collecting.spans) >= 3)
    assert collecting.headers[0]["x-collector-key"] == "sesame"
    attempt = assert_span_tree(collecting)
    (asked,) = engine.requests
    assert asked.headers["traceparent"] == f"00-{TRACE}-{attempt.span_id.hex()}-01"
    assert asked.headers["tracestate"] == "vendor=1"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_real_collector_takes_the_span_tree_and_passes_it_on_as_it_was(
    collecting: Collector, protocol: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    async with real_collector(collecting, tmp_path) as real, ScriptedEngine(answers) as engine:
        url = real.grpc_url if protocol == "grpc" else real.http_url
        async with running_gateway(traced(one_pool(engine.endpoint()), url, protocol)) as running:
            assert await ask(running, traceparent=RECORDED, tracestate="vendor=1") == 200
            await collecting.until(lambda: len(collecting.spans) >= 3)
            sample = "headrace_spans_total", {"outcome": "exported"}
            await running.until(lambda: running.gateway.registry.get_sample_value(*sample) == 3, "it has said so")
        attempt = assert_span_tree(collecting)
        said = real.output.read_text()
    assert f"ID             : {attempt.span_id.hex()}" in said and "-> Name: first token" in said


def assert_span_tree(collecting: Collector) -> Span:
    """That it is the whole of a request that `answers` answered. Returns the span of its attempt."""
    resource = collecting.resource
    assert (resource["service.name"], resource["service.namespace"]) == ("headrace", "test")
    assert resource["deployment.environment.name"] == "test"

    spans = {span.name: span for span in collecting.spans}
    request, decision, attempt = spans["POST /v1/chat/completions"], spans["decision"], spans["chat engine-model"]
    assert len(spans) == 3
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert request.parent_span_id.hex() == SPAN and request.kind == Span.SPAN_KIND_SERVER
    assert decision.parent_span_id == attempt.parent_span_id == request.span_id
    assert attempt.kind == Span.SPAN_KIND_CLIENT
    assert request.trace_state == "vendor=1"
    answer = {
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    told = attributes(request)
    assert told.pop("headrace.request_id")
    assert told == answer | {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
    }
    assert attributes(attempt) == answer | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "engine-model",
        "server.address": "engine",
        "headrace.pool": "p",
        "headrace.reason": "affinity",
        "headrace.attempt": 1,
    }
    (first,) = attempt.events
    assert first.name == "first token"
    times = [request.start_time_unix_nano, decision.start_time_unix_nano, decision.end_time_unix_nano]
    times += [attempt.start_time_unix_nano, first.time_unix_nano, attempt.end_time_unix_nano]
    assert times == sorted(times) and attempt.end_time_unix_nano <= request.end_time_unix_nano
    return attempt


async def test_each_attempt_is_a_span_that_says_how_it_failed(collecting: Collector) -> None:
    async with ScriptedEngine(refuses) as busy, ScriptedEngine(answers) as engine:
        nobody = EndpointSpec(id="nobody", http=f"http://127.0.0.1:{busy.port}")
        fleet = one_pool(nobody, engine.endpoint())
        async with running_gateway(traced(fleet, collecting.grpc_url)) as running:
            for number in range(20):
                assert await ask(running, {**STREAM, "messages": [{"role": "user", "content": f"{number}"}]}) == 200
                if busy.requests:
                    break
            await collecting.until(lambda: len(attempts(collecting)) > number + 1)
    second = next(one for one in attempts(collecting) if attributes(one)["headrace.attempt"] == 2)
    first = next(one for one in attempts(collecting) if one.trace_id == second.trace_id and one != second)
    assert attributes(first)["server.address"] == "nobody" and attributes(first)["error.type"] == "busy"
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert attributes(second)["server.address"] == "engine" and second.status.code == Status.STATUS_CODE_UNSET
    assert first.end_time_unix_nano <= second.start_time_unix_nano
    assert {f"00-{first.trace_id.hex()}-{one.span_id.hex()}-01" for one in (first, second)} == {
        busy.requests[0].headers["traceparent"],
        engine.requests[-1].headers["traceparent"],
    }


async def test_an_answer_that_broke_off_is_an_error_of_the_request_and_of_the_attempt(collecting: Collector) -> None:
    async with ScriptedEngine(answers) as engine:
        async with running_gateway(traced(one_pool(engine.endpoint()), collecting.grpc_url)) as running:
            assert await ask(running, {**STREAM, "user": "die"}) == 200
            await collecting.until(lambda: len(collecting.spans) >= 3)
    by_name = {span.name: span for span in collecting.spans}
    request, attempt = by_name["POST /v1/chat/completions"], by_name["chat engine-model"]
    assert attributes(request)["error.type"] == "engine_died" and attributes(attempt)["error.type"] == "died"
    assert request.status.code == attempt.status.code == Status.STATUS_CODE_ERROR


async def test_a_client_that_does_not_record_its_trace_is_not_traced_and_its_traceparent_goes_on(
    collecting: Collector,
) -> None:
    async with ScriptedEngine(answers) as engine:
        async with running_gateway(traced(one_pool(engine.endpoint()), collecting.grpc_url)) as running:
            assert await ask(running, traceparent=NOT_RECORDED) == 200
            assert await ask(running, traceparent=RECORDED) == 200
            await collecting.until(lambda: len(collecting.spans) >= 3)
    assert len(collecting.spans) == 3
    assert engine.requests[0].headers["traceparent"] == NOT_RECORDED


async def test_latencies_show_traces_to_scrapers_of_openmetrics_and_only_those_that_are_recorded(
    collecting: Collector,
) -> None:
    async with ScriptedEngine(answers) as engine:
        fleet = traced(one_pool(engine.endpoint()), collecting.grpc_url, sample="0%")
        async with running_gateway(fleet) as running, aiohttp.ClientSession() as session:

            async def shown(**headers: str) -> dict[str, set[str]]:
                """The traces that are shown, by the sample."""
                async with session.get(f"{running.admin_url}/metrics", headers=headers) as response:
                    text = await response.text()
                openmetrics = response.content_type == "application/openmetrics-text"
                assert openmetrics == bool(headers)
                parse = openmetrics_families if openmetrics else text_families
                samples = [sample for family in parse(text) for sample in family.samples]
                found: dict[str, set[str]] = {}
                for sample in samples:
                    if sample.exemplar is not None:
                        assert sample.value > 0 and sample.exemplar.value <= float(sample.labels["le"])
                        found.setdefault(sample.name, set()).add(sample.exemplar.labels["trace_id"])
                return found

            asked = {"accept": "application/openmetrics-text; version=1.0.0"}
            assert await ask(running) == await ask(running, traceparent=NOT_RECORDED) == 200
            assert await shown(**asked) == {}
            assert await ask(running, traceparent=RECORDED) == 200
            histograms = ("headrace_request_duration_seconds", "headrace_time_to_first_token_seconds")
            assert await shown(**asked) == {f"{name}_bucket": {TRACE} for name in histograms}
            assert await shown() == {}


@pytest.mark.parametrize("state", ["not one", "a=1,a=2", "a=1," * 40 + "b=2", "A=1", "a=", ",", "x" * 5000])
async def test_a_tracestate_that_is_none_is_no_line_in_the_log_and_goes_on(
    collecting: Collector, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(answers) as engine:
        async with running_gateway(traced(one_pool(engine.endpoint()), collecting.grpc_url)) as running:
            assert await ask(running, traceparent=RECORDED, tracestate=state) == 200
            await collecting.until(lambda: len(collecting.spans) >= 3)
    assert engine.requests[0].headers["tracestate"] == state
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


async def test_nothing_is_sampled_that_is_not_to_be_but_for_traces_of_clients(
    collecting: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MOST_FOLLOWED", 2)
    async with ScriptedEngine(answers) as engine:
        async with running_gateway(traced(one_pool(engine.endpoint()), collecting.grpc_url, sample="0%")) as running:
            observer = running.gateway._live.observer
            assert observer is not None and observer._tracing is not None
            monkeypatch.setattr(observer._tracing, "_second", float("inf"))  # all of them in one second
            assert await ask(running) == 200
            for _ in range(4):
                assert await ask(running, traceparent=RECORDED) == 200
            await collecting.until(lambda: len(collecting.spans) >= 6)
    assert len(collecting.spans) == 6
    assert "traceparent" not in engine.requests[0].headers
    assert [one.headers["traceparent"] == RECORDED for one in engine.requests[1:]] == [False, False, True, True]


async def test_a_collector_that_is_away_costs_spans_and_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 30)
    async with ScriptedEngine(answers) as engine:
        nowhere = f"http://127.0.0.1:{free_port()}"
        async with running_gateway(traced(one_pool(engine.endpoint()), nowhere)) as running:
            for _ in range(40):
                assert await ask(running) == 200

            def count(outcome: str) -> float:
                value = running.gateway.registry.get_sample_value("headrace_spans_total", {"outcome": outcome})
                return value or 0.0

            assert count("dropped") > 0
            await running.until(lambda: count("failed") > 0, "spans are given up", 15)
            assert count("exported") == 0
    lines = [one for one in caplog.records if one.name.startswith("opentelemetry")]
    assert len(lines) <= 1


async def test_waiting_in_a_queue_is_a_span_also_of_a_client_that_leaves(collecting: Collector) -> None:
    go_on = asyncio.Event()

    async def takes_its_time(connection: EngineConnection) -> None:
        await go_on.wait()
        await answers(connection)

    async with ScriptedEngine(takes_its_time) as engine:
        fleet = traced(one_pool(engine.endpoint(), max_in_flight=1), collecting.grpc_url)
        async with running_gateway(fleet) as running:
            first = asyncio.create_task(ask(running))
            await running.until(lambda: bool(engine.requests), "the engine is full")
            second = asyncio.create_task(ask(running, traceparent=RECORDED))
            await running.until(lambda: running.live_requests == 2, "one waits")
            third = asyncio.create_task(ask(running, traceparent=OTHER))
            await running.until(lambda: running.live_requests == 3, "two wait")
            third.cancel()
            await running.until(lambda: running.live_requests == 2, "one has left")
            go_on.set()
            assert await first == await second == 200
            await collecting.until(lambda: len(collecting.spans) >= 3 + 3 + 4)
    queues = {span.trace_id.hex(): span for span in collecting.spans if span.name == "queue"}
    assert set(queues) == {TRACE, OTHER[3:35]}
    (attempt,) = (one for one in attempts(collecting) if one.trace_id.hex() == TRACE)
    waited = queues[TRACE]
    assert waited.start_time_unix_nano < waited.end_time_unix_nano <= attempt.start_time_unix_nano
    assert attributes(waited) == {"headrace.queue.position": 1}
    (waits,) = running.gateway.examples()["headrace_queue_wait_seconds"]
    assert {example.trace_id for example in waits[1].values()} <= set(queues)
    assert not [one for one in attempts(collecting) if one.trace_id.hex() == OTHER[3:35]]


async def test_neither_prompts_nor_answers_nor_keys_are_in_a_trace(collecting: Collector) -> None:
    body = {**STREAM, "messages": [{"role": "user", "content": "what nobody may know"}]}
    async with ScriptedEngine(answers) as engine:
        async with running_gateway(traced(one_pool(engine.endpoint()), collecting.grpc_url)) as running:
            assert await ask(running, body, authorization="Bearer sesame") == 200
            await collecting.until(lambda: len(collecting.spans) >= 3)
    sent = b"".join(one.SerializeToString() for one in collecting.received)
    assert b"nobody may know" not in sent and b"sesame" not in sent and b"one" not in sent.replace(b"None", b"")


async def test_the_last_spans_are_exported_when_the_gateway_stops(
    collecting: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    async with ScriptedEngine(answers) as engine:
        async with running_gateway(traced(one_pool(engine.endpoint()), collecting.grpc_url)) as running:
            assert await ask(running, CHAT | {"stream": True}) == 200
            await asyncio.sleep(0.1)
            assert not collecting.spans
        await collecting.until(lambda: len(collecting.spans) == 3)


def test_what_traces_need_is_not_even_imported_without_them() -> None:
    needed = ("opentelemetry.exporter", "opentelemetry.sdk.trace", "requests")  # redis-py imports others by itself
    look = f"import sys, gateway.app; sys.exit(any(name.startswith({needed}) for name in sys.modules))"
    subprocess.run([sys.executable, "-c", look], check=True)


async def test_a_setting_that_the_exporter_refuses_costs_traces_and_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "-1")
    async with ScriptedEngine(answers) as engine:
        async with running_gateway(traced(one_pool(engine.endpoint()), "http://127.0.0.1:9")) as running:
            assert await ask(running) == 200
    assert any("there are no traces" in one.getMessage() for one in caplog.records)
