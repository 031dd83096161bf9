"""The HTTP/2 client against gRPC's own server (C core), which Triton has as well: messages, statuses, long prompts,
slow clients, cancels, many calls at once, a server that stops."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.http2.channel import Channel
from gateway.upstream.http2.grpc_stream import CallEnd, Cause, GrpcStream, framed
from gateway.upstream.http2.headers import encode
from gateway.upstream.http2.stream import RECEIVE_WINDOW
from tests.http2 import Heard

METHOD = "/headrace.Test/Call"
Handler = Callable[[bytes, Any], Awaitable[None]]


@contextlib.asynccontextmanager
async def grpc_server(handler: Handler, **options: int) -> AsyncIterator[tuple[str, Any]]:
    """A grpc.aio server whose only method is `handler`, with options of gRPC's: its address and itself."""
    named = [("grpc.max_receive_message_length", -1), *((f"grpc.{name}", value) for name, value in options.items())]
    server = grpc.aio.server(options=named)
    method = grpc.unary_stream_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("headrace.Test", {"Call": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(None)


@dataclass
class Client:
    """Calls over one channel."""

    channel: Channel
    connections: list[int] = field(default_factory=list)

    async def call(self, request: bytes = b"", **metadata: str) -> tuple[GrpcStream, Heard]:
        await self.channel.connect(2)
        assert self.channel.current is not None
        self.connections.append(id(self.channel.current))
        heard = Heard()
        stream = GrpcStream(heard)
        self.channel.current.start(stream, self.channel.head(METHOD) + encode(tuple(metadata.items())), framed(request))
        return stream, heard

    @property
    def streams(self) -> int:
        return self.channel.current.streams if self.channel.current is not None else 0


@contextlib.asynccontextmanager
async def client_of(address: str) -> AsyncIterator[Client]:
    """All streams must have ended when the test is through."""
    client = Client(Channel("e", address, 2))
    try:
        yield client
        assert client.streams == 0
    finally:
        client.channel.close()


OK = CallEnd(Cause.STATUS, grpc.StatusCode.OK, "")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)


async def test_messages_and_metadata_arrive_as_they_were_sent() -> None:
    async def handler(request: bytes, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        await context.write(f"{metadata['traceparent']} {metadata['user-agent']}".encode())
        for size in (0, 1, 100_000, 3_000_000, 5):
            await context.write(request * size)

    async with grpc_server(handler) as (address, _), client_of(address) as client:
        _, heard = await client.call(b"x", traceparent="00-1")
        assert await heard.end() == OK
        assert heard.messages == [b"00-1 headrace", *(b"x" * size for size in (0, 1, 100_000, 3_000_000, 5))]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_status_arrives_with_its_words(begun: bool) -> None:
    words = "kein Platz: ä %41\n" + "x" * 2000

    async def handler(_: bytes, context: Any) -> None:
        if begun:
            await context.write(b"text")
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)

    async with grpc_server(handler) as (address, _), client_of(address) as client:
        _, heard = await client.call()
        assert await heard.end() == CallEnd(Cause.STATUS, grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        assert heard.messages == [b"text"] * begun


async def test_an_unknown_method_is_unimplemented() -> None:
    async def handler(_: bytes, context: Any) -> None: ...

    async with grpc_server(handler) as (address, _), client_of(address) as client:
        await client.channel.connect(2)
        heard = Heard()
        assert client.channel.current is not None
        client.channel.current.start(GrpcStream(heard), client.channel.head("/headrace.Test/Other"), framed(b""))
        assert (await heard.end()).code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_long_prompt_and_short_ones_beside_it_arrive_whole() -> None:
    async def handler(request: bytes, context: Any) -> None:
        await context.write(b"%d %d" % (len(request), sum(request[:: 1 << 16])))

    async with grpc_server(handler) as (address, _), client_of(address) as client:
        prompt = bytes(range(256)) * (64 * 1024)
        _, long = await client.call(prompt)
        short = [(await client.call(b"\1"))[1] for _ in range(20)]
        for heard in short:
            assert await heard.end() == OK
            assert heard.messages == [b"1 1"]
        assert await long.end() == OK
        assert long.messages == [b"%d %d" % (len(prompt), sum(prompt[:: 1 << 16]))]


async def test_a_slow_client_holds_up_its_own_answer_and_no_other() -> None:
    written: dict[bytes, int] = {}

    async def handler(request: bytes, context: Any) -> None:
        for number in range(2000):
            await context.write(str(number).encode() + b"." * 1000)
            written[request] = number + 1

    async with grpc_server(handler) as (address, _), client_of(address) as client:
        slow, late = await client.call(b"slow")
        slow.pause()
        others = [(await client.call(b"%d" % number))[1] for number in range(5)]
        for heard in others:
            assert await heard.end() == OK
            assert len(heard.messages) == 2000
        await until(lambda: b"slow" in written)
        before = -1
        while before != written[b"slow"]:
            before = written[b"slow"]
            await asyncio.sleep(0.2)
        assert before * 1000 < 4 * RECEIVE_WINDOW, "the server has a buffer of its own"
        assert not late.reads
        slow.resume()
        assert await late.end() == OK
        assert [int(message.rstrip(b".")) for message in late.messages] == list(range(2000))


async def test_a_cancel_reaches_the_server_and_the_connection_lives_on() -> None:
    waiting = 0

    async def handler(_: bytes, context: Any) -> None:
        nonlocal waiting
        waiting += 1
        try:
            await context.write(b"text")
            await asyncio.sleep(60)
        finally:
            waiting -= 1

    async with grpc_server(handler) as (address, _), client_of(address) as client:
        calls = [await client.call() for _ in range(20)]
        await until(lambda: waiting == 20 and all(heard.messages for _, heard in calls))
        for stream, _ in calls:
            assert stream.cancel()
            assert stream.done()
        await until(lambda: waiting == 0)
        assert len(set(client.connections)) == 1
        assert not any(heard.ends for _, heard in calls)


async def test_calls_beyond_what_the_server_allows_at_once_wait() -> None:
    running = most = 0

    async def handler(_: bytes, context: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        await context.write(b"text")

    async with grpc_server(handler, max_concurrent_streams=3) as (address, _), client_of(address) as client:
        calls = [(await client.call())[1] for _ in range(20)]
        ends = [await heard.end() for heard in calls]
        # gRPC's server counts a stream a moment longer than HTTP/2 has it: it may refuse the one that follows.
        assert all(end == OK or end.cause is Cause.REFUSED for end in ends)
        assert ends.count(OK) >= 3
        assert most <= 3


async def test_a_server_that_stops_lets_its_calls_end_and_is_found_again() -> None:
    go_on = asyncio.Event()

    async def handler(request: bytes, context: Any) -> None:
        await context.write(b"text")
        await go_on.wait()

    async with grpc_server(handler) as (address, server), client_of(address) as client:
        _, heard = await client.call()
        await until(lambda: bool(heard.messages))
        stopping = asyncio.create_task(server.stop(5))
        await until(lambda: client.channel.current is None)
        with pytest.raises(UpstreamError) as caught:
            await client.call()
        assert caught.value.failure is Failure.CONNECT
        go_on.set()
        assert await heard.end() == OK
        await stopping


async def test_connections_that_a_server_retires_are_replaced_and_lose_nothing() -> None:
    async def handler(request: bytes, context: Any) -> None:
        for _ in range(3):
            await context.write(b"text")
            await asyncio.sleep(0.05)

    options = {"max_connection_age_ms": 200, "max_connection_age_grace_ms": 5000}
    async with grpc_server(handler, **options) as (address, _), client_of(address) as client:
        ends = []
        for _ in range(40):
            ends.append((await client.call())[1])
            await asyncio.sleep(0.03)
        assert [await heard.end() for heard in ends] == [OK] * 40
        assert len(set(client.connections)) > 2


async def test_an_idle_connection_that_the_server_closes_is_made_anew() -> None:
    async def handler(_: bytes, context: Any) -> None:
        await context.write(b"text")

    async with grpc_server(handler, max_connection_idle_ms=100) as (address, _), client_of(address) as client:
        for _ in range(2):
            _, heard = await client.call()
            assert await heard.end() == OK
            await until(lambda: client.channel.current is None)
