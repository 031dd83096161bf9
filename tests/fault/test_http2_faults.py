"""Servers that no real one can be made to be, each byte of theirs a script: what the HTTP/2 client's channel makes of
connections that fail, and what its calls are told. What a connection makes of frames is tested in tests/unit."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.http2 import connection as connections
from gateway.upstream.http2 import frames
from gateway.upstream.http2.channel import Channel
from gateway.upstream.http2.frames import ErrorCode, frame
from gateway.upstream.http2.grpc_stream import Cause, GrpcStream, framed
from tests.http2 import Heard, ServerConnection, data, head, http2_server, message, trailers

CONNECT_S = 0.3


@contextlib.asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[Channel]:
    """When the test is through, no connection and no attempt at one may be left."""
    channel = Channel("e", address, CONNECT_S)
    try:
        yield channel
    finally:
        channel.close()
    assert channel.current is None
    assert not channel._connections
    await asyncio.sleep(0.01)
    assert channel._attempt is None


async def start(channel: Channel, body: bytes = b"request") -> tuple[GrpcStream, Heard]:
    await channel.connect(CONNECT_S)
    assert channel.current is not None
    heard = Heard()
    stream = GrpcStream(heard)
    channel.current.start(stream, channel.head("/a/b"), framed(body))
    return stream, heard


async def failure_of(channel: Channel, timeout: float = CONNECT_S) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        await channel.connect(timeout)
    return caught.value


async def refused_address() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{held.getsockname()[1]}"


async def silent(connection: ServerConnection) -> None:
    await connection.gone()


async def test_nobody_there_is_told_from_somebody_who_does_not_answer() -> None:
    async with channel_to(await refused_address()) as channel:
        error = await failure_of(channel)
        assert (error.failure, error.code) == (Failure.CONNECT, "connect_failed")
    async with http2_server(silent) as address, channel_to(address) as channel:
        error = await failure_of(channel)
        assert (error.failure, error.code) == (Failure.NO_CONNECTION, "connect_timeout")


async def test_a_request_may_wait_shorter_for_a_connection_than_the_attempt() -> None:
    async with http2_server(silent) as address, channel_to(address) as channel:
        patient = asyncio.create_task(failure_of(channel))
        error = await failure_of(channel, 0.01)
        assert error.failure is Failure.NO_CONNECTION
        assert not patient.done()
        other = await patient
        assert other is not error


async def test_what_is_no_http2_and_who_hangs_up_are_no_connection() -> None:
    async def http1(connection: ServerConnection) -> None:
        await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await connection.gone()

    async def hangs_up(connection: ServerConnection) -> None: ...

    for script, words in ((http1, "broke HTTP/2"), (hangs_up, "closed")):
        async with http2_server(script) as address, channel_to(address) as channel:
            error = await failure_of(channel)
            assert (error.failure, error.code) == (Failure.NO_CONNECTION, "connect_failed")
            assert words in error.message
            assert address not in error.message


async def test_those_who_wait_for_a_connection_share_it_and_one_who_leaves_takes_nothing_along() -> None:
    connections = 0

    async def late(connection: ServerConnection) -> None:
        nonlocal connections
        connections += 1
        await asyncio.sleep(0.05)
        await connection.greet()
        await connection.gone()

    async with http2_server(late) as address, channel_to(address) as channel:
        leaving, *staying = [asyncio.create_task(start(channel)) for _ in range(5)]
        await asyncio.sleep(0.01)
        leaving.cancel()
        assert len(await asyncio.gather(*staying)) == 4
        assert connections == 1
        assert leaving.cancelled()


async def test_a_channel_that_is_closed_refuses_who_waits_and_who_comes() -> None:
    async with http2_server(silent) as address, channel_to(address) as channel:
        waiting = asyncio.create_task(failure_of(channel))
        await asyncio.sleep(0.05)
        channel.close()
        for error in (await waiting, await failure_of(channel)):
            assert (error.failure, error.code) == (Failure.CONNECT, "connect_failed")
            assert "left the fleet" in error.message


async def test_closing_ends_calls_and_says_goodbye() -> None:
    said: list[int] = []

    async def script(connection: ServerConnection) -> None:
        await connection.greet()
        await connection.request()
        said.append((await connection.next(frames.GOAWAY))[3][7])
        await connection.gone()

    async with http2_server(script) as address, channel_to(address) as channel:
        _, heard = await start(channel)
        await asyncio.sleep(0.05)
        channel.close()
        assert (await heard.end()).cause is Cause.CLOSED
        await asyncio.sleep(0.05)
        assert said == [ErrorCode.NO_ERROR]


@pytest.mark.parametrize("at", [0, 3, 9, 12, 40])
async def test_a_server_that_dies_in_the_middle_ends_its_calls_and_is_asked_again(at: int) -> None:
    answer = (head(1) + data(1, message(b"text")))[:at]

    async def script(connection: ServerConnection) -> None:
        await connection.greet()
        await connection.request()
        await connection.send(answer)
        await asyncio.sleep(0.02)
        connection.cut()

    async with http2_server(script) as address, channel_to(address) as channel:
        for _ in range(2):
            calls = [(await start(channel))[1] for _ in range(3)]
            for heard in calls:
                end = await heard.end()
                assert (end.cause, end.code) == (Cause.BROKEN, grpc.StatusCode.UNAVAILABLE)
                assert "Socket closed" in end.details
            assert channel.current is None


async def test_a_connection_that_is_retired_at_once_is_none() -> None:
    async def script(connection: ServerConnection) -> None:
        await connection.greet({}, frame(frames.GOAWAY, 0, 0, bytes(8)))
        await connection.gone()

    async with http2_server(script) as address, channel_to(address) as channel:
        for _ in range(3):
            error = await failure_of(channel)
            assert (error.failure, error.code) == (Failure.NO_CONNECTION, "connect_failed")
            assert "closes the connection" in error.message


async def test_a_server_that_gives_no_room_gets_no_more_and_others_are_answered() -> None:
    async def script(connection: ServerConnection) -> None:
        await connection.greet({frames.INITIAL_WINDOW_SIZE: 20})
        first, second = await connection.request(), await connection.request()
        await connection.send(head(second), data(second, message(b"text")), trailers(second))
        await connection.next(frames.RST_STREAM)
        await connection.send(head(first), frame(frames.PING, 0, 0, b"question"))
        await connection.next(frames.PING)
        await connection.gone()

    async with http2_server(script) as address, channel_to(address) as channel:
        starved, nothing = await start(channel, b"x" * 100_000)
        _, heard = await start(channel)
        assert (await heard.end()).ok
        assert not nothing.ends
        assert channel.current is not None
        assert channel.current.streams == 1
        assert starved.cancel()
        assert channel.current.streams == 0
        await asyncio.sleep(0.05)
        assert channel.current is not None


async def test_a_server_that_breaks_the_protocol_ends_its_calls_and_is_told_why() -> None:
    told: list[bytes] = []

    async def script(connection: ServerConnection) -> None:
        await connection.greet()
        for _ in range(2):
            stream = await connection.request()
        await connection.send(head(stream), data(stream, message(b"text")), b"\xff" * 100)
        told.append((await connection.next(frames.GOAWAY))[3])
        await connection.gone()

    async with http2_server(script) as address, channel_to(address) as channel:
        calls = [(await start(channel))[1] for _ in range(2)]
        ends = [await heard.end() for heard in calls]
        assert [end.cause for end in ends] == [Cause.BROKEN] * 2
        assert calls[1].messages == [b"text"]
        assert channel.current is None
        await asyncio.sleep(0.05)
        assert told[0][7] == ErrorCode.FRAME_SIZE_ERROR
        assert b"frame of" in told[0]


async def test_a_server_that_takes_nothing_any_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNACKNOWLEDGED_S", 0.5)
    over = asyncio.Event()

    async def script(connection: ServerConnection) -> None:
        await connection.greet({frames.INITIAL_WINDOW_SIZE: frames.WINDOW_MOST})
        await connection.send(frames.window_update(0, frames.WINDOW_MOST - frames.WINDOW))
        await over.wait()

    async with http2_server(script) as address, channel_to(address) as channel:
        _, heard = await start(channel, b"x" * (64 << 20))
        assert (await heard.end()).cause is Cause.BROKEN
        assert channel.current is None
        over.set()


async def test_a_server_that_does_not_read_is_closed_all_the_same() -> None:
    unread = asyncio.Event()

    async def script(connection: ServerConnection) -> None:
        await connection.greet({frames.INITIAL_WINDOW_SIZE: frames.WINDOW_MOST})
        await connection.send(frames.window_update(0, frames.WINDOW_MOST - frames.WINDOW))
        await unread.wait()

    async with http2_server(script) as address, channel_to(address) as channel:
        _, heard = await start(channel, b"x" * (64 << 20))
        await asyncio.sleep(0.1)
        connection = channel.current
        assert connection is not None
        channel.close()
        assert (await heard.end()).cause is Cause.CLOSED
        async with asyncio.timeout(5):
            while connection._transport.get_write_buffer_size():  # noqa: ASYNC110  # until what waits is dropped
                await asyncio.sleep(0.05)
        unread.set()
