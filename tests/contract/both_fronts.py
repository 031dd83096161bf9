"""Two Triton servers with the same models and a gateway before them, for tests of all of its fronts."""

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, ProbeSpec, RouteSpec, TimeoutSpec
from router.spec.gateway import GatewaySpec, RetrySpec
from tests.contract.grpc_front import infer, scripted, stream, text_output
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.harness import RunningGateway, running_gateway

PROBES = ProbeSpec(interval="50ms", timeout="5s")
"""As long as messages of 100 MB can keep this process from reading a probe's answer."""


@dataclass(frozen=True)
class Fronts:
    """The servers and the gateway, whose routes have their models' names and whose endpoints are `MODEL-a` and `-b`."""

    a: TritonModels
    b: TritonModels
    running: RunningGateway

    def phases(self, model: str) -> list[str]:
        endpoints = self.running.gateway.fleet.endpoints
        return [endpoints[f"{model}-{server}"].phase for server in "ab"]


def fronts_spec(models: tuple[str, ...], idle: str = "60s", **servers: TritonModels) -> FleetSpec:
    """A pool and a route for each model, with an endpoint at each server."""
    pools = {
        model: PoolSpec(
            protocol="triton",
            model=model,
            endpoints=[
                EndpointSpec(id=f"{model}-{name}", grpc=server.grpc, http=server.http)
                for name, server in servers.items()
            ],
            probe=PROBES,
            timeouts=TimeoutSpec(idle=idle),
            max_in_flight="off",  # as Triton has it
        )
        for model in models
    }
    routes = {model: RouteSpec(pool=model) for model in models}
    gateway = GatewaySpec(grpc=":8001", retry=RetrySpec(budget="off"))
    return FleetSpec(fleet="test", pools=pools, routes=routes, gateway=gateway)


@contextlib.asynccontextmanager
async def both_fronts(*models: str) -> AsyncIterator[Fronts]:
    async with triton_models(*models) as a, triton_models(*models) as b:
        async with running_gateway(fronts_spec(models, a=a, b=b)) as running:
            yield Fronts(a, b, running)


@dataclass(frozen=True)
class Side:
    """Where to ask: the gateway or a server."""

    url: str
    channel: grpc.aio.Channel
    http: aiohttp.ClientSession


Reply = tuple[bool, Any, str]
"""Whether a request was answered; what was said, comparable; the endpoint, if it is known."""
Ask = Callable[[Side, str, dict[str, Any]], Awaitable[Reply]]


async def by_unary(side: Side, model: str, script: dict[str, Any]) -> Reply:
    answer = await infer(side.channel, scripted(model, script, "an id"))
    ok = answer.code is grpc.StatusCode.OK
    said = text_output(answer.response) if ok else (answer.code, answer.details)
    return ok, said, answer.metadata.get("x-headrace-endpoint", "")


async def by_stream(side: Side, model: str, script: dict[str, Any]) -> Reply:
    return await _streamed(side, model, script, ())


async def by_stream_with_statuses(side: Side, model: str, script: dict[str, Any]) -> Reply:
    return await _streamed(side, model, script, (("triton_grpc_error", "true"),))


async def _streamed(side: Side, model: str, script: dict[str, Any], metadata: Any) -> Reply:
    answer = await stream(side.channel, [scripted(model, script, "an id")], metadata)
    errors = [message.error_message for message in answer.messages if message.error_message]
    ok = answer.code is grpc.StatusCode.OK and not errors and bool(answer.messages)
    said = answer.text("an id") if ok else (answer.code, answer.details, errors)
    return ok, said, answer.metadata.get("x-headrace-endpoint", "")


def _http(operation: str) -> Ask:
    async def ask(side: Side, model: str, script: dict[str, Any]) -> Reply:
        body: dict[str, Any] = {"text_input": json.dumps(script), "max_tokens": 1000}
        if operation == "infer":
            tensors = (("text_input", "BYTES"), ("max_tokens", "INT32"))
            body = {"inputs": [{"name": n, "datatype": t, "shape": [1, 1], "data": [body[n]]} for n, t in tensors]}
        async with side.http.post(f"{side.url}/v2/models/{model}/{operation}", json=body) as response:
            said = await response.read()
            ok = response.status == 200 and b'"error"' not in said
            return ok, (response.status, said), response.headers.get("x-headrace-endpoint", "")

    return ask


async def by_completion(side: Side, model: str, script: dict[str, Any]) -> Reply:
    body = {"model": model, "prompt": json.dumps(script), "max_tokens": 1000}
    async with side.http.post(f"{side.url}/v1/completions", json=body) as response:
        said = await response.json()
        retry_after = response.headers.get("retry-after")
        ok = response.status == 200
        found = said["choices"][0]["text"] if ok else (response.status, said["error"]["code"], retry_after)
        return ok, found, response.headers["x-headrace-endpoint"]


KSERVE: dict[str, Ask] = {
    "ModelInfer": by_unary,
    "ModelStreamInfer": by_stream,
    "ModelStreamInfer with statuses": by_stream_with_statuses,
    "infer": _http("infer"),
    "generate": _http("generate"),
    "generate_stream": _http("generate_stream"),
}


def ticks(model: str, count: int, seconds: float, id_: str = "", *, fail_first: bool = False) -> Any:
    """A request to the model `ticker`."""
    request = service_pb2.ModelInferRequest(model_name=model, id=id_)
    for name, datatype, value in (
        ("COUNT", "INT32", np.int32(count)),
        ("SECONDS", "FP32", np.float32(seconds)),
        ("FAIL_FIRST", "BOOL", np.bool_(fail_first)),
    ):
        request.inputs.add(name=name, datatype=datatype).shape.append(1)
        request.raw_input_contents.append(value.tobytes())
    return request
