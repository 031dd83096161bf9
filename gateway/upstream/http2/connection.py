"""One HTTP/2 connection to a server, and its streams (RFC 9113).

All that a read of the socket holds is worked off in `data_received`: frames are taken apart and given to their streams,
then each stream that got something hands it on, once. Frames we send in answer leave together, in one write.

**Flow control.** The connection gives room for what it received at once, whoever it was for, so that a stream that is
paused, or given up, holds no other back. Streams do as `stream` tells.

**A server that breaks the protocol** is told so with GOAWAY, and all streams of the connection end. What it may make us
do is bounded: frames and blocks of fields have a largest size; a block that is too long, in however many frames it
comes, costs its own stream, and the connection where it goes on; what has to be answered (PING, SETTINGS) is only while
the server reads the answers.

**The end.** After a GOAWAY no stream is begun here, and those that the server has not looked at end as refused; the
others go on to their ends, and the last one closes the connection.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

from gateway.upstream.http2 import frames
from gateway.upstream.http2.frames import ErrorCode, FrameReader, Http2Error
from gateway.upstream.http2.headers import BLOCK_BYTES, HeaderError, decode
from gateway.upstream.http2.sending import Bytes, Sending
from gateway.upstream.http2.stream import RECEIVE_WINDOW, Loss, Stream

CONNECTION_WINDOW = 16 * 1024 * 1024
"""What all streams together may be sent before we have read it: their sockets' buffers, at most."""
BLOCK_BYTES_MOST = 16 * BLOCK_BYTES
"""Where a block of fields that is too long ends the connection. Frames count with their heads, as empty ones may come
in any number."""
ANSWERS_UNREAD = 1024
"""Answers that may wait for a server which does not read them."""
UNACKNOWLEDGED_S = 30.0
"""How long the server's host may leave unacknowledged what was sent. One that has vanished without a word would else
keep its connection for a quarter of an hour, and every new call would be sent there."""
_CLOSE_S = 1.0
"""How long what has been written may take to leave when the connection is closed."""
_ANSWER_ROOM = CONNECTION_WINDOW // 2
_STREAM_ROOM = RECEIVE_WINDOW // 2


class Connection(asyncio.Protocol):
    """One connection. `ready` is done when the server has introduced itself, or fails with ConnectionError.

    `on_end` is called when no more streams may be begun here, and again when the connection is gone.
    """

    def __init__(self, on_end: Callable[["Connection"], None]) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.usable = True
        """New streams may be begun."""
        self.closed = False
        self._on_end = on_end
        self._transport: asyncio.Transport
        self._frames = FrameReader()
        self._streams: dict[int, Stream] = {}
        self._waiting: deque[tuple[Stream, bytes]] = deque()
        """Streams that the server does not allow yet, and their heads."""
        self._most_streams = frames.STREAM_ID_MOST
        self._next_id = 1
        self._sending = Sending()
        self._out: list[Bytes] = []
        self._reading = False
        self._writing_paused = False
        self._unread = 0
        """Answers written since the server stopped reading."""
        self._unanswered = 0
        """Bytes that the server has not been given room for again."""
        self._block: bytearray | None = None
        """The fields of a block that has begun and not ended."""
        self._block_size = 0
        self._block_stream = 0
        self._block_ends = False

    # What streams ask for.

    @property
    def streams(self) -> int:
        """Streams that have begun and not ended."""
        return len(self._streams) + len(self._waiting)

    def start(self, stream: Stream, head: bytes, body: bytes) -> None:
        """Send a request: a block of fields, and a body. Only while the connection is `usable`."""
        stream.begin(self, body)
        if len(self._streams) < self._most_streams:
            self._begin(stream, head)
            self._flush()
        else:
            self._waiting.append((stream, head))

    def _begin(self, stream: Stream, head: bytes) -> None:
        stream.id, self._next_id = self._next_id, self._next_id + 2
        if self._next_id > frames.STREAM_ID_MOST:
            self._retire()
        self._streams[stream.id] = stream
        self._out.append(frames.headers(stream.id, head, self._sending.frame_bytes))
        self._sending.add(stream)

    def give_room(self, stream: Stream) -> None:
        self._out.append(frames.window_update(stream.id, stream.unanswered))
        stream.unanswered = 0
        self._flush()

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        if stream.id:
            self._out.append(frames.rst_stream(stream.id, code))
        self._forget(stream)
        self._flush()

    def close(self) -> None:
        """End the connection, and its streams with it."""
        if not self.closed:
            self._say_goodbye(ErrorCode.NO_ERROR)
            self._lose(Loss.CLOSED, "the connection was closed")

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_S * 1000))
        ours = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW,
            frames.MAX_HEADER_LIST_SIZE: BLOCK_BYTES,
        }
        room = frames.window_update(0, CONNECTION_WINDOW - frames.WINDOW)
        self._transport.write(frames.PREFACE + frames.settings(ours) + room)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        streams = self._streams
        touched: dict[Stream, None] = {}
        self._reading = True
        try:
            for kind, flags, stream_id, payload in self._frames.feed(data):
                if kind == frames.DATA and self._block is None:  # nearly every frame
                    size = len(payload)
                    self._unanswered += size
                    stream = streams.get(stream_id)
                    if stream is None:
                        self._require_begun(stream_id)
                        continue
                    last = False
                    if flags:
                        payload = frames.unpadded(flags & frames.PADDED, payload)
                        last = flags & frames.END_STREAM != 0
                    stream.unanswered += size
                    if last:
                        self._forget(stream, answered=True)
                    elif stream.unanswered >= _STREAM_ROOM:
                        self._more_room(stream)
                    stream.take_data(payload, last)
                else:
                    stream = self._handle(kind, flags, stream_id, payload)
                if stream is not None:
                    touched[stream] = None
        except Http2Error as error:
            if not self.closed:
                self._fail(error)
        for stream in touched:
            stream.deliver()
        self._reading = False
        if self._unanswered >= _ANSWER_ROOM and not self.closed:
            self._out.append(frames.window_update(0, self._unanswered))
            self._unanswered = 0
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(Loss.BROKEN, _in_words(exc))

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._unread = 0
        self._flush()

    # Frames, by their types.

    def _handle(self, kind: int, flags: int, stream_id: int, payload: bytes) -> Stream | None:
        """Work off a frame; return the stream that got something of it. Raises Http2Error."""
        if (self._block is not None) != (kind == frames.CONTINUATION) or (
            self._block is not None and stream_id != self._block_stream
        ):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a block of fields that is interrupted")
        if not self.ready.done() and kind != frames.SETTINGS:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "no SETTINGS to begin with")
        handler = _HANDLERS.get(kind)  # what has none is passed over (section 5.5)
        return handler(self, flags, stream_id, payload) if handler is not None else None

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> Stream | None:
        self._require_begun(stream_id)
        self._block, self._block_size = bytearray(), 0
        self._block_stream, self._block_ends = stream_id, flags & frames.END_STREAM != 0
        return self._continuation(flags, stream_id, frames.unpadded(flags, payload))

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> Stream | None:
        assert self._block is not None
        self._block_size += len(payload) + frames.HEAD_BYTES
        if self._block_size > BLOCK_BYTES_MOST:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "a block of fields without end")
        if self._block_size <= BLOCK_BYTES + frames.HEAD_BYTES:
            self._block += payload
        if not flags & frames.END_HEADERS:
            return None
        block, self._block = bytes(self._block), None
        stream = self._streams.get(stream_id)
        if stream is None:
            return None
        if self._block_size > BLOCK_BYTES + frames.HEAD_BYTES:
            self.reset(stream, ErrorCode.CANCEL)
            stream.take_excess()
            return stream
        try:
            fields = decode(block)
        except HeaderError as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"a block of fields that cannot be read: {error}") from None
        if self._block_ends:
            self._forget(stream, answered=True)
        stream.take_headers(fields, self._block_ends)
        return stream

    def _rst_stream(self, _: int, stream_id: int, payload: bytes) -> Stream | None:
        self._require_begun(stream_id)
        code = frames.read_number(payload, "RST_STREAM")
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            if code == ErrorCode.REFUSED_STREAM:
                stream.take_loss(Loss.REFUSED, "the stream was refused")
            else:
                stream.take_reset(code)
        return stream

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            return
        for name, value in frames.read_settings(payload):
            if name == frames.MAX_CONCURRENT_STREAMS:
                self._most_streams = value
            elif name == frames.INITIAL_WINDOW_SIZE:
                self._sending.resize(value, list(self._streams.values()))
            elif name == frames.MAX_FRAME_SIZE:
                if not frames.FRAME_BYTES <= value <= frames.FRAME_BYTES_MOST:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frames of {value} bytes at most")
                self._sending.frame_bytes = value
        self._answer(frames.frame(frames.SETTINGS, frames.ACK, 0, b""))
        if not self.ready.done():
            self.ready.set_result(None)
        self._begin_waiting()

    def _push_promise(self, _: int, stream_id: int, payload: bytes) -> None:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a push that was forbidden")

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) != 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a PING that is none")
        if not flags & frames.ACK:
            self._answer(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        last, code, words = frames.read_goaway(payload)
        what = f"the server closes the connection (GOAWAY {code}{': ' if words else ''}{_printable(words)})"
        self._retire()
        for stream in [*(stream for number, stream in self._streams.items() if number > last), *self._turned_away()]:
            self._drop(stream, Loss.REFUSED, what)
        self._close_if_over()

    def _window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        increment = frames.read_number(payload, "WINDOW_UPDATE") & frames.WINDOW_MOST
        if not increment:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE by nothing")
        if not stream_id:
            self._sending.room(None, increment)
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            self._require_begun(stream_id)
        else:
            self._sending.room(stream, increment)

    # What follows from them.

    def _require_begun(self, stream_id: int) -> None:
        """A frame may be for a stream of ours, or for one that was, and for no other."""
        if not stream_id & 1 or stream_id >= self._next_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame for stream {stream_id}, which is none")

    def _more_room(self, stream: Stream) -> None:
        """Half of what a stream had room for has come."""
        if stream.unanswered > RECEIVE_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more of a stream than there is room for")
        if not stream.paused:
            self.give_room(stream)

    def _answer(self, frame: bytes) -> None:
        if self._writing_paused:
            self._unread += 1
            if self._unread > ANSWERS_UNREAD:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "questions whose answers are not read")
        self._out.append(frame)

    def _forget(self, stream: Stream, *, answered: bool = False) -> None:
        """A stream has ended. A server that has answered before it had the whole request is told that no more comes."""
        if answered and stream.unsent is not None:
            self._out.append(frames.rst_stream(stream.id, ErrorCode.NO_ERROR))
        self._sending.remove(stream)
        stream.ended()
        if stream.id:
            self._streams.pop(stream.id, None)
        else:
            self._waiting = deque(each for each in self._waiting if each[0] is not stream)
        self._begin_waiting()
        self._close_if_over()

    def _begin_waiting(self) -> None:
        while self._waiting and self.usable and len(self._streams) < self._most_streams:
            self._begin(*self._waiting.popleft())

    def _turned_away(self) -> list[Stream]:
        """The streams that wait to begin, and now wait no longer."""
        waiting, self._waiting = self._waiting, deque()
        return [stream for stream, _ in waiting]

    def _drop(self, stream: Stream, loss: Loss, what: str) -> None:
        self._sending.remove(stream)
        stream.ended()
        self._streams.pop(stream.id, None)
        stream.take_loss(loss, what)
        stream.deliver()

    def _retire(self) -> None:
        if self.usable:
            self.usable = False
            self._on_end(self)

    def _close_if_over(self) -> None:
        if not self.usable and not self._streams and not self._waiting and not self.closed:
            self.close()

    def _fail(self, error: Http2Error) -> None:
        self._say_goodbye(error.code, str(error))
        self._lose(Loss.BROKEN, f"it broke HTTP/2 with {error}")

    def _say_goodbye(self, code: ErrorCode, why: str = "") -> None:
        self.closed = True
        self._transport.writelines([*self._out, frames.goaway(code, why)])
        self._transport.close()
        asyncio.get_running_loop().call_later(_CLOSE_S, self._transport.abort)

    def _lose(self, loss: Loss, what: str) -> None:
        self.closed = True
        self._out.clear()
        self._retire()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(what))
            self.ready.exception()  # seen: nobody may be left to raise it to
        for stream in [*self._streams.values(), *self._turned_away()]:
            self._drop(stream, loss, what)
        self._on_end(self)

    def _flush(self) -> None:
        """Write what is to be written, once for all that a read of the socket leads to."""
        if self._reading or self.closed:
            return
        if not self._writing_paused:
            self._sending.push(self._out)
        if self._out:
            out, self._out = self._out, []
            self._transport.writelines(out)


_HANDLERS: Mapping[int, Callable[[Connection, int, int, bytes], Stream | None]] = {
    frames.HEADERS: Connection._headers,
    frames.RST_STREAM: Connection._rst_stream,
    frames.SETTINGS: Connection._settings,
    frames.PUSH_PROMISE: Connection._push_promise,
    frames.PING: Connection._ping,
    frames.GOAWAY: Connection._goaway,
    frames.WINDOW_UPDATE: Connection._window_update,
    frames.CONTINUATION: Connection._continuation,
}


def _in_words(error: Exception | None) -> str:
    return "Socket closed" if error is None else f"Socket closed ({getattr(error, 'strerror', None) or error})"


def _printable(words: bytes) -> str:
    return "".join(letter for letter in words[:200].decode("ascii", "replace") if letter.isprintable())
