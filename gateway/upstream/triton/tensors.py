"""Typed values to and from the raw tensor bytes of Triton's gRPC protocol.

Requests use `raw_input_contents`: entry *i* is the little-endian, row-major content of input *i*; an element of a BYTES
tensor is its length (uint32) and its bytes. Answers always come that way, one entry per output. Of texts and figures
only element 0 is ever read, because one prompt is sent and a message is a part of one sequence.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from gateway.upstream.triton.contract import (
    ACCEPTED_TOKENS,
    COMPLETION_TOKENS,
    DRAFT_TOKENS,
    FINISH_REASON,
    LOG_PROBS,
    PROMPT_TOKENS,
    REUSED_BLOCKS,
    SEQUENCE,
    TEXT,
    TOKEN_COUNT,
    TOKENS,
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
_INTEGER_BITS = {"UINT8": 8, "UINT32": 32, "UINT64": 64}
_LENGTH = struct.Struct("<I")


_ANSWER = (TEXT, TOKENS, TOKEN_COUNT, FINISH_REASON, COMPLETION_TOKENS)
_USAGE = (PROMPT_TOKENS, REUSED_BLOCKS, DRAFT_TOKENS, ACCEPTED_TOKENS)


def build_request(
    contract: Contract,
    prompt: str | Sequence[int],
    parameters: Parameters,
    *,
    request_id: str,
    stream: bool,
    usage: bool,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """The ModelInferRequest for one prompt, of declared inputs only. `usage`: ask for token counts too.

    `prompt` is a text, or its token ids for a contract that takes those; there `extra` holds the fields that are made
    of tokens. `request_id` must be unique at the server: TensorRT-LLM addresses a running request by it.
    """
    several = parameters.n > 1
    wanted = (
        *_ANSWER,
        *(_USAGE if usage else ()),
        *((LOG_PROBS,) if parameters.logprobs else ()),
        *((SEQUENCE,) if several else ()),
    )
    asked = [field for field in wanted if field in contract.outputs]
    values: dict[str, Any] = {
        "prompt": prompt,
        "prompt_length": len(prompt),
        "max_tokens": parameters.max_tokens,
        "stream": stream,
        "exclude_prompt": True,
        **parameters.sampling,
        **({"n": parameters.n} if several else {}),
        **{f"return {field}": True for field in asked},
    }
    if contract.kind == "raw":
        values |= extra or {}
    elif parameters.stop:
        values["stop"] = parameters.stop
    request = service_pb2.ModelInferRequest(model_name=contract.model, id=request_id)
    # Without it, a model that ends with a flag alone would end its stream silently.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    sent: set[str] = set()
    for field, value in values.items():
        tensor = contract.inputs.get(field)
        if tensor is not None and tensor.name not in sent:  # one flag may ask for several figures
            sent.add(tensor.name)
            add_input(request, tensor, value, batched=contract.batched)
    request.outputs.extend(
        service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=contract.outputs[field]) for field in asked
    )
    return request


def add_input(request: Any, tensor: Tensor, value: Any, *, batched: bool) -> None:
    """Add a tensor to a ModelInferRequest; `batched` puts a dimension of one in front.

    `value` is an element, a sequence of them, or a sequence of equally long sequences.
    """
    elements: Sequence[Any] = (value,) if isinstance(value, str) or not isinstance(value, Sequence) else value
    shape = [len(elements)]
    if elements and isinstance(elements[0], Sequence) and not isinstance(elements[0], str):
        shape.append(len(elements[0]))
        elements = [element for row in elements for element in row]
    request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[1, *shape] if batched else shape)
    request.raw_input_contents.append(_pack(tensor.datatype, elements))


def _pack(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        contents = [str(value).encode() for value in values]
        return b"".join(_LENGTH.pack(len(content)) + content for content in contents)
    if datatype[0] == "U":
        # A negative seed keeps its bits where the tensor is unsigned; other integers are in range already.
        mask = (1 << _INTEGER_BITS[datatype]) - 1
        values = [int(value) & mask for value in values]
    return struct.pack(f"<{len(values)}{_FORMATS[datatype].format[-1]}", *values)


def unpack_row(datatype: str, raw: bytes) -> tuple[Any, ...]:
    """All elements of a number tensor. Raises ValueError if they are no numbers or one is cut short."""
    form = _FORMATS.get(datatype)
    if form is None:
        raise ValueError(f"a tensor of {datatype} where numbers are expected")
    if len(raw) % form.size:
        raise ValueError("a number is cut short")
    return struct.unpack(f"<{len(raw) // form.size}{form.format[-1]}", raw)


def unpack_texts(raw: bytes) -> list[str]:
    """All elements of a BYTES tensor that was made of texts."""
    texts, at = [], 0
    while at < len(raw):
        end = at + 4 + _LENGTH.unpack_from(raw, at)[0]
        texts.append(raw[at + 4 : end].decode())
        at = end
    return texts


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
