"""Engines as data: an answer, what is wrong with it, and a server that gives it byte for byte.

A `Script` says everything an engine does with one request. `ScriptPlayer` performs scripts on plain sockets, so that
what was sent, how it was cut into writes and how the connection ended are exactly what the script says. It is a fake:
no real engine can be told to die in the middle of a chunk.
"""

import asyncio
import functools
import itertools
import socket
import struct
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

TEXT = b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
UTF8 = 'data: {"choices":[{"delta":{"content":"zwei \U0001f642 \u00fc"}}]}\n\n'.encode()
TOOL = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c","function":{"arguments":"{\\"a"}}]}}]}\n\n'
QUOTED = b'data: {"choices":[{"delta":{"content":"\\n\\ndata: [DONE]\\n\\n \\"usage\\": {"}}]}\n\n'
NULL_USAGE = b'data: {"choices":[{"delta":{"content":"two"}}],"usage":null}\n\n'
TEXT_WITH_USAGE = b'data: {"choices":[{"delta":{"content":"3"}}],"usage":{"prompt_tokens":1,"completion_tokens":3}}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
NAMED = b'event: message\nid: 7\ndata: {"choices":[\ndata: {"text":"x"}]}\n\n'
COMMENT = b": keep-alive\n\n"
LONG = b'data: {"choices":[{"delta":{"content":"' + b"long " * 14_000 + b'"}}]}\n\n'
CONTENT = (TEXT, UTF8, TOOL, QUOTED, NULL_USAGE, TEXT_WITH_USAGE, FINISH, NAMED, COMMENT)
"""Events that reach every client as they are."""
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
"""An event that only a client gets who asked for it."""
FAILED = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}\n\n'
REFUSED = b'data: {"error":{"message":"no such tool","type":"BadRequestError","code":400}}\n\n'
DONE = b"data: [DONE]\n\n"
PLAIN = (
    '{"choices":[{"message":{"content":"zwei \U0001f642"}}],"usage":{"prompt_tokens":9,"completion_tokens":2}}'.encode()
)
BLAMES = b"maximum context length"
TOO_LONG = b'{"object":"error","message":"This model\'s %b is 16 tokens.","code":500}' % BLAMES
BROKEN = b'{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}'

HEAD_GARBAGE = (
    b"\x16\x03\x01\x02\x00 no HTTP\r\n\r\n",
    b"HTTP/1.1 2x0 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n bad: 1\r\n\r\n",
)
CHUNK_GARBAGE = (b"not a size\r\n", b"-5\r\n", b"5\n", b"\x00\xff\r\n", b"FFFFFFFFFFFFFFFFFF\r\n", b"5 5\r\n", b"\r\n")

_RESET = struct.pack("ii", 1, 0)
_CHUNK_END = b"\r\n"


def crlf(event: bytes) -> bytes:
    """The same event with its lines ended by CRLF."""
    return event.replace(b"\n", b"\r\n")


class Framing(StrEnum):
    """How a body's end is told."""

    CHUNKED = "chunked"
    LENGTH = "content-length"
    CLOSE = "until close"


class Ending(StrEnum):
    """What an engine does when it has sent what it sends."""

    WAIT = "waits"
    """For the next request, or to be hung up on."""
    CLOSE = "closes"
    RESET = "resets"


@dataclass(frozen=True, slots=True)
class Script:
    """One answer of an engine, and its fault."""

    parts: tuple[bytes, ...]
    """The body: events if it is a stream, else pieces of it."""
    events: bool
    """It is a stream."""
    status: str = "200 OK"
    framing: Framing = Framing.CHUNKED
    chunk: int | tuple[int, ...] = 0
    """Body bytes in a chunk; 0: one part of the body, -1: all of it. More than one number: those of each chunk in
    turn."""
    extension: bytes = b""
    """What follows each chunk's size."""
    trailer: bytes = b""
    """Header lines behind the last chunk."""
    interim: int = 0
    """1xx responses before the real one."""
    length_off: int = 0
    """By how much the announced length is too long."""
    garbage: bytes = b""
    garbage_at: int = 0
    """`garbage` stands instead of the head (0), or of the n-th chunk and all that follows."""
    stop: int | None = None
    """It sends no more than so many bytes."""
    cuts: int | tuple[int, ...] = 0
    """Where what it sends is cut into writes: at these bytes, or every so many; 0: nowhere."""
    ending: Ending = Ending.WAIT

    def __repr__(self) -> str:
        """What differs from the simplest script, with names for the events that have one."""
        parts = ", ".join(_NAMES.get(part, repr(part)) for part in self.parts)
        others = (item for item in fields(self) if item.name not in ("parts", "events", "status"))
        differing = "".join(
            f", {item.name}={getattr(self, item.name)!r}" for item in others if getattr(self, item.name) != item.default
        )
        return f"Script(({parts},), events={self.events}, status={self.status!r}{differing})"

    @property
    def kind(self) -> str:
        return "text/event-stream" if self.events else "application/json"

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def announced(self) -> int:
        """The content-length, whether or not there is one."""
        return len(self.body) + self.length_off

    @property
    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status}", f"content-type: {self.kind}"]
        if self.framing is Framing.CHUNKED:
            lines.append("transfer-encoding: chunked")
        elif self.framing is Framing.LENGTH:
            lines.append(f"content-length: {self.announced}")
        return b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * self.interim + "\r\n".join([*lines, "", ""]).encode()

    @property
    def segments(self) -> tuple[tuple[bytes, bool], ...]:
        """What there is to send behind the head, and whether it is of the body."""
        return tuple(self._segments())

    def _segments(self) -> Iterator[tuple[bytes, bool]]:
        if self.garbage and not self.garbage_at:
            return
        if self.framing is not Framing.CHUNKED:
            yield self.body, True
            return
        for number, chunk in enumerate(self._chunks(), start=1):
            if self.garbage and number == self.garbage_at:
                yield self.garbage, False
                return
            yield b"%x%b\r\n" % (len(chunk), self.extension), False
            yield chunk, True
            yield _CHUNK_END, False
        if self.garbage:
            yield self.garbage, False
        else:
            yield b"0" + self.extension + b"\r\n" + self.trailer + b"\r\n", False

    def _chunks(self) -> tuple[bytes, ...]:
        if not self.chunk:
            return self.parts
        turns = itertools.cycle(self.chunk if isinstance(self.chunk, tuple) else (self.chunk,))
        left, chunks = self.body, []
        while left:
            size = next(turns)
            chunks.append(left[:size] if size > 0 else left)
            left = left[size:] if size > 0 else b""
        return tuple(chunks)

    @property
    def wire(self) -> bytes:
        """All there is to send, if nothing stops it."""
        start = self.garbage if self.garbage and not self.garbage_at else self.head
        return start + b"".join(segment for segment, _ in self.segments)

    @property
    def sent(self) -> bytes:
        return self.wire if self.stop is None else self.wire[: self.stop]

    @property
    def writes(self) -> tuple[bytes, ...]:
        return _cut(self)

    @property
    def delivered(self) -> bytes:
        """The body bytes in what it sends."""
        left = len(self.sent) - len(self.head)
        pieces = []
        for segment, of_body in self.segments:
            if left <= 0:
                break
            if of_body:
                pieces.append(segment[:left])
            left -= len(segment)
        return b"".join(pieces)

    @property
    def announced_part(self) -> bytes:
        """Those of them that its head speaks of."""
        return self.delivered[: self.announced] if self.framing is Framing.LENGTH else self.delivered


@functools.lru_cache(maxsize=4)
def _cut(script: Script) -> tuple[bytes, ...]:
    """Its writes; kept, so that one large script played to many takes no more memory than to one."""
    sent = script.sent
    if isinstance(script.cuts, int):
        step = script.cuts or len(sent) or 1
        offsets = list(range(step, len(sent), step))
    else:
        offsets = sorted({at for at in script.cuts if 0 < at < len(sent)})
    return tuple(sent[start:end] for start, end in zip([0, *offsets], [*offsets, len(sent)], strict=True))


_NAMES = {
    ending(value): name if ending is bytes else f"crlf({name})"
    for name, value in tuple(globals().items())
    if isinstance(value, bytes) and name.isupper() and not name.startswith("_")
    for ending in (bytes, crlf)
    if ending is bytes or b"\n" in value
}

HEALTHY_STREAM = Script((TEXT, DONE), events=True)
HEALTHY = Script((b'{"healthy":', b"true}"), events=False)


@dataclass(slots=True, eq=False)
class Play:
    """One request that scripts are played to: `script` at the endpoint that gets it first, `other` at another one."""

    script: Script
    other: Script
    port: int | None = None
    """That of the endpoint that got it first."""
    played: int = 0
    """How often `script` has been performed."""
    hung_up: int = 0
    """How often the gateway then hung up."""
    reused: bool = False
    """The connection has been used again after `script`."""
    sent: int = 0
    """Bytes of it that the kernel has taken, up to a write that it has not taken whole."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """`script` has been performed."""


class ScriptPlayer:
    """Engines on two ports, of the OpenAI protocol and of Triton's alike. They answer each request by its id, once it
    has been announced in `plays`."""

    def __init__(self, send_buffer: int | None = None) -> None:
        """`send_buffer`: what the kernel may hold of what is sent, in bytes."""
        self._send_buffer = send_buffer
        self.plays: dict[str, Play] = {}
        self.ports: list[int] = []
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ScriptPlayer":
        for _ in range(2):
            listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
            listening.setblocking(False)
            self._listening.append(listening)
            self.ports.append(listening.getsockname()[1])
            self._start(self._accept(listening))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self._listening:
            listening.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listening)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._send_buffer is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
            self._start(self._serve(connection, listening.getsockname()[1]))

    async def _serve(self, connection: socket.socket, port: int) -> None:
        last: Play | None = None
        try:
            while (request := await _read_request(connection)) is not None:
                if last is not None:
                    last.reused = True
                path, request_id = request
                play = self.plays.get(request_id)
                if play is None:
                    await _send(connection, [_own_answer(path)])
                    last = None
                    continue
                play.port = play.port or port
                if port != play.port:
                    await _send(connection, play.other.writes)
                    last = None
                elif await _perform(connection, play):
                    last = play
                else:
                    return
        except OSError:
            pass  # the gateway hung up
        finally:
            connection.close()
            if last is not None:
                last.hung_up += 1


async def _perform(connection: socket.socket, play: Play) -> bool:
    """Play the script. Returns whether the connection may still be used."""
    script = play.script
    play.played += 1
    try:
        await _send(connection, script.writes, play)
        if script.ending is Ending.CLOSE:
            connection.shutdown(socket.SHUT_WR)
    except OSError:  # the gateway hung up in the middle of it
        play.hung_up += 1
        return False
    finally:
        play.done.set()
    if script.ending is Ending.RESET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.close()
        return False
    return True


async def _send(connection: socket.socket, writes: Sequence[bytes], play: Play | None = None) -> None:
    """Send, with time between two writes for the other side to read the first."""
    loop = asyncio.get_running_loop()
    for number, data in enumerate(writes):
        if number:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await loop.sock_sendall(connection, data)
        if play is not None:
            play.sent += len(data)


async def _read_request(connection: socket.socket) -> tuple[str, str] | None:
    """Path and request id; None if the other side has hung up."""
    loop = asyncio.get_running_loop()
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        if not (piece := await loop.sock_recv(connection, 65536)):
            return None
        received += piece
    request_line, *lines = received[:end].decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(received) < end + 4 + int(headers.get("content-length", "0")):
        if not (piece := await loop.sock_recv(connection, 65536)):
            return None
        received += piece
    return request_line.split(" ")[1], headers.get("x-request-id", "")


def _own_answer(path: str) -> bytes:
    """What an engine says of itself: it is well, and its model is one that only KServe's requests can be put to."""
    known = {
        "/v1/models": b'{"data":[]}',
        "/v2": b'{"name":"triton","version":"2.60.0"}',
        "/v2/models/engine-model": b'{"name":"engine-model","inputs":[],"outputs":[]}',
        "/v2/models/engine-model/config": b'{"name":"engine-model"}',
    }
    body = known.get(path, b"")
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
