"""The requests' bodies on their way: as much as the server has room for, a frame of each stream in turn.

The server gives room to each stream and to all of them together (RFC 9113 section 5.2). A prompt of megabytes waits for
it as often as it takes, and what else is to be sent meanwhile does not wait for the prompt. Pure: frames are appended
to a list.
"""

from gateway.upstream.http2.frames import (
    DATA,
    END_STREAM,
    FRAME_BYTES,
    WINDOW,
    WINDOW_MOST,
    ErrorCode,
    Http2Error,
    head,
)
from gateway.upstream.http2.stream import Stream

Bytes = bytes | memoryview


class Sending:
    """What the streams of one connection have left to send."""

    __slots__ = ("_streams", "_window", "frame_bytes", "stream_window")

    def __init__(self) -> None:
        self._window = WINDOW
        self._streams: dict[Stream, None] = {}
        """Those that have something to send and room for it, in the order of their turns."""
        self.frame_bytes = FRAME_BYTES
        """The largest payload the server takes."""
        self.stream_window = WINDOW
        """The room that a new stream has."""

    def add(self, stream: Stream) -> None:
        """A stream that has begun."""
        stream.window = self.stream_window
        self._streams[stream] = None

    def remove(self, stream: Stream) -> None:
        """One that has ended."""
        self._streams.pop(stream, None)

    def push(self, out: list[Bytes]) -> None:
        """Append all frames that there is room for."""
        streams = self._streams
        while streams and self._window > 0:
            stream = next(iter(streams))
            del streams[stream]
            body = stream.unsent
            if body is None:
                continue
            size = min(len(body), stream.window, self._window, self.frame_bytes)
            if size <= 0:
                continue  # until it is given room
            last = size == len(body)
            out += (head(DATA, END_STREAM if last else 0, stream.id, size), body[:size])
            self._window -= size
            stream.window -= size
            stream.unsent = None if last else body[size:]
            if not last:
                streams[stream] = None

    def room(self, stream: Stream | None, increment: int) -> None:
        """The server has given room, to one stream or to all together. Raises Http2Error."""
        if stream is None:
            self._window = _widened(self._window, increment)
        else:
            stream.window = _widened(stream.window, increment)
            if stream.unsent is not None:
                self._streams[stream] = None

    def resize(self, window: int, streams: list[Stream]) -> None:
        """The server gives new streams this much room, and those that have begun the difference, which may be less than
        none (section 6.9.2). Raises Http2Error."""
        if window > WINDOW_MOST:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"windows of {window} bytes")
        by, self.stream_window = window - self.stream_window, window
        for stream in streams:
            self.room(stream, by)


def _widened(window: int, by: int) -> int:
    window += by
    if window > WINDOW_MOST:
        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {window} bytes")
    return window
