"""The server's side of HTTP/2 for tests: what it sends, byte by byte, a receiver that keeps what a call is told, and a
connection without a network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from gateway.upstream.http2 import frames
from gateway.upstream.http2.connection import Connection
from gateway.upstream.http2.frames import Frame, FrameReader, frame
from gateway.upstream.http2.frames import settings as settings_frame
from gateway.upstream.http2.grpc_stream import CallEnd, GrpcStream, framed
from gateway.upstream.http2.headers import encode

HEAD = encode(((":status", "200"), ("content-type", "application/grpc")))
OK = encode((("grpc-status", "0"),))


def message(text: bytes) -> bytes:
    return b"\0" + len(text).to_bytes(4) + text


def head(stream: int, block: bytes = HEAD, *, last: bool = False) -> bytes:
    return frame(frames.HEADERS, frames.END_HEADERS | (frames.END_STREAM if last else 0), stream, block)


def data(stream: int, payload: bytes) -> bytes:
    return frame(frames.DATA, 0, stream, payload)


def trailers(stream: int, block: bytes = OK) -> bytes:
    return head(stream, block, last=True)


@dataclass
class Heard:
    """A `Receiver`."""

    reads: list[list[bytes]] = field(default_factory=list)
    ends: list[CallEnd] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def messages_received(self, messages: list[bytes]) -> None:
        assert not self.ends
        assert messages
        self.reads.append(messages)

    def call_ended(self, end: CallEnd) -> None:
        assert not self.ends
        self.ends.append(end)
        self.ended.set()

    @property
    def messages(self) -> list[bytes]:
        return [message for read in self.reads for message in read]

    async def end(self) -> CallEnd:
        async with asyncio.timeout(10):
            await self.ended.wait()
        return self.ends[0]


def pieces(whole: bytes, cuts: list[int]) -> Iterator[bytes]:
    """`whole`, cut at each of `cuts` modulo its length."""
    places = sorted({cut % (len(whole) + 1) for cut in cuts})
    for start, end in zip([0, *places], [*places, len(whole)], strict=True):
        yield whole[start:end]


CUTS = st.lists(st.integers(0, 1 << 20), max_size=20)


class FakeTransport:
    """The client's side of a socket: keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return self

    def setsockopt(self, *_: int) -> None: ...

    def write(self, piece: bytes) -> None:
        self.written.append(bytes(piece))

    def writelines(self, pieces: list[bytes]) -> None:
        self.written += map(bytes, pieces)

    def close(self) -> None:
        self.closed = True

    abort = close


class Connected:
    """A connection whose server has introduced itself."""

    def __init__(self, **server: int) -> None:
        self.transport = FakeTransport()
        self.over: list[Connection] = []
        self.connection = Connection(self.over.append)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        ours = {getattr(frames, name.upper()): value for name, value in server.items()}
        self.connection.data_received(settings_frame(ours))

    def read(self, *pieces: bytes) -> None:
        self.connection.data_received(b"".join(pieces))

    def call(self, body: bytes = b"request") -> tuple[GrpcStream, Heard]:
        heard = Heard()
        stream = GrpcStream(heard)
        self.connection.start(stream, encode(((":method", "POST"),)), framed(body))
        return stream, heard

    def sent(self, *kinds: int) -> list[Frame]:
        """The frames of these types that have been written since the last time."""
        written, self.transport.written = b"".join(self.transport.written), []
        read = FrameReader().feed(written.removeprefix(frames.PREFACE))
        return [each for each in read if not kinds or each[0] in kinds]


class ServerConnection:
    """One connection, as a script sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()
        self._read: list[Frame] = []

    async def greet(self, settings: dict[int, int] | None = None, *more: bytes) -> None:
        """Take the preface and introduce the server, in one go with what it says `more`."""
        assert await self._reader.readexactly(len(frames.PREFACE)) == frames.PREFACE
        await self.send(frames.settings(settings or {}), *more)

    async def send(self, *pieces: bytes) -> None:
        self._writer.write(b"".join(pieces))
        await self._writer.drain()

    async def next(self, kind: int) -> Frame:
        """The next frame of a type; those of other types before it are passed over."""
        async with asyncio.timeout(10):
            while True:
                while self._read:
                    found = self._read.pop(0)
                    if found[0] == kind:
                        return found
                read = await self._reader.read(65536)
                if not read:
                    raise EOFError
                self._read += self._frames.feed(read)

    async def request(self) -> int:
        """The id of the next stream, once its head is there."""
        return (await self.next(frames.HEADERS))[2]

    async def gone(self) -> None:
        """Wait until the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while await self._reader.read(65536):
                    pass

    def cut(self) -> None:
        self._writer.transport.abort()


Script = Callable[[ServerConnection], Awaitable[None]]


@contextlib.asynccontextmanager
async def http2_server(script: Script) -> AsyncIterator[str]:
    """The address of a server that runs `script` for each connection, and closes it then. A script that fails fails the
    test."""
    failures: list[BaseException] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(ServerConnection(reader, writer))
        except (ConnectionError, EOFError):
            pass
        except Exception as error:
            failures.append(error)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        if failures:
            raise failures[0]
