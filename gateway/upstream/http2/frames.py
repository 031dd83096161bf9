"""HTTP/2 frames to and from bytes (RFC 9113 sections 4 and 6). Pure: no I/O, and no state but an unfinished frame."""

import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client's connection begins with (section 3.4)."""
DATA: Final = 0x0
HEADERS: Final = 0x1
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

FRAME_BYTES: Final = 16384
"""The largest payload that anyone may send without having been told otherwise; we take no larger ones."""
FRAME_BYTES_MOST: Final = 2**24 - 1
HEAD_BYTES: Final = 9
WINDOW: Final = 65535
"""The size a flow-control window has to begin with."""
WINDOW_MOST: Final = 2**31 - 1
STREAM_ID_MOST: Final = 2**31 - 1

_HEAD = struct.Struct(">BHBBI")
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_TWO_NUMBERS = struct.Struct(">II")
_RESERVED = 0x7FFFFFFF

Frame = tuple[int, int, int, bytes]
"""Type, flags, stream id, payload."""


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Http2Error(Exception):
    """The server did what ends the connection, with `code` for it to know why (section 5.4.1)."""

    def __init__(self, code: ErrorCode, what: str) -> None:
        super().__init__(what)
        self.code = code


class FrameReader:
    """Frames out of bytes, however those were cut."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes, one when it is asked for the next. Raises Http2Error behind those
        that come before a frame that is too large."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at, size = 0, len(data)
        unpack = _HEAD.unpack_from
        while size - at >= HEAD_BYTES:
            high, low, kind, flags, stream = unpack(data, at)
            length = high << 16 | low
            if length > FRAME_BYTES:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = at + HEAD_BYTES + length
            if end > size:
                break
            yield kind, flags, stream & _RESERVED, data[at + HEAD_BYTES : end]
            at = end
        self._rest = data[at:]


def head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """What comes before a payload of `length` bytes."""
    return _HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return head(kind, flags, stream, len(payload)) + payload


def headers(stream: int, block: bytes, largest: int) -> bytes:
    """A HEADERS frame, and as many CONTINUATION frames as it takes with payloads of at most `largest` bytes."""
    pieces = [block[at : at + largest] for at in range(0, len(block), largest)] or [b""]
    last = len(pieces) - 1
    return b"".join(
        frame(CONTINUATION if at else HEADERS, END_HEADERS if at == last else 0, stream, piece)
        for at, piece in enumerate(pieces)
    )


def settings(values: Mapping[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in values.items()))


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(increment))


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(code: ErrorCode, why: str = "") -> bytes:
    """Of a client, whose server has begun no streams: the last of them is 0."""
    return frame(GOAWAY, 0, 0, _TWO_NUMBERS.pack(0, code) + why.encode())


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Identifiers and values, in their order. Raises Http2Error."""
    if len(payload) % _SETTING.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    return list(_SETTING.iter_unpack(payload))


def read_number(payload: bytes, what: str) -> int:
    """The one number of a RST_STREAM or WINDOW_UPDATE frame. Raises Http2Error."""
    if len(payload) != _NUMBER.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes")
    return int(_NUMBER.unpack(payload)[0])


def read_goaway(payload: bytes) -> tuple[int, int, bytes]:
    """The last stream that was or may be worked on, an error code, and words on it. Raises Http2Error."""
    if len(payload) < _TWO_NUMBERS.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
    last, code = _TWO_NUMBERS.unpack_from(payload)
    return last & _RESERVED, code, payload[_TWO_NUMBERS.size :]


def unpadded(flags: int, payload: bytes) -> bytes:
    """What a DATA or HEADERS payload holds, without padding and priority (sections 6.1, 6.2). Raises Http2Error."""
    start = end = 0
    if flags & PADDED:
        start, end = 1, payload[0] if payload else 1
    if flags & HAS_PRIORITY:
        start += 5
    if start + end > len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[start : len(payload) - end]
