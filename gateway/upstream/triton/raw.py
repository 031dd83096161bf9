"""One Triton server for requests that are Triton's own: messages go through as bytes, statuses as they are.

What a Triton client gets is exactly what Triton gives, so nothing here is translated. Failures are still judged by the
words of `failures`, for what follows from them (another endpoint, the endpoint's health), with one rule on top: what a
client did wrong never speaks against an endpoint, and only a client can be wrong with an INVALID_ARGUMENT, or with a
version it asked for.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.triton.cancels import Canceller, Rpc
from gateway.upstream.triton.failures import from_message, from_status, is_channels_own, is_stub_death
from gateway.upstream.triton.stops import is_unique
from gateway.upstream.triton.vitals import Vitals
from router.kserve import Inference

SERVICE = "inference.GRPCInferenceService"

_CLIENTS_FAULT = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNIMPLEMENTED: 501,
}
_CONFIG_TIMEOUT_S = 5.0

Metadata = tuple[tuple[str, str | bytes], ...]


class EngineStatusError(UpstreamError):
    """A failure that the engine itself gave a gRPC status to: the client gets both as they are."""

    def __init__(self, judged: UpstreamError, code: grpc.StatusCode, details: str) -> None:
        super().__init__(judged.failure, judged.message, judged.status, judged.code)
        self.grpc_code = code
        self.details = details


class RawTriton:
    """The server of one endpoint. `on_failure` is told every failure, and whether it says that a model's process is
    dead."""

    def __init__(
        self,
        endpoint: str,
        channel: Any,
        canceller: Canceller,
        vitals: Vitals,
        on_failure: Callable[[UpstreamError, bool], None],
        own: Callable[[], Metadata] = tuple,
    ) -> None:
        """`own` gives the metadata of what the gateway asks for itself."""
        self._own = own
        self._endpoint = endpoint
        self._channel = channel
        self._canceller = canceller
        self.vitals = vitals
        """Whether the model is alive; streams to it are listened to."""
        self._on_failure = on_failure
        self._unary: dict[str, Any] = {}
        self._infer_alone = channel.unary_stream(f"/{SERVICE}/ModelStreamInfer")
        self._decoupled: dict[str, bool] = {}

    def unary(self, method: str, message: bytes, metadata: Metadata, timeout: float | None = None) -> Any:
        """Start a unary RPC, for `timeout` seconds at most. Raises UpstreamError if the endpoint has left the fleet."""
        start = self._unary.get(method)
        if start is None:
            start = self._unary[method] = self._channel.unary_unary(f"/{SERVICE}/{method}")
        return self._started(start, message, metadata=metadata, timeout=timeout)

    def infer_alone(self, message: bytes, metadata: Metadata) -> Any:
        """Start a `ModelStreamInfer` of one request."""
        return self._started(self._infer_alone, message, metadata=metadata)

    @property
    def paced(self) -> bool:
        """Whether an RPC may have to wait for its turn to be cancelled."""
        return self._canceller.paced

    def cancel(self, rpc: Rpc, request_id: str = "") -> None:
        """Cancel an RPC of this server, when it is its turn; the engine is told to stop at once, where the client's id
        of the request allows it."""
        self._canceller.cancel(rpc, request_id if is_unique(request_id) else None)

    async def decoupled(self, model: str) -> bool:
        """Whether `model` may answer one request with many messages. Raises UpstreamError."""
        known = self._decoupled.get(model)
        if known is None:
            request = service_pb2.ModelConfigRequest(name=model).SerializeToString()
            try:
                answer = await self.unary("ModelConfig", request, self._own(), timeout=_CONFIG_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise self.judged(error, received=False, versioned=False) from None
            config = service_pb2.ModelConfigResponse.FromString(answer).config
            known = self._decoupled[model] = config.model_transaction_policy.decoupled
        return known

    def judged(self, error: grpc.aio.AioRpcError, *, received: bool, versioned: bool) -> UpstreamError:
        """What the end of an RPC means. `received`: the engine had begun to answer; `versioned`: the client had asked
        for one version of the model."""
        code, details = error.code(), error.details() or ""
        judged = from_status(code, details, endpoint=self._endpoint, received=received)
        if code in _CLIENTS_FAULT or _asked_for(judged, versioned):
            judged = UpstreamError(Failure.ENGINE, details, _HTTP_STATUS.get(code, 400), "engine_refused")
        elif code is grpc.StatusCode.NOT_FOUND:
            # Not there, but perhaps elsewhere; the next probe will tell whether that speaks against the endpoint.
            judged = UpstreamError(Failure.BUSY, details, 404, "engine_refused")
        self._note(judged, details)
        return judged if is_channels_own(code, details) else EngineStatusError(judged, code, details)

    def judged_text(self, text: str, found: Inference, *, received: bool) -> UpstreamError:
        """What an `error_message` inside a stream means for a request; `received` as for `judged`."""
        judged = from_message(text, endpoint=self._endpoint, received=received, request_id=found.id)
        if _asked_for(judged, found.versioned):
            judged = UpstreamError(Failure.ENGINE, text, 400, "engine_refused")
        self._note(judged, text)
        return judged

    def left(self) -> UpstreamError:
        """The failure of an RPC whose channel was closed under it."""
        return UpstreamError(Failure.CONNECT, f"Engine {self._endpoint} has left the fleet.", 503, "connect_failed")

    def _note(self, error: UpstreamError, details: str) -> None:
        if error.endpoint_fault:
            self._decoupled.clear()  # another model repository may come back
        self._on_failure(error, is_stub_death(details))

    def _started(self, start: Any, *arguments: Any, metadata: Metadata, timeout: float | None = None) -> Any:
        try:
            return start(*arguments, metadata=metadata, timeout=timeout)
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            raise self.left() from None


def _asked_for(judged: UpstreamError, versioned: bool) -> bool:
    """Whether all that is missing is the version that the client wanted, which tells nothing of the endpoint."""
    return versioned and judged.code == "model_unavailable"
