"""A stand-in for Triton that answers at once with bytes it made before, so that the proxies in front are what is slow.

It reads no inference request: one above LARGE_BYTES is answered with a tensor of the same size, any other with a piece
of text, and on a stream with a fixed number of pieces. Probes are answered for the models of `messages`.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2

from headrace.bench.kserve.messages import (
    DECOUPLED,
    MODEL_OF_ROUTE,
    ONCE,
    STREAM,
    TENSOR,
    stream_responses,
    tensor_response,
    tensors_of,
    text_response,
)
from headrace.bench.kserve.server import serve

LARGE_BYTES: Final = 1024 * 1024
VERSION: Final = "2.71.0"
"""A version of Triton that clients need not be careful with."""


async def make_handlers(stream_messages: int) -> Mapping[str, Any]:
    """Method handlers; a request on a stream gets `stream_messages` responses."""
    once = text_response(MODEL_OF_ROUTE[ONCE])
    pieces = stream_responses(MODEL_OF_ROUTE[STREAM], stream_messages)

    async def infer(request: bytes, _: Any) -> bytes:
        if len(request) < LARGE_BYTES:
            return once
        return tensor_response(MODEL_OF_ROUTE[TENSOR], len(request) // LARGE_BYTES * LARGE_BYTES)

    async def infer_stream(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            for piece in pieces:
                await context.write(piece)

    return {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(infer),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(infer_stream),
        "ServerLive": _probe("ServerLive", lambda _: service_pb2.ServerLiveResponse(live=True)),
        "ServerReady": _probe("ServerReady", lambda _: service_pb2.ServerReadyResponse(ready=True)),
        "ModelReady": _probe(
            "ModelReady", lambda asked: service_pb2.ModelReadyResponse(ready=asked.name in MODEL_OF_ROUTE.values())
        ),
        "ServerMetadata": _probe(
            "ServerMetadata", lambda _: service_pb2.ServerMetadataResponse(name="triton", version=VERSION)
        ),
        "ModelMetadata": _probe("ModelMetadata", lambda asked: model_metadata(asked.name)),
        "ModelConfig": _probe("ModelConfig", lambda asked: model_config(asked.name)),
    }


def _probe(method: str, answer: Callable[[Any], Any]) -> Any:
    async def handle(request: Any, _: Any) -> Any:
        return answer(request)

    request_type = getattr(service_pb2, f"{method}Request")
    serialize = getattr(service_pb2, f"{method}Response").SerializeToString
    return grpc.unary_unary_rpc_method_handler(handle, request_type.FromString, serialize)


def model_metadata(model: str) -> Any:
    """The ModelMetadataResponse for one of the models."""
    metadata = service_pb2.ModelMetadataResponse(name=model, versions=["1"], platform="python")
    inputs, outputs = tensors_of(model)
    for name, datatype, shape in inputs:
        metadata.inputs.add(name=name, datatype=datatype, shape=shape)
    for name, datatype, shape in outputs:
        metadata.outputs.add(name=name, datatype=datatype, shape=shape)
    return metadata


def model_config(model: str) -> Any:
    """The ModelConfigResponse for one of the models."""
    config = model_config_pb2.ModelConfig(name=model, backend="python")
    config.max_batch_size = 0 if model == MODEL_OF_ROUTE[TENSOR] else 8
    config.model_transaction_policy.decoupled = model in DECOUPLED
    return service_pb2.ModelConfigResponse(config=config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--stream-messages", type=int, required=True)
    options = parser.parse_args()
    serve(options.listen, make_handlers(options.stream_messages))


if __name__ == "__main__":
    main()
