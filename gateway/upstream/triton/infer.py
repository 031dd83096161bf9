"""The RPCs that OpenAI requests are made of, over an HTTP/2 client of our own (`gateway.upstream.http2`).

A model that may answer with many messages is called with `ModelStreamInfer`, any other with `ModelInfer`, whose answer
is read as the only message of a stream. Which of the two, `control` tells why.
"""

from collections.abc import Callable
from typing import Any

from tritonclient.grpc import service_pb2

from gateway.upstream.http2.channel import Channel
from gateway.upstream.http2.grpc_stream import GrpcStream, Receiver, framed
from gateway.upstream.http2.headers import encode
from gateway.upstream.triton.raw import SERVICE

STATUSES_ASKED_FOR = ("triton_grpc_error", "true")
"""Metadata that makes Triton end a stream with a status where it would send a message with an error."""


class InferMethod:
    """One of the two, at one server."""

    __slots__ = ("_channel", "_head", "decode")

    def __init__(self, channel: Channel, name: str, decode: Callable[[bytes], Any]) -> None:
        self._channel = channel
        self._head = channel.head(f"/{SERVICE}/{name}", STATUSES_ASKED_FOR)
        self.decode = decode
        """Makes a ModelStreamInferResponse of a message; see `ResponseReader`."""

    async def connect(self, timeout: float) -> None:
        """See that there is a connection. Raises UpstreamError if there is none within `timeout` seconds."""
        await self._channel.connect(timeout)

    def start(self, receiver: Receiver, message: Any, metadata: tuple[tuple[str, str], ...]) -> GrpcStream:
        """Send a ModelInferRequest, right after `connect`."""
        stream = GrpcStream(receiver)
        connection = self._channel.current
        assert connection is not None
        connection.start(stream, self._head + encode(metadata), framed(message.SerializeToString()))
        return stream


class InferMethods:
    """The RPCs of one server, all on one connection."""

    def __init__(self, endpoint: str, address: str, connect_timeout: float) -> None:
        self._channel = Channel(endpoint, address, connect_timeout)
        self.stream = InferMethod(self._channel, "ModelStreamInfer", service_pb2.ModelStreamInferResponse.FromString)
        self.once = InferMethod(self._channel, "ModelInfer", only_response)

    def close(self) -> None:
        """End all calls; those that come later find that the endpoint has left."""
        self._channel.close()


def only_response(message: bytes) -> Any:
    """ModelInfer's response, as the last message of a stream."""
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.MergeFromString(message)
    response.infer_response.parameters["triton_final_response"].bool_param = True
    return response
