"""Clients that fall behind: what is kept for them is bounded, nobody else waits, and they lose nothing unless they stop
for longer than the idle timeout."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from gateway.http.connection import WRITE_BUFFER_BYTES
from router.spec.fleet import TimeoutSpec
from tests.fault.relay_client import Api, Ask, Seen, read_response
from tests.fault.relay_matrix import OUTER_S, Matrix, route_name, running_matrix
from tests.fault.relay_scripts import HEALTHY, HEALTHY_STREAM, Framing, Script

READERS = 12
IDLE_S = 1.0
RECEIVE_BUFFER = 16 * 1024
ONE_READ = 256 * 1024
"""The most that an event loop reads at once: the write buffer may overrun by so much before reading is paused."""
SLICE = 64 * 1024
_EVENT = b"data: " + b"x" * 8184 + b"\n\n"
STREAM = Script((_EVENT,) * 1024, events=True, cuts=SLICE)
LENGTH = Script((b"x" * 8192,) * 1024, events=False, framing=Framing.LENGTH, cuts=SLICE)
CHUNKED = Script((b"x" * 8192,) * 1024, events=False, cuts=SLICE)
"""Answers of 8 MiB."""
OTHERS = [(HEALTHY_STREAM, Ask(Api.CHAT, True)), (HEALTHY, Ask(Api.INFER, False))]
CASES = [
    pytest.param(STREAM, Ask(Api.CHAT, True), id="stream"),
    pytest.param(STREAM, Ask(Api.COMPLETIONS, True, "1.0"), id="stream, HTTP 1.0"),
    pytest.param(STREAM, Ask(Api.GENERATE_STREAM, True), id="generate_stream"),
    pytest.param(LENGTH, Ask(Api.EMBEDDINGS, False), id="plain"),
    pytest.param(CHUNKED, Ask(Api.INFER, False), id="infer"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def matrix() -> AsyncIterator[Matrix]:
    async with running_matrix(TimeoutSpec(idle=f"{IDLE_S}s"), send_buffer=SLICE) as matrix:
        yield matrix


class SlowReader:
    """A client with a small receive buffer that reads when it is told to."""

    def __init__(self) -> None:
        self.connection = socket.socket()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        self.connection.setblocking(False)
        self.received = bytearray()

    async def send(self, port: int, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.connection, ("127.0.0.1", port))
        await loop.sock_sendall(self.connection, request)

    async def read(self, pause: float = 0.0) -> Seen:
        """All that comes, `SLICE` bytes and then a pause at a time."""
        loop = asyncio.get_running_loop()
        at_least = 8 * 1024 * 1024
        while True:
            try:
                piece = await loop.sock_recv(self.connection, SLICE)
                ended = "" if piece else "fin"
            except ConnectionResetError:
                piece, ended = b"", "rst"
            self.received += piece
            seen = read_response(bytes(self.received), ended) if ended or len(self.received) > at_least else None
            if seen is not None:
                return seen
            await asyncio.sleep(pause)

    def close(self) -> None:
        self.connection.close()


def sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, which is client, gateway and engine."""
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_socket():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as found:
                if found.family is socket.AF_INET:
                    found.getpeername()  # raises where nobody is connected
                    yield found


def buffers(matrix: Matrix) -> int:
    """The largest sum of buffers between an engine and its client, in bytes."""
    engine_send = gateway_receive = gateway_send = client_receive = 0
    for found in sockets():
        here, there = found.getsockname()[1], found.getpeername()[1]
        send = found.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        receive = found.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        if here in matrix.player.ports:
            engine_send = max(engine_send, send)
        elif there in matrix.player.ports:
            gateway_receive = max(gateway_receive, receive)
        elif here == matrix.running.http_port:
            gateway_send = max(gateway_send, send)
        elif there == matrix.running.http_port:
            client_receive = max(client_receive, receive)
    assert engine_send and gateway_receive and gateway_send and client_receive
    return engine_send + gateway_receive + WRITE_BUFFER_BYTES + ONE_READ + gateway_send + client_receive


@pytest.mark.parametrize(("script", "ask"), CASES)
async def test_readers_that_stop_hold_up_their_engines_and_nobody_else_and_may_go_on(
    matrix: Matrix, script: Script, ask: Ask
) -> None:
    route = route_name(ask.api.kserve, elsewhere=False, hasty=False)
    assert script.writes
    rss = psutil.Process().memory_info().rss
    readers, plays = [SlowReader() for _ in range(READERS)], []
    try:
        for reader in readers:
            request_id, play = matrix.announce(script, HEALTHY)
            plays.append(play)
            await reader.send(matrix.running.http_port, ask.request(route, request_id))
        before: list[int] = []
        while before != (now := [play.sent for play in plays]) or not all(now):
            before = now
            await asyncio.sleep(0.3)
        held = psutil.Process().memory_info().rss - rss
        assert held < READERS * (WRITE_BUFFER_BYTES + 2 * ONE_READ), f"{held} bytes for {READERS} readers"
        assert max(now) <= buffers(matrix), f"{max(now)} bytes sent, buffers of {buffers(matrix)}"
        assert buffers(matrix) < 2 * 1024 * 1024
        await asyncio.gather(*(matrix.check(one, other) for one, other in OTHERS for _ in range(10)))
        seen = await asyncio.wait_for(readers[0].read(), OUTER_S)
        assert (seen.whole, seen.body == script.body, seen.rest) == (True, True, b"")
    finally:
        for reader in readers:
            reader.close()
        matrix.player.plays.clear()


@pytest.mark.parametrize(("script", "ask"), CASES)
async def test_a_reader_that_stops_for_the_idle_timeout_is_cut(matrix: Matrix, script: Script, ask: Ask) -> None:
    route = route_name(ask.api.kserve, elsewhere=False, hasty=True)
    reader = SlowReader()
    request_id, play = matrix.announce(script, HEALTHY)
    try:
        await reader.send(matrix.running.http_port, ask.request(route, request_id))
        await matrix.running.until(lambda: play.hung_up == 1, "the engine has been told", OUTER_S)
        await matrix.running.until_idle(OUTER_S)
        seen = await asyncio.wait_for(reader.read(), OUTER_S)
    finally:
        reader.close()
        del matrix.player.plays[request_id]
    assert not seen.whole
    assert script.body.startswith(seen.body)
    assert len(seen.body) < len(script.body)


@pytest.mark.parametrize(("script", "ask"), CASES)
async def test_a_slow_but_steady_reader_gets_every_byte(matrix: Matrix, script: Script, ask: Ask) -> None:
    route = route_name(ask.api.kserve, elsewhere=False, hasty=True)
    reader = SlowReader()
    request_id, _ = matrix.announce(script, HEALTHY)
    loop = asyncio.get_running_loop()
    try:
        started = loop.time()
        await reader.send(matrix.running.http_port, ask.request(route, request_id))
        seen = await asyncio.wait_for(reader.read(pause=0.005), 6 * OUTER_S)
        took = loop.time() - started
    finally:
        reader.close()
        del matrix.player.plays[request_id]
    assert (seen.whole, seen.body == script.body, seen.rest) == (True, True, b"")
    assert took > IDLE_S, "not slow enough to tell anything"
