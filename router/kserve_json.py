"""What routing reads of a KServe v2 request in JSON: the opening of its prompt, and the sequence it belongs to.

Bodies of this API may be gigabytes, and they are passed on without being held; so all that is looked at is their first
`READ_AHEAD_BYTES`, which may end anywhere. What cannot be found there is not missed: a request without a readable
prompt is simply placed by turns. For the same reason nothing is refused here. Whatever is wrong with a body, Triton
says in its own words.

A prompt's opening is the same bytes whichever way it came (as a JSON string, as a binary tensor, through the OpenAI
API's raw prompt), so that it finds the replica that has it cached.
"""

import re
import struct
import zlib
from dataclasses import dataclass

import msgspec

from router.prefix import RAW_PROMPT_KEY_BYTES, chain_seed, conversation_key, session_key
from router.prompt import PromptView

READ_AHEAD_BYTES = 64 * 1024
"""How much of a body may be looked at: a prompt's opening with every character escaped takes 24 KiB of it."""

TEXT_INPUTS = ("text_input", "prompt")
"""Inputs that hold the prompt as text, in the contracts of TensorRT-LLM and of vLLM's backend."""
IDS_INPUT = "input_ids"
"""The input that holds the prompt as token ids (INT32)."""

_ESCAPED = rb'(?:[^"\\]++|\\(?:u[0-9a-fA-F]{4}|[^u]))*+'
"""The inside of a JSON string, up to its end or to where the bytes end. A quoted `"text_input":` inside another string
has its quotes escaped, and is not taken for a key."""
_GENERATE_TEXT = re.compile(rb'(?<!\\)"(?:text_input|prompt)"\s*:[\s\[]*"(' + _ESCAPED + rb")")
_GENERATE_IDS = re.compile(rb'(?<!\\)"input_ids"\s*:[\s\[]*([-0-9,\s]+)')
_SEQUENCE = re.compile(rb'(?<!\\)"sequence_id"\s*:\s*(?:"(' + _ESCAPED + rb')"|([0-9]+))')
_ID = re.compile(rb'"id"\s*:\s*"([-0-9A-Za-z]+)"')
_INFER_TEXT_NAME = re.compile(rb'(?<!\\)"name"\s*:\s*"(?:text_input|prompt)"')
_INFER_IDS_NAME = re.compile(rb'(?<!\\)"name"\s*:\s*"input_ids"')
_TEXT_DATA = re.compile(rb'(?<!\\)"data"\s*:[\s\[]*"(' + _ESCAPED + rb")")
_IDS_DATA = re.compile(rb'(?<!\\)"data"\s*:[\s\[]*([-0-9,\s]+)')
_INT = re.compile(rb"-?[0-9]{1,10}")
_BYTES_LENGTH = struct.Struct("<I")
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


@dataclass(slots=True, frozen=True)
class Conversation:
    """What tells which conversation a request belongs to."""

    prompt: bytes = b""
    """The first `RAW_PROMPT_KEY_BYTES` of the prompt's text, or of its token ids as INT32; empty if not to be found."""
    sequence: str = ""
    """The id of the stateful sequence the request belongs to; empty if to none."""


class _TensorParameters(msgspec.Struct):
    binary_data_size: int | None = None


class _Tensor(msgspec.Struct):
    name: str = ""
    parameters: _TensorParameters | None = None


class _InferHeader(msgspec.Struct):
    inputs: list[_Tensor] = []


_HEADER = msgspec.json.Decoder(_InferHeader)


def read_generate(start: bytes) -> Conversation:
    """Of a `generate` or `generate_stream` body that begins with `start`."""
    return Conversation(_text(_GENERATE_TEXT.search(start)) or _ids(_GENERATE_IDS.search(start)), _sequence(start))


def read_infer(start: bytes, header_length: int | None) -> Conversation:
    """Of an `infer` body that begins with `start`. `header_length`: with the binary tensor extension, how
    many bytes of it are JSON; raw tensors follow."""
    header = start if header_length is None else start[:header_length]
    prompt = _infer_prompt(header)
    if not prompt and header_length is not None and len(header) == header_length:
        prompt = _binary_prompt(header, start)
    return Conversation(prompt, _sequence(header))


def read_id(start: bytes) -> str:
    """The client's id of the request whose body begins with `start`; empty if there is none to be found. Ids of other
    characters than letters, digits and dashes are not looked for."""
    at = start.find(b'"id"')
    found = _ID.search(start, at) if at >= 0 else None
    return found[1].decode() if found is not None else ""


def inflate_start(start: bytes) -> bytes:
    """The first `READ_AHEAD_BYTES` of what `start` begins to compress (gzip or deflate); empty if that is not what it
    is."""
    try:
        return zlib.decompressobj(_GZIP_OR_ZLIB).decompress(start, READ_AHEAD_BYTES)
    except zlib.error:
        return b""


def view(route: str, conversation: Conversation, session: str | None, turn: int, salt: str = "") -> PromptView:
    """The prompt view of a request to `route`. The client's own name for the conversation goes before what was read;
    a request that says nothing of itself is placed by its number, `turn`."""
    seed = chain_seed(route, salt)
    if session or conversation.sequence:
        key = session_key(session or conversation.sequence)
    elif conversation.prompt:
        key = conversation_key((conversation.prompt,), seed)
    else:
        key = session_key(str(turn))
    pinned = bool(conversation.sequence)
    return PromptView("kserve", route, False, False, frozenset(), (conversation.prompt,), seed, key, pinned)


def _infer_prompt(header: bytes) -> bytes:
    """The prompt in an infer request's JSON."""
    if name := _INFER_TEXT_NAME.search(header):
        return _text(_TEXT_DATA.search(header, name.end()))
    if name := _INFER_IDS_NAME.search(header):
        return _ids(_IDS_DATA.search(header, name.end()))
    return b""


def _binary_prompt(header: bytes, start: bytes) -> bytes:
    """The prompt in the raw tensors behind an infer request's JSON: they lie in the order of the inputs."""
    try:
        inputs = _HEADER.decode(header).inputs
    except (msgspec.MsgspecError, RecursionError):
        return b""
    at = len(header)
    for tensor in inputs:
        size = tensor.parameters.binary_data_size if tensor.parameters is not None else None
        if size is None or size < 0:
            continue
        raw = start[at : at + size]
        if tensor.name == IDS_INPUT:
            return raw[:RAW_PROMPT_KEY_BYTES]
        if tensor.name in TEXT_INPUTS:
            return _first_element(raw)
        at += size
    return b""


def _first_element(raw: bytes) -> bytes:
    """The first string of a raw BYTES tensor: each is its length as a little-endian uint32, then its bytes."""
    if len(raw) < _BYTES_LENGTH.size:
        return b""
    (length,) = _BYTES_LENGTH.unpack_from(raw)
    return raw[_BYTES_LENGTH.size : _BYTES_LENGTH.size + min(length, RAW_PROMPT_KEY_BYTES)]


def _text(found: re.Match[bytes] | None) -> bytes:
    if found is None:
        return b""
    return _unescaped(found[1])[:RAW_PROMPT_KEY_BYTES]


def _unescaped(content: bytes) -> bytes:
    """A JSON string's content as UTF-8; as it is, where it is no proper JSON or breaks off inside a character."""
    if b"\\" not in content:
        return content
    try:
        return msgspec.json.decode(b'"%b"' % content, type=str).encode()
    except msgspec.MsgspecError:
        return content


def _ids(found: re.Match[bytes] | None) -> bytes:
    if found is None:
        return b""
    most = RAW_PROMPT_KEY_BYTES // 4
    ids = [int(number[0]) & 0xFFFFFFFF for _, number in zip(range(most), _INT.finditer(found[1]), strict=False)]
    return struct.pack(f"<{len(ids)}I", *ids)


def _sequence(header: bytes) -> str:
    found = _SEQUENCE.search(header)
    if found is None:
        return ""
    name = _unescaped(found[1]) if found[1] is not None else found[2].lstrip(b"0")
    return name.decode("utf-8", "replace")
