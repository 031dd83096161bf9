"""Typed values to and from the raw tensor bytes of Triton's gRPC protocol.

Requests use `raw_input_contents`: entry *i* is the little-endian, row-major content of input *i*; an element of a BYTES
tensor is its length (uint32) and its bytes. Answers always come that way, one entry per output. Only element 0 is ever
read, because one prompt is sent and one sequence is asked for.
"""

import struct
from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from gateway.upstream.triton.contract import (
    COMPLETION_TOKENS,
    FINISH_REASON,
    PROMPT_TOKENS,
    REUSED_BLOCKS,
    TEXT,
    Contract,
    Tensor,
)
from gateway.upstream.triton.parameters import Parameters

_FORMATS = {
    "BOOL": struct.Struct("<?"),
    "UINT8": struct.Struct("<B"),
    "INT32": struct.Struct("<i"),
    "UINT32": struct.Struct("<I"),
    "INT64": struct.Struct("<q"),
    "UINT64": struct.Struct("<Q"),
    "FP16": struct.Struct("<e"),
    "FP32": struct.Struct("<f"),
    "FP64": struct.Struct("<d"),
}
_INTEGER_BITS = {"UINT8": 8, "INT32": 32, "UINT32": 32, "INT64": 64, "UINT64": 64}
_LENGTH = struct.Struct("<I")


def build_request(
    contract: Contract, prompt: str, parameters: Parameters, *, request_id: str, stream: bool, usage: bool
) -> Any:
    """The ModelInferRequest for one prompt, of declared inputs only. `usage`: ask for token counts too.

    `request_id` must be unique at the server: TensorRT-LLM addresses a running request by it.
    """
    wanted = [TEXT, FINISH_REASON, COMPLETION_TOKENS, *((PROMPT_TOKENS, REUSED_BLOCKS) if usage else ())]
    asked = [field for field in wanted if field in contract.outputs]
    values: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": parameters.max_tokens,
        "stream": stream,
        "exclude_prompt": True,
        **parameters.sampling,
        **{f"return {field}": True for field in asked},
    }
    if parameters.stop:
        values["stop"] = parameters.stop
    request = service_pb2.ModelInferRequest(model_name=contract.model, id=request_id)
    # Without it, a model that ends with a flag alone would end its stream silently.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for field, value in values.items():
        tensor = contract.inputs.get(field)
        if tensor is not None:
            _add_input(request, tensor, value, contract.batched)
    request.outputs.extend(
        service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=contract.outputs[field]) for field in asked
    )
    return request


def _add_input(request: Any, tensor: Tensor, value: Any, batched: bool) -> None:
    elements: Sequence[Any] = value if isinstance(value, tuple) else (value,)
    shape = [1, len(elements)] if batched else [len(elements)]
    request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
    request.raw_input_contents.append(b"".join(_pack(tensor.datatype, element) for element in elements))


def _pack(datatype: str, value: Any) -> bytes:
    if datatype == "BYTES":
        content = str(value).encode()
        return _LENGTH.pack(len(content)) + content
    bits = _INTEGER_BITS.get(datatype)
    # A negative seed keeps its bits where the tensor is unsigned; other integers are in range already.
    return _FORMATS[datatype].pack(int(value) & (1 << bits) - 1 if bits and datatype[0] == "U" else value)


def unpack_bytes(raw: bytes) -> bytes:
    """Element 0 of a BYTES tensor; empty if there is none. Raises ValueError if it is cut short."""
    if len(raw) < 4:
        return b""
    end = 4 + _LENGTH.unpack_from(raw)[0]
    if end > len(raw):
        raise ValueError("a BYTES element is longer than its tensor")
    return raw[4:end]


def unpack_integer(datatype: str, raw: bytes) -> int | None:
    """Element 0 of a number tensor, None if there is none. Some models send numbers as strings: those are read too."""
    if datatype == "BYTES":
        text = unpack_bytes(raw)
        return int(text) if text.isdigit() else None
    form = _FORMATS.get(datatype)
    return int(form.unpack_from(raw)[0]) if form is not None and len(raw) >= form.size else None
