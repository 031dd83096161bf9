"""The access log and traces of KServe requests to a real Triton, over gRPC and over HTTP.

The collector is a fake, see `tests.otlp_collector`.
"""

import asyncio
from pathlib import Path

import aiohttp
import grpc
import msgspec
import pytest

from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, RouteSpec
from router.spec.gateway import GatewaySpec, TracingSpec
from tests.contract.grpc_front import channel, infer, scripted, stream
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.harness import FAST_PROBES, running_gateway
from tests.otlp_collector import attributes, collector

MODELS = ("ensemble", "ensemble_whole")
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = ("traceparent", f"00-{TRACE}-{SPAN}-01")


def fleet_of(triton: TritonModels, collector_url: str, log: Path) -> FleetSpec:
    pools = {
        f"p-{model}": PoolSpec(
            protocol="triton",
            model=model,
            endpoints=[EndpointSpec(id=f"{model}-a", grpc=triton.grpc, http=triton.http)],
            probe=FAST_PROBES,
        )
        for model in MODELS
    }
    gateway = GatewaySpec(grpc=":8001", access_log=str(log), tracing=TracingSpec(endpoint=collector_url, sample="0%"))
    routes = {f"r-{model}": RouteSpec(pool=f"p-{model}") for model in MODELS}
    return FleetSpec(fleet="test", pools=pools, routes=routes, gateway=gateway)


async def test_kserve_requests_are_told_of_over_grpc_and_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    log = tmp_path / "access.log"
    async with collector() as collecting, triton_models(*MODELS) as triton:
        async with running_gateway(fleet_of(triton, collecting.grpc_url, log)) as running:
            metadata = (TRACEPARENT, ("x-request-id", "mine"))
            async with channel(running.grpc_address) as opened:
                unary = await infer(opened, scripted("r-ensemble_whole", "hello"), metadata)
                streamed = await stream(opened, [scripted("r-ensemble", {"text": "abc", "cut": 1}, "1")], metadata)
                unknown = await infer(opened, scripted("r-nothing", "hello"), metadata)
            assert unary.code is streamed.code is grpc.StatusCode.OK
            assert unknown.code is grpc.StatusCode.NOT_FOUND
            async with aiohttp.ClientSession(headers=dict([TRACEPARENT])) as session:
                body = {"text_input": "hello", "max_tokens": 3}
                url = f"{running.url}/v2/models/r-ensemble_whole/generate"
                async with session.post(url, json=body) as response:
                    assert response.status == 200, await response.text()
            await collecting.until(lambda: len(collecting.spans) >= 11)
        async with asyncio.timeout(5):
            while log.read_bytes().count(b"\n") < 4:  # noqa: ASYNC110 - a file is no event
                await asyncio.sleep(0.02)

    service = "inference.GRPCInferenceService"
    requests = [span for span in collecting.spans if span.parent_span_id.hex() == SPAN]
    assert [span.name for span in requests] == [
        f"{service}/ModelInfer",
        f"{service}/ModelStreamInfer",
        f"{service}/ModelInfer",
        "POST /v2",
    ]
    of_unary = attributes(requests[0])
    assert of_unary == {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": "ModelInfer",
        "gen_ai.request.model": "r-ensemble_whole",
        "headrace.request_id": "mine",
    }
    assert attributes(requests[2])["error.type"] == "not_found"
    attempts = [span for span in collecting.spans if span.name.startswith("infer ")]
    assert [attributes(span)["server.address"] for span in attempts] == [
        *("ensemble_whole-a", "ensemble-a", "ensemble_whole-a"),
    ]
    assert [event.name for event in attempts[1].events] == ["first token"]

    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    assert [(line["path"], line["status"], line["code"], line["stream"], line["endpoint"]) for line in lines] == [
        (f"/{service}/ModelInfer", 200, None, False, "ensemble_whole-a"),
        (f"/{service}/ModelStreamInfer", 200, None, True, "ensemble-a"),
        (f"/{service}/ModelInfer", 404, "not_found", False, None),
        ("/v2/models/r-ensemble_whole/generate", 200, None, False, "ensemble_whole-a"),
    ]
    assert {line["api"] for line in lines} == {"kserve"} and {line["client"] for line in lines} == {"127.0.0.1"}
    assert {line["trace_id"] for line in lines} == {TRACE}
    assert lines[0]["request_id"] == "mine" and lines[0]["user_agent"].startswith("grpc")
