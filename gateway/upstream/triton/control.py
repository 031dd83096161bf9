"""What the gateway asks a Triton about itself and its model, over gRPC.

`Control` is what a probe needs, whichever API the endpoint has; `GrpcControl` also holds the endpoint's channel.

**Channel.** One connection per endpoint, not shared with other channels. It pings nothing: Triton answers pings on an
idle connection with GOAWAY. A host that has vanished without a word loses it when it has acknowledged nothing for 30 s,
as in `gateway.upstream.http2`: gRPC asks that of the kernel where it may ping, be it once in weeks. Calls fail at once
while the server is down, and reconnecting is tried at least once a second, so that an endpoint is back soon after its
server is. gRPC's own retries are off: whether a request may run twice is decided by dispatch.

**RPC.** A model that may answer with many messages is called with `ModelStreamInfer`, any other with `ModelInfer`,
whose errors have a status without `triton_grpc_error`: with that, Triton 2.51 was seen to crash on errors of such
models.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.upstream.base import Failure, Headers, UpstreamError
from gateway.upstream.http2.connection import UNACKNOWLEDGED_S
from gateway.upstream.triton.cancels import Canceller, seen
from gateway.upstream.triton.failures import from_status, is_stub_death
from gateway.upstream.triton.infer import STATUSES_ASKED_FOR, only_response
from gateway.upstream.triton.raw import SERVICE
from gateway.upstream.triton.vitals import Sign

_INT32_MAX = 2**31 - 1
_RECONNECT_MS = 1000


@dataclass(slots=True, frozen=True)
class Description:
    """What a server says of itself and a model: its version, `ModelMetadataResponse` and `ModelConfig`."""

    server_version: str
    metadata: Any
    config: Any


class Control(Protocol):
    """The questions of a probe. Each raises UpstreamError if the server cannot be asked."""

    async def unready(self, model: str) -> str | None:
        """Why the server or the model is not ready; None if both say they are."""

    async def describe(self, model: str) -> Description: ...

    async def failed_ns(self, model: str) -> int:
        """The nanoseconds that the model's failures have taken since it was loaded."""

    async def generate(self, message: Any, decoupled: bool, deadline: float) -> Sign:
        """Run a ModelInferRequest that asks for one token, for `deadline` seconds."""

    async def close(self) -> None: ...


class GrpcControl:
    """`Control` over gRPC."""

    def __init__(
        self,
        endpoint: str,
        address: str,
        connect_timeout: float,
        canceller: Canceller,
        own: Callable[[], Headers] = tuple,
    ) -> None:
        """`own` gives the metadata of what the gateway asks for itself."""
        self.own = own
        self._endpoint = endpoint
        self._canceller = canceller
        self.channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.max_send_message_length", _INT32_MAX),
                ("grpc.max_receive_message_length", _INT32_MAX),
                ("grpc.enable_retries", 0),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.keepalive_time_ms", _INT32_MAX - 1),  # the largest would switch off the next, too
                ("grpc.keepalive_timeout_ms", int(UNACKNOWLEDGED_S * 1000)),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
                # The smallest time a connection attempt is given, which with these back-offs is the time it is given.
                ("grpc.min_reconnect_backoff_ms", max(_RECONNECT_MS, int(connect_timeout * 1000))),
            ],
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        serialize = service_pb2.ModelInferRequest.SerializeToString
        self._infer_stream = self.channel.unary_stream(
            f"/{SERVICE}/ModelStreamInfer", serialize, service_pb2.ModelStreamInferResponse.FromString
        )
        self._infer_once = self.channel.unary_stream(f"/{SERVICE}/ModelInfer", serialize, only_response)

    def send(self, decoupled: bool) -> Callable[..., Any]:
        """What starts the RPC for a model."""
        start: Callable[..., Any] = self._infer_stream if decoupled else self._infer_once
        return start

    async def unready(self, model: str) -> str | None:
        server = await self._ask(self._stub.ServerReady, service_pb2.ServerReadyRequest())
        if not server.ready:
            return "the server is not ready"
        if not (await self._ask(self._stub.ModelReady, service_pb2.ModelReadyRequest(name=model))).ready:
            return f"model {model!r} is not ready"
        return None

    async def describe(self, model: str) -> Description:
        server = await self._ask(self._stub.ServerMetadata, service_pb2.ServerMetadataRequest())
        metadata = await self._ask(self._stub.ModelMetadata, service_pb2.ModelMetadataRequest(name=model))
        config = await self._ask(self._stub.ModelConfig, service_pb2.ModelConfigRequest(name=model))
        return Description(server.version, metadata, config.config)

    async def failed_ns(self, model: str) -> int:
        statistics = await self._ask(self._stub.ModelStatistics, service_pb2.ModelStatisticsRequest(name=model))
        return sum(version.inference_stats.fail.ns for version in statistics.model_stats)

    async def generate(self, message: Any, decoupled: bool, deadline: float) -> Sign:
        rpc = self.send(decoupled)(message, metadata=(STATUSES_ASKED_FOR, *self.own()))
        # A task of its own: gRPC cancels the RPC of a read that is cancelled, before it is the cancel's turn.
        reading = asyncio.ensure_future(self._read_token(rpc))
        reading.add_done_callback(seen)
        try:
            await asyncio.wait((reading,), timeout=deadline)
            return reading.result() if reading.done() else Sign.NOTHING
        except asyncio.CancelledError:
            raise self._left() from None
        finally:
            self._canceller.cancel(rpc)

    async def close(self) -> None:
        await self.channel.close()

    async def _read_token(self, rpc: Any) -> Sign:
        try:
            while (response := await rpc.read()) is not grpc.aio.EOF:
                if is_stub_death(response.error_message):
                    return Sign.DEAD
        except grpc.aio.AioRpcError as error:
            if is_stub_death(error.details()):
                return Sign.DEAD
            judged = from_status(error.code(), error.details(), endpoint=self._endpoint, received=False)
            if judged.endpoint_fault:
                raise judged from None
        return Sign.TOKEN

    async def _ask(self, method: Callable[..., Any], question: Any) -> Any:
        try:
            return await method(question, metadata=self.own())
        except grpc.aio.AioRpcError as error:
            raise from_status(error.code(), error.details(), endpoint=self._endpoint, received=False) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            raise self._left() from None

    def _left(self) -> BaseException:
        """A closed channel cancels its calls and refuses new ones; only a cancelled task may end as one."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return asyncio.CancelledError()
        return UpstreamError(Failure.CONNECT, f"Engine {self._endpoint} has left the fleet.")
