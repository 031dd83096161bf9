"""HTTP/1.1 framing (RFC 9112): heads of engines' answers, and bodies, those that clients send in chunks among them.

Only what a gateway needs: the head, and the three ways a body may be delimited. What could be read in two ways
(conflicting lengths, folded headers, bare line feeds) is refused instead of guessed at.
"""

import re
from functools import lru_cache
from typing import Protocol

import msgspec

HEAD_LIMIT = 64 * 1024
"""Bytes of a response head that are read before the engine is given up."""
_CHUNK_LINE_LIMIT = 4096
_TRAILER_LIMIT = 16 * 1024

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")
_VALUE_NEVER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_HEADER_NAME = re.compile(_TOKEN)
_WHOLE_SIZE = re.compile(rb"([1-9A-Fa-f][0-9A-Fa-f]{0,7})\r\n")
"""Size line of a chunk that is not the last, written as nearly all are."""
_LAST_CHUNK = b"0\r\n\r\n"
"""What a body ends with, written as nearly all do."""
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t -~\x80-\xff]*)?")
_TRAILER = re.compile(_TOKEN + rb":[\t -~\x80-\xff]*")


class FramingError(Exception):
    """What was read is not HTTP/1.1, or could be read in two ways."""


class ResponseHead(msgspec.Struct, frozen=True):
    """A response's status and headers (names in lower case), and how its body ends."""

    status: int
    headers: tuple[tuple[str, str], ...]
    chunked: bool
    content_length: int | None
    """None: chunked, or until the connection closes."""
    keep_alive: bool
    events: bool
    """The body is a stream of server-sent events that can be read as such."""

    def header(self, name: str) -> str | None:
        """The first value of header `name` (lower case)."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


@lru_cache(maxsize=64)
def parse_head(data: bytes) -> ResponseHead:
    """The head in `data`, which ends before the blank line. Raises FramingError.

    An engine's heads are all the same within a second, which is how often `date` changes, so the last ones are kept.
    """
    lines = data.split(b"\r\n")
    status_line = _STATUS_LINE.fullmatch(lines[0])
    if status_line is None:
        raise FramingError(f"not an HTTP/1.1 status line: {lines[0][:80]!r}")
    headers = tuple([_header(line) for line in lines[1:]])
    status = int(status_line[2])
    framing: dict[str, list[str]] = {"content-length": [], "transfer-encoding": [], "connection": []}
    kind, coding = "", "identity"
    for name, value in reversed(headers):
        if name in framing:
            framing[name] += [member.strip().lower() for member in value.split(",")]
        elif name == "content-type":
            kind = value
        elif name == "content-encoding":
            coding = value
    lengths, codings, connection = set(framing["content-length"]), framing["transfer-encoding"], framing["connection"]
    if codings not in ([], ["chunked"]):
        raise FramingError(f"transfer coding {', '.join(codings)!r} was not asked for")
    chunked = bool(codings)
    if len(lengths) > 1 or any(_LENGTH.fullmatch(length) is None for length in lengths):
        raise FramingError(f"conflicting or malformed content-length: {', '.join(sorted(lengths))[:80]!r}")
    if chunked and lengths:
        raise FramingError("both content-length and transfer-encoding")
    length = int(lengths.pop()) if lengths else None
    if status in (204, 304):
        chunked, length = False, 0
    version_keeps = status_line[1] == b"1" and "close" not in connection
    keep_alive = (version_keeps or "keep-alive" in connection) and (chunked or length is not None)
    events = coding == "identity" and kind[:17].lower() == "text/event-stream"
    return ResponseHead(status, headers, chunked, length, keep_alive, events)


def _header(line: bytes) -> tuple[str, str]:
    name, colon, value = line.partition(b":")
    if not colon or _HEADER_NAME.fullmatch(name) is None or _VALUE_NEVER.search(value):
        raise FramingError(f"malformed header line: {line[:80]!r}")
    return name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")


class BodyReader(Protocol):
    """Takes the framing off a body, however the reads are cut."""

    complete: bool
    """The body's framing says that all of it has been read."""
    leftover: bytes
    """Bytes after the end of the body."""
    error: FramingError | None
    """What ended the reading. Body bytes that came before it in the same read are still returned."""

    @property
    def at_boundary(self) -> bool:
        """Whether the next byte starts a chunk."""

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`, which are some; malformed framing sets `error`."""


def body_reader(head: ResponseHead) -> BodyReader:
    """The reader for the body behind `head`."""
    return ChunkedReader() if head.chunked else SizedReader(head.content_length)


class SizedReader:
    """A body of so many bytes, or one that ends with the connection (None)."""

    __slots__ = ("_remaining", "complete", "error", "leftover")

    at_boundary = False

    def __init__(self, size: int | None) -> None:
        self._remaining = size
        self.complete = size == 0
        self.leftover = b""
        self.error: FramingError | None = None

    def feed(self, data: bytes) -> bytes:
        if self._remaining is None:
            return data
        body, self.leftover = data[: self._remaining], data[self._remaining :]
        self._remaining -= len(body)
        self.complete = self._remaining == 0
        return body


class ChunkedReader:
    """A chunked body. Extensions and trailers are dropped."""

    __slots__ = ("_line", "_needs_line_end", "_remaining", "_trailer", "complete", "error", "leftover")

    def __init__(self) -> None:
        self._remaining = 0
        self._needs_line_end = False
        self._trailer = 0
        """Bytes of the last chunk's line and the trailers, once there."""
        self._line = b""
        self.complete = False
        """The last chunk and the trailers have been read."""
        self.leftover = b""
        self.error: FramingError | None = None

    @property
    def at_boundary(self) -> bool:
        return not (self._remaining or self._needs_line_end or self._line or self._trailer or self.complete)

    def feed(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        try:
            self._read(data, pieces)
        except FramingError as error:
            self.error = error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read(self, data: bytes, pieces: list[bytes]) -> None:
        position, end = 0, len(data)
        while position < end and not self.complete:
            if self._remaining:
                piece = data[position : position + self._remaining]
                pieces.append(piece)
                position += len(piece)
                self._remaining -= len(piece)
                self._needs_line_end = not self._remaining
                continue
            if not (self._line or self._needs_line_end or self._trailer):
                chunk = _WHOLE_SIZE.match(data, position)
                if chunk is not None:  # the usual chunk, all of it in this read
                    start = chunk.end()
                    stop = start + int(chunk[1], 16)
                    if data[stop : stop + 2] == b"\r\n":
                        pieces.append(data[start:stop])
                        position = stop + 2
                        continue
                elif data.startswith(_LAST_CHUNK, position):
                    position += len(_LAST_CHUNK)
                    self.complete = True
                    continue
            line_end = data.find(b"\n", position)
            if line_end < 0:
                self._line += data[position:]
                position = end
            else:
                line, self._line = self._line + data[position : line_end + 1], b""
                position = line_end + 1
                self._take_line(line)
            if len(self._line) + self._trailer > (_TRAILER_LIMIT if self._trailer else _CHUNK_LINE_LIMIT):
                raise FramingError("a chunk-size line or the trailers do not end")
        if self.complete:
            self.leftover = data[position:]

    def _take_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise FramingError("a chunk line ends in a bare line feed")
        content = line[:-2]
        if self._needs_line_end:
            if content:
                raise FramingError("a chunk is longer than its size")
            self._needs_line_end = False
        elif self._trailer:
            if content and _TRAILER.fullmatch(content) is None:
                raise FramingError(f"malformed trailer: {content[:80]!r}")
            self._trailer += len(line)
            self.complete = not content
        else:
            size = _CHUNK_SIZE.fullmatch(content)
            if size is None:
                raise FramingError(f"not a chunk size: {content[:40]!r}")
            self._remaining = int(size[1], 16)
            if not self._remaining:
                self._trailer = len(line)
