"""From the bytes of a KServe `ModelInferRequest` to what routing needs, without decoding a tensor.

A request can be hundreds of megabytes of tensors of which routing wants a name, a few parameters and the beginning of
a prompt. So the protobuf wire format is walked instead of parsed: every field says how long it is, and what is not
asked for is stepped over in one addition. Nothing is copied but names and the prompt itself.

Field numbers are those of `grpc_service.proto` (triton-inference-server/common): of `ModelInferRequest` model_name 1,
model_version 2, id 3, parameters 4, inputs 5, raw_input_contents 7. Raw contents belong to the inputs in their order,
those in shared memory left out; a `BYTES` element is its length (4 bytes, little endian) and its bytes. As protobuf has
it, the last occurrence of a field that is not repeated is the one that counts, and a name is renamed by appending it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_intdigest

from router.prefix import RAW_PROMPT_KEY_BYTES, chain_seed, conversation_key, session_key
from router.prompt import PromptView

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5

Field = tuple[int, int, int, int]
"""A field's number, its wire type, and the start and end of its payload; of a varint, its value and its end."""

_TEXT, _TOKEN_IDS = b"text_input", b"input_ids"
_ENDS_BEHIND = "a field that ends behind its message, or has no number"
_SHARED_MEMORY = b"shared_memory_region"
_GLANCE_BYTES = 256
"""An input's description of up to that size is searched for what matters before it is walked, which takes longer."""


class MalformedError(ValueError):
    """The bytes are not what a protobuf message looks like."""


class Inference(msgspec.Struct, frozen=True):
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
    """An input that may hold the prompt."""

    name: bytes
    datatype: bytes
    contents: tuple[int, int] | None
    raw: int
    """Its place among the raw contents; -1: in shared memory."""


def fields(message: bytes, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of `message[start:end]` in order. Raises MalformedError."""
    end = len(message) if end is None else end
    while start < end:
        field = _field(message, start, end)
        yield field
        start = field[3]


def _field(message: bytes, start: int, end: int) -> Field:
    """The field that begins at `start`."""
    tag = message[start]
    if tag < 0x80:  # as nearly all are: of one byte
        start += 1
    else:
        tag, start = _varint(message, start, end)
    wire = tag & 7
    if wire == LENGTH_DELIMITED:
        if start < end and message[start] < 0x80:
            length = message[start]
            start += 1
        else:
            length, start = _varint(message, start, end)
        first, stop = start, start + length
    elif wire == VARINT:
        first, stop = _varint(message, start, end)
    elif wire in (FIXED64, FIXED32):
        first, stop = start, start + (8 if wire == FIXED64 else 4)
    else:
        raise MalformedError(f"a field of wire type {wire}")
    if stop > end or tag < 8:
        raise MalformedError(_ENDS_BEHIND)
    return tag >> 3, wire, first, stop


def text_of(message: bytes, wanted: int) -> str:
    """The value of a string field, the last one if there are several, empty if there is none."""
    value = ""
    for number, wire, start, end in fields(message):
        if number == wanted and wire == LENGTH_DELIMITED:
            value = _text(message, start, end)
    return value


def read_infer(message: bytes, *, stream: bool, otherwise: int, salt: str = "") -> Inference:
    """The view of a `ModelInferRequest`; `otherwise` is the key (64 bits) of one that has neither prompt nor sequence.

    Raises MalformedError.
    """
    model = id_ = version = ""
    sequence: int | str = 0
    inputs: list[_Input] = []
    raw: list[tuple[int, int]] = []
    place = at = 0
    end = len(message)
    while at < end:
        # As in `fields`, without a generator: this is most of what a small request costs here.
        tag, start = message[at], at + 2
        if tag & 0x87 == LENGTH_DELIMITED and start < end and tag > 7:
            length = message[at + 1]
            if length > 0x7F:
                more = message[start]
                start += 1
                if more > 0x7F:  # 16 KiB or longer
                    length, start = _varint(message, at + 1, end)
                else:
                    length = length & 0x7F | more << 7
            number, at = tag >> 3, start + length
            if at > end:
                raise MalformedError(_ENDS_BEHIND)
        else:
            number, wire, start, at = _field(message, at, end)
            if wire != LENGTH_DELIMITED:
                continue
        if number == 7:
            raw.append((start, at))
        elif number == 5:
            if _tells_nothing(message, start, at):
                place += 1
                continue
            read, place = _read_input(message, start, at, place)
            if read is not None:
                inputs.append(read)
        elif number == 4:
            if (given := _sequence_id(message, start, at)) is not None:
                sequence = given
        elif number == 1:
            model = _text(message, start, at)
        elif number == 2:
            version = _text(message, start, at)
        elif number == 3:
            id_ = _text(message, start, at)
    seed = chain_seed(model, salt)
    canonical = _prompt(message, inputs, raw)
    if sequence:
        key = session_key(str(sequence))
    elif canonical:
        key = conversation_key((canonical[:RAW_PROMPT_KEY_BYTES],), seed)
    else:
        key = xxh3_64_intdigest(otherwise.to_bytes(8, "little"))
    prompt = PromptView("kserve", model, stream, False, frozenset(), (canonical,), seed, key, bool(sequence))
    return Inference(prompt, id_, bool(version), sequence)


def query_view(model: str, otherwise: int) -> PromptView:
    """The view of a request about a model (its readiness, metadata, ...), which any replica can answer."""
    key = xxh3_64_intdigest(otherwise.to_bytes(8, "little"))
    return PromptView("kserve", model, False, False, frozenset(), (), chain_seed(model, ""), key)


def _varint(message: bytes, start: int, end: int) -> tuple[int, int]:
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


def _text(message: bytes, start: int, end: int) -> str:
    try:
        return message[start:end].decode()
    except UnicodeDecodeError:
        raise MalformedError("a string that is not UTF-8") from None


def _sequence_id(message: bytes, start: int, end: int) -> int | str | None:
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


def _tells_nothing(message: bytes, start: int, end: int) -> bool:
    """Whether an input is seen at a glance to hold no prompt and to have its tensor among the raw contents."""
    if end - start > _GLANCE_BYTES:
        return False
    find = message.find
    return find(_TEXT, start, end) < 0 > find(_TOKEN_IDS, start, end) and find(_SHARED_MEMORY, start, end) < 0


def _read_input(message: bytes, start: int, end: int, raw: int) -> tuple[_Input | None, int]:
    """An input if it may hold the prompt, and the place of the next among the raw contents; `raw` is its own."""
    name = datatype = b""
    contents = None
    shared = False
    for number, wire, at, stop in fields(message, start, end):
        if wire != LENGTH_DELIMITED:
            continue
        if number == 1:
            name = message[at:stop]
        elif number == 2:
            datatype = message[at:stop]
        elif number == 4:
            shared = shared or _SHARED_MEMORY in message[at:stop]
        elif number == 5:
            contents = (at, stop)
    found = _Input(name, datatype, contents, -1 if shared else raw) if name in (_TEXT, _TOKEN_IDS) else None
    return found, raw if shared else raw + 1


def _prompt(message: bytes, inputs: list[_Input], raw: list[tuple[int, int]]) -> bytes:
    """The prompt's text, or its token ids as they are encoded; empty if there is none to be found."""
    prompt = ids = b""
    for read in inputs:
        content = b""
        if 0 <= read.raw < len(raw):
            start, end = raw[read.raw]
            content = _first_element(message, start, end) if read.datatype == b"BYTES" else message[start:end]
        elif read.contents is not None:
            first = next((f for f in fields(message, *read.contents) if f[1] == LENGTH_DELIMITED), None)
            content = message[first[2] : first[3]] if first is not None else b""
        if read.name == _TEXT:
            prompt = content
        else:
            ids = content
    return prompt or ids


def _first_element(message: bytes, start: int, end: int) -> bytes:
    """The first element of a BYTES tensor; of a malformed one, what there is of it: the engine will refuse it."""
    length = int.from_bytes(message[start : min(start + 4, end)], "little")
    return message[start + 4 : min(start + 4 + length, end)]
