"""From the bytes of a KServe `ModelInferRequest` to what routing needs, without decoding a tensor.

A request can be hundreds of megabytes of tensors of which routing wants a name, a few parameters and the beginning of
a prompt. So the protobuf wire format is walked instead of parsed: every field says how long it is, and what is not
asked for is stepped over in one addition. Nothing is copied but the prompt itself.

Field numbers are those of `grpc_service.proto` (triton-inference-server/common): of `ModelInferRequest` model_name 1,
model_version 2, id 3, parameters 4, inputs 5, raw_input_contents 7. Raw contents belong to the inputs in their order,
those in shared memory left out; a `BYTES` element is its length (4 bytes, little endian) and its bytes. As protobuf has
it, the last occurrence of a field that is not repeated is the one that counts, and a name is renamed by appending it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from router.prefix import RAW_PROMPT_KEY_BYTES, chain_seed, conversation_key, session_key
from router.prompt import PromptView

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5

Field = tuple[int, int, int, int]
"""A field's number, its wire type, and the start and end of its payload; of a varint, its value and its end."""

_PROMPT_TENSORS = ("text_input", "input_ids")
_SHARED_MEMORY = b"shared_memory_region"


class MalformedError(ValueError):
    """The bytes are not what a protobuf message looks like."""


@dataclass(slots=True, frozen=True)
class Inference:
    """What routing knows of one inference request."""

    prompt: PromptView
    id: str
    """The client's id of the request; may be empty, need not be unique."""
    versioned: bool
    """The client asked for one version of the model."""
    sequence: int | str
    """The client's id of the sequence the request belongs to; 0 or empty: of none."""


@dataclass(slots=True)
class _Input:
    name: str = ""
    datatype: str = ""
    shared_memory: bool = False
    contents: tuple[int, int] | None = None


def fields(message: memoryview, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of `message[start:end]` in order. Raises MalformedError."""
    end = len(message) if end is None else end
    while start < end:
        tag, start = _varint(message, start, end)
        number, wire = tag >> 3, tag & 7
        if wire == LENGTH_DELIMITED:
            length, start = _varint(message, start, end)
            stop = start + length
            found = (number, wire, start, stop)
        elif wire == VARINT:
            value, stop = _varint(message, start, end)
            found = (number, wire, value, stop)
        elif wire in (FIXED64, FIXED32):
            stop = start + (8 if wire == FIXED64 else 4)
            found = (number, wire, start, stop)
        else:
            raise MalformedError(f"a field of wire type {wire}")
        if stop > end or number == 0:
            raise MalformedError("a field that ends behind its message")
        yield found
        start = stop


def text_of(message: memoryview, wanted: int) -> str:
    """The value of a string field, the last one if there are several, empty if there is none."""
    value = ""
    for number, wire, start, end in fields(message):
        if number == wanted and wire == LENGTH_DELIMITED:
            value = _text(message, start, end)
    return value


def read_infer(message: bytes, *, stream: bool, otherwise: int) -> Inference:
    """The view of a `ModelInferRequest`; `otherwise` is the key (64 bits) of one that has neither prompt nor sequence.

    Raises MalformedError.
    """
    view = memoryview(message)
    model = id_ = version = ""
    sequence: int | str = 0
    inputs: list[_Input] = []
    raw: list[tuple[int, int]] = []
    for number, wire, start, end in fields(view):
        if wire != LENGTH_DELIMITED:
            continue
        if number == 7:
            raw.append((start, end))
        elif number == 5:
            inputs.append(_read_input(view, start, end))
        elif number == 4:
            if (given := _sequence_id(view, start, end)) is not None:
                sequence = given
        elif number == 1:
            model = _text(view, start, end)
        elif number == 2:
            version = _text(view, start, end)
        elif number == 3:
            id_ = _text(view, start, end)
    seed = chain_seed(model, "")
    canonical = _prompt(view, inputs, raw)
    if sequence:
        key = session_key(str(sequence))
    elif canonical:
        key = conversation_key(memoryview(canonical)[:RAW_PROMPT_KEY_BYTES], seed)
    else:
        key = xxh3_64_intdigest(otherwise.to_bytes(8, "little"))
    prompt = PromptView("kserve", model, stream, False, frozenset(), canonical, seed, key)
    return Inference(prompt, id_, bool(version), sequence)


def query_view(model: str, otherwise: int) -> PromptView:
    """The view of a request about a model (its readiness, metadata, ...), which any replica can answer."""
    key = xxh3_64_intdigest(otherwise.to_bytes(8, "little"))
    return PromptView("kserve", model, False, False, frozenset(), b"", chain_seed(model, ""), key)


def _varint(message: memoryview, start: int, end: int) -> tuple[int, int]:
    """An unsigned varint and where it ends."""
    value = shift = 0
    while start < end and shift < 70:
        byte = message[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, start
        shift += 7
    raise MalformedError("a number without end")


def _text(message: memoryview, start: int, end: int) -> str:
    try:
        return str(message[start:end], "utf-8")
    except UnicodeDecodeError:
        raise MalformedError("a string that is not UTF-8") from None


def _sequence_id(message: memoryview, start: int, end: int) -> int | str | None:
    """The value of a `parameters` entry if its key is `sequence_id`, a number or a string."""
    key, value = "", None
    for number, wire, at, stop in fields(message, start, end):
        if number == 1 and wire == LENGTH_DELIMITED:
            key = _text(message, at, stop)
        elif number == 2 and wire == LENGTH_DELIMITED:
            value = (at, stop)
    if key != "sequence_id" or value is None:
        return None
    found: int | str | None = None
    for number, wire, at, stop in fields(message, *value):
        if wire == VARINT and number in (2, 5):
            found = at
        elif wire == LENGTH_DELIMITED and number == 3:
            found = _text(message, at, stop)
    return found


def _read_input(message: memoryview, start: int, end: int) -> _Input:
    read = _Input()
    for number, wire, at, stop in fields(message, start, end):
        if wire != LENGTH_DELIMITED:
            continue
        if number == 1:
            read.name = _text(message, at, stop)
        elif number == 2:
            read.datatype = _text(message, at, stop)
        elif number == 4:
            read.shared_memory = read.shared_memory or _SHARED_MEMORY in bytes(message[at:stop])
        elif number == 5:
            read.contents = (at, stop)
    return read


def _prompt(message: memoryview, inputs: list[_Input], raw: list[tuple[int, int]]) -> bytes:
    """The prompt's text, or its token ids as they are encoded; empty if there is none to be found."""
    position = 0
    found: dict[str, bytes] = {}
    for read in inputs:
        tensor = None
        if raw and not read.shared_memory:
            tensor = raw[position] if position < len(raw) else None
            position += 1
        if read.name not in _PROMPT_TENSORS:
            continue
        if tensor is not None:
            payload = message[slice(*tensor)]
            found[read.name] = _first_element(payload) if read.datatype == "BYTES" else bytes(payload)
        elif read.contents is not None:
            first = next((f for f in fields(message, *read.contents) if f[1] == LENGTH_DELIMITED), None)
            found[read.name] = bytes(message[first[2] : first[3]]) if first is not None else b""
    return next((found[name] for name in _PROMPT_TENSORS if found.get(name)), b"")


def _first_element(payload: memoryview) -> bytes:
    """The first element of a BYTES tensor; of a malformed one, what there is of it: the engine will refuse it."""
    length = int.from_bytes(payload[:4], "little")
    return bytes(payload[4 : 4 + length])
