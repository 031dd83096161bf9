"""The messages of the load, serialized once: of the size and shape TensorRT-LLM's Triton models have.

The models' names are the engine's; the routes that lead to them are called otherwise, so that a gateway has to change
the name as it does in production.
"""

import functools
import struct
from typing import Any, Final

from tritonclient.grpc import service_pb2

MODEL_OF_ROUTE: Final = {"once": "ensemble", "stream": "tensorrt_llm_bls", "tensor": "identity"}
"""Route to engine model: text answered in one message, text in many messages, and one large tensor there and back."""
ONCE, STREAM, TENSOR = MODEL_OF_ROUTE
DECOUPLED: Final = frozenset({MODEL_OF_ROUTE[STREAM]})

PROMPT_BYTES: Final = 2048
_SENTENCE: Final = b"A headrace is the channel that feeds water to the turbines. "
PIECE: Final = b" turbines"
"""The text in each message of an answer."""


def text_request(model: str) -> bytes:
    """A ModelInferRequest with a prompt of PROMPT_BYTES for a model of the `ensemble` signature."""
    prompt = (_SENTENCE * (PROMPT_BYTES // len(_SENTENCE) + 1))[:PROMPT_BYTES]
    request = service_pb2.ModelInferRequest(model_name=model, id="bench")
    for name, datatype, raw in (
        ("text_input", "BYTES", _bytes_tensor(prompt)),
        ("max_tokens", "INT32", struct.pack("<i", 256)),
        ("stream", "BOOL", b"\x01"),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        request.raw_input_contents.append(raw)
    return _serialized(request)


def text_response(model: str) -> bytes:
    """A ModelInferResponse with one piece of text."""
    return _serialized(_text_response(model))


def stream_responses(model: str, count: int) -> list[bytes]:
    """The `count` ModelStreamInferResponses of one request; the last one is marked final, as Triton does it."""
    messages = []
    for final in [False] * (count - 1) + [True]:
        inferred = _text_response(model)
        inferred.parameters["triton_final_response"].bool_param = final
        messages.append(_serialized(service_pb2.ModelStreamInferResponse(infer_response=inferred)))
    return messages


@functools.lru_cache(maxsize=1)
def tensor_request(model: str, size: int) -> bytes:
    """A ModelInferRequest with one FP32 tensor of `size` bytes, a multiple of 4; made once."""
    request = service_pb2.ModelInferRequest(model_name=model, id="bench")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[size // 4])
    request.raw_input_contents.append(bytes(size))
    return _serialized(request)


@functools.lru_cache(maxsize=1)
def tensor_response(model: str, size: int) -> bytes:
    """The ModelInferResponse to `tensor_request`; made once."""
    response = service_pb2.ModelInferResponse(model_name=model, model_version="1", id="bench")
    response.outputs.add(name="OUTPUT0", datatype="FP32", shape=[size // 4])
    response.raw_output_contents.append(bytes(size))
    return _serialized(response)


def tensors_of(model: str) -> tuple[list[tuple[str, str, list[int]]], list[tuple[str, str, list[int]]]]:
    """Declared inputs and outputs of an engine model: name, Triton datatype, shape."""
    if model == MODEL_OF_ROUTE[TENSOR]:
        return [("INPUT0", "FP32", [-1])], [("OUTPUT0", "FP32", [-1])]
    inputs = [("text_input", "BYTES", [-1, 1]), ("max_tokens", "INT32", [-1, 1]), ("stream", "BOOL", [-1, 1])]
    return inputs, [("text_output", "BYTES", [-1, 1])]


def _text_response(model: str) -> Any:
    response = service_pb2.ModelInferResponse(model_name=model, model_version="1", id="bench")
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    response.raw_output_contents.append(_bytes_tensor(PIECE))
    return response


def _bytes_tensor(text: bytes) -> bytes:
    """A BYTES tensor of one element: its length as uint32 LE, then the bytes (KServe v2's raw representation)."""
    return struct.pack("<I", len(text)) + text


def _serialized(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized
