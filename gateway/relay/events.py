"""Passing server-sent events on, whole.

What an engine sends must reach the client byte for byte and at once, yet the gateway has to be able to step in between
two events: to report that the engine died, never leaving half an event that a client would take for text. So bytes are
passed on up to the last event boundary seen, and what follows it is held until it is complete. Nearly always there is
nothing to hold: an engine writes one event, a read brings it, and `whole_chunks` sees in a few slices that the read
starts and ends on a chunk and an event boundary. Such a read goes to the client as it is, chunk framing included.

Framing is done on bytes: a character split over two reads is none of our business.
"""

import re

EVENT_LIMIT = 1024 * 1024
"""Bytes of one unfinished event that are held before the stream is given up."""

END_MARK = re.compile(rb"(?:\A|\n)data: ?\[DONE\]\r?(?:\n|\Z)")
"""The line that says that nothing of a stream is missing. A JSON string holds no line feed, so text that quotes the
mark is not taken for it."""

_CHUNK_SIZE = re.compile(rb"(0*[1-9A-Fa-f][0-9A-Fa-f]{0,7})\r\n")
"""Size line of a chunk that is not the last and has no extension."""
EVENT_END = b"\n\n\r\n"
_ONE_CHUNK = {len(line) + size + 2: line for size in range(2, 1024) for line in (b"%x\r\n" % size,)}
"""By its length, how a read begins that is one chunk, as engines write it. Nearly every read of a stream is one, and it
ends in `EVENT_END`."""


class EventTooLongError(Exception):
    """An event grew over `EVENT_LIMIT` without ending."""


def whole_chunks(data: bytes) -> bool:
    """Whether `data` is a run of complete HTTP/1.1 chunks, each of them ending an event, so that what is looked for in
    events may be looked for in `data`.

    The chunk that ends a body, chunk extensions and anything malformed give False: they take the long way.
    """
    if data[-4:] != EVENT_END:
        return False
    position, end = 0, len(data)
    size_line = _ONE_CHUNK.get(end)
    if size_line is not None and data.startswith(size_line):
        return True
    while position < end:
        found = _CHUNK_SIZE.match(data, position)
        if found is None:
            return False
        size = int(found[1], 16)
        position = found.end() + size + 2
        if size < 2 or data[position - 4 : position] != EVENT_END:  # of one byte, the other line feed is framing
            return False
    return position == end


class EventHolder:
    """Cuts a byte stream at event boundaries: what is complete goes out, the rest is held."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def holding(self) -> bool:
        """Whether part of an event is held."""
        return bool(self._held)

    @property
    def torn(self) -> bool:
        """Whether part of an event is held that cannot be its end: every line of an event ends, but the end mark."""
        return self.holding and not self._held.endswith(b"\n") and END_MARK.search(self._held) is None

    def feed(self, payload: bytes) -> bytes:
        """The complete events that `payload` brings to an end, held part included. Raises EventTooLongError."""
        cut = last_boundary(payload)
        if not self._held:
            if cut == len(payload):
                return payload
            whole, rest = payload[:cut], payload[cut:]
        elif cut := cut or _boundary_across(self._held, payload):
            whole, rest = bytes(self._held) + payload[:cut], payload[cut:]
            self._held.clear()
        else:
            whole, rest = b"", payload
        self._held += rest
        if len(self._held) > EVENT_LIMIT:
            raise EventTooLongError
        return whole

    def rest(self) -> bytes:
        """What is held, given up by the caller: an engine that ended its body cleanly ended its last event too."""
        rest = bytes(self._held)
        self._held.clear()
        return rest


def event_end(events: bytes, start: int = 0) -> int:
    """Where the first event from `start` ends, its blank line included; 0 if it does not."""
    unix, windows = events.find(b"\n\n", start), events.find(b"\n\r\n", start)
    if windows < 0 or 0 <= unix < windows:
        return unix + 2 if unix >= 0 else 0
    return windows + 3


def last_boundary(payload: bytes) -> int:
    """Where the last blank line in `payload` ends; 0 without one. Lines end in LF or CRLF."""
    if payload.endswith(b"\n\n"):
        return len(payload)
    unix, windows = payload.rfind(b"\n\n"), payload.rfind(b"\n\r\n")
    return max(unix + 2 if unix >= 0 else 0, windows + 3 if windows >= 0 else 0)


def _boundary_across(held: bytearray, payload: bytes) -> int:
    """How much of `payload` ends a blank line that begins in `held`; 0 if none does."""
    seam = bytes(held[-2:]) + payload[:2]
    offset = min(len(held), 2)
    for mark in (b"\n\n", b"\n\r\n"):
        at = seam.find(mark)
        if 0 <= at < offset < at + len(mark):
            return at + len(mark) - offset
    return 0
