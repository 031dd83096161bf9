"""The yardstick: a gRPC proxy that moves bytes with grpc.aio and does nothing else.

No message is parsed. With `--engine-model` and `--client-model` the names are changed by appending protobuf fields, the
last of which wins: field 1 (`model_name`) to requests and responses, and to a stream's responses a field 2
(`infer_response`) that holds only it, which protobuf merges into the one before. That is the least a proxy can do that
has model names of its own.
"""

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

import grpc

from headrace.bench.kserve.server import SERVICE, channel_to, serve


def name_field(name: str) -> bytes:
    """`name` as protobuf field 1, to be appended to a ModelInferRequest or ModelInferResponse; nothing for no name."""
    return _field(1, name.encode()) if name else b""


def stream_name_field(name: str) -> bytes:
    """`name` as the model name of a ModelStreamInferResponse, to be appended; nothing for no name."""
    return _field(2, name_field(name)) if name else b""


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field; names here are shorter than the 128 bytes a one-byte length can tell."""
    if len(content) > 127:
        raise ValueError(f"{len(content)} bytes are too long for a name")
    return bytes([number << 3 | 2, len(content)]) + content


async def make_handlers(engine: str, engine_model: str, client_model: str) -> Mapping[str, Any]:
    """The two inference methods, forwarded to the server at `engine`."""
    channel = channel_to(engine)
    infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
    infer_stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
    asked, answered, streamed = name_field(engine_model), name_field(client_model), stream_name_field(client_model)

    async def forward(request: bytes, context: Any) -> bytes:
        response: bytes = await infer(request + asked if asked else request)
        return response + answered if answered else response

    async def forward_stream(_: Any, context: Any) -> None:
        call = infer_stream()
        sending = asyncio.create_task(_send(context, call, asked))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                await context.write(message + streamed if streamed else message)
        finally:
            sending.cancel()
            call.cancel()

    return {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(forward),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(forward_stream),
    }


async def _send(context: Any, call: Any, asked: bytes) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await call.write(message + asked if asked else message)
    await call.done_writing()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--engine-model", default="")
    parser.add_argument("--client-model", default="")
    options = parser.parse_args()
    serve(options.listen, make_handlers(options.engine, options.engine_model, options.client_model))


if __name__ == "__main__":
    main()
