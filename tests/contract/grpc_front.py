"""Asking the gRPC front and Triton itself the same, for the tests that compare them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as sync_client
from tritonclient.grpc import service_pb2, service_pb2_grpc

from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, RouteSpec, TimeoutSpec
from router.spec.gateway import GatewaySpec
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.harness import FAST_PROBES, RunningGateway, running_gateway

MODELS = ("ensemble", "ensemble_whole", "typed_identity", "sequence_sum", "patient")
INT32_MAX = 2**31 - 1

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class GrpcFront:
    """Two servers with the same models and a gateway before them, whose routes are named `r-` and the model."""

    a: TritonModels
    b: TritonModels
    running: RunningGateway

    @property
    def sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Addresses to ask, and what stands before a model's name there: the gateway's and a server's."""
        return ((self.running.grpc_address, "r-"), (self.a.grpc, ""))

    async def cancelled(self, model: str) -> int:
        """Cancellations that the model has counted on both servers."""
        return await self.a.cancelled(model) + await self.b.cancelled(model)

    async def until_cancelled(self, model: str, count: int, seconds: float = 2.0) -> None:
        """Wait until the model has counted `count` cancellations, or fail."""
        async with asyncio.timeout(seconds):
            while await self.cancelled(model) < count:  # noqa: ASYNC110 - a metric is no event
                await asyncio.sleep(0.05)


def front_spec(*servers: TritonModels, models: Iterable[str] = MODELS, idle: str = "60s") -> FleetSpec:
    """A pool and a route for every model, with an endpoint at every server."""
    pools = {
        f"p-{model}": PoolSpec(
            protocol="triton",
            model=model,
            endpoints=[EndpointSpec(id=f"{model}-{i}", grpc=server.grpc) for i, server in enumerate(servers)],
            probe=FAST_PROBES,
            timeouts=TimeoutSpec(idle=idle),
        )
        for model in models
    }
    routes = {f"r-{model}": RouteSpec(pool=f"p-{model}") for model in models}
    return FleetSpec(fleet="test", pools=pools, routes=routes, gateway=GatewaySpec(grpc=":8001"))


@contextlib.asynccontextmanager
async def grpc_front() -> AsyncIterator[GrpcFront]:
    async with triton_models(*MODELS) as a, triton_models(*MODELS) as b:
        async with running_gateway(front_spec(a, b)) as running:
            yield GrpcFront(a, b, running)


@contextlib.asynccontextmanager
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    options = [
        ("grpc.max_send_message_length", INT32_MAX),
        ("grpc.max_receive_message_length", INT32_MAX),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as opened:
        yield opened


def stub(opened: grpc.aio.Channel) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(opened)


def scripted(model: str, script: dict[str, Any] | str, id_: str = "", **parameters: Any) -> Any:
    """A request to a model of `scripted.py`."""
    prompt = script if isinstance(script, str) else json.dumps(script)
    request = service_pb2.ModelInferRequest(model_name=model, id=id_)
    for name, datatype, raw in (
        ("text_input", "BYTES", len(prompt.encode()).to_bytes(4, "little") + prompt.encode()),
        ("max_tokens", "INT32", (1000).to_bytes(4, "little")),
        ("stream", "BOOL", b"\x01"),
    ):
        tensor = request.inputs.add(name=name, datatype=datatype)
        tensor.shape.extend([1, 1])
        request.raw_input_contents.append(raw)
    for name, value in parameters.items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param" if isinstance(value, int) else "string_param"
        setattr(request.parameters[name], kind, value)
    return request


def patient(model: str, seconds: float, id_: str = "") -> Any:
    """A request to the model `patient`."""
    request = service_pb2.ModelInferRequest(model_name=model, id=id_)
    request.inputs.add(name="SECONDS", datatype="FP32").shape.append(1)
    request.raw_input_contents.append(np.array([seconds], dtype=np.float32).tobytes())
    return request


def step(model: str, value: int, sequence: int | str, *, start: bool = False, end: bool = False, id_: str = "") -> Any:
    """A request to the model `sequence_sum`."""
    request = service_pb2.ModelInferRequest(model_name=model, id=id_)
    request.inputs.add(name="VALUE", datatype="INT32").shape.extend([1, 1])
    request.raw_input_contents.append(np.array([value], dtype=np.int32).tobytes())
    kind = "int64_param" if isinstance(sequence, int) else "string_param"
    setattr(request.parameters["sequence_id"], kind, sequence)
    request.parameters["sequence_start"].bool_param = start
    request.parameters["sequence_end"].bool_param = end
    return request


@dataclass(frozen=True)
class Unary:
    """How a unary call ended."""

    code: grpc.StatusCode
    details: str
    response: Any
    metadata: dict[str, str]


async def infer(opened: grpc.aio.Channel, request: Any, metadata: Metadata = ()) -> Unary:
    call = stub(opened).ModelInfer(request, metadata=metadata)
    try:
        response = await call
    except grpc.aio.AioRpcError as error:
        return Unary(error.code(), error.details() or "", None, dict(error.trailing_metadata() or ()))
    return Unary(grpc.StatusCode.OK, "", response, dict(await call.trailing_metadata()))


@dataclass(frozen=True)
class Streamed:
    """How a stream ended, and what came before."""

    code: grpc.StatusCode
    details: str
    messages: list[Any]
    metadata: dict[str, str]

    def of(self, id_: str) -> list[Any]:
        return [message for message in self.messages if message.infer_response.id == id_]

    def text(self, id_: str) -> bytes:
        return b"".join(text_output(message.infer_response) for message in self.of(id_))


def text_output(response: Any) -> bytes:
    names = [tensor.name for tensor in response.outputs]
    raw: bytes = response.raw_output_contents[names.index("text_output")] if "text_output" in names else b""
    return raw[4:]


async def stream(opened: grpc.aio.Channel, requests: Sequence[Any], metadata: Metadata = ()) -> Streamed:
    """Send requests, half-close, and read to the end."""
    call = stub(opened).ModelStreamInfer(metadata=metadata)
    messages: list[Any] = []
    try:
        async with asyncio.timeout(30):
            for request in requests:
                await call.write(request)
            await call.done_writing()
            async for message in call:
                messages.append(message)  # noqa: PERF401 - what came before an error counts
    except grpc.aio.AioRpcError as error:
        return Streamed(error.code(), error.details() or "", messages, dict(error.initial_metadata() or ()))
    return Streamed(await call.code(), "", messages, dict(await call.initial_metadata()))


def without_name(message: Any, name: str) -> Any:
    """A response that must carry `name`, with that taken off; also what Triton says of its request ids in texts."""
    copied = type(message)()
    copied.CopyFrom(message)
    response = copied.infer_response if hasattr(copied, "infer_response") else copied
    if response.model_name:
        assert response.model_name == name
        response.model_name = ""
    return copied


def sync(address: str) -> Any:
    """Triton's own blocking client."""
    return sync_client.InferenceServerClient(address)
