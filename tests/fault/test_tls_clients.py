"""Clients that misbehave over TLS, and what TLS has no way to say: the client port's server alone."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway.http import accepting
from gateway.http import connection as connections
from gateway.http import server as servers
from gateway.http.client_addresses import ClientAddresses
from gateway.http.client_response import ClientResponse
from gateway.http.connection import Request
from gateway.http.server import ClientServer
from gateway.metrics import Metrics
from gateway.overload import OverloadWatch
from gateway.tls import Certificate
from router.spec.gateway import ClientsSpec, OverloadSpec, TlsSpec
from tests.certificates import Made, make
from tests.harness import free_port

LARGE = 3_000_000
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 90000000\r\n\r\n"

Answer = Callable[[Request, ClientResponse], Awaitable[None]]


class Served:
    """A server with TLS, its port and its metrics."""

    def __init__(self, server: ClientServer, port: int, metrics: Metrics, made: Made) -> None:
        self.server = server
        self.port = port
        self.metrics = metrics
        self.made = made

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client whose kernel takes little of what it does not read."""
        here = socket.socket()
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        here.setblocking(False)
        await asyncio.get_running_loop().sock_connect(here, ("127.0.0.1", self.port))
        return await asyncio.open_connection(
            sock=here, ssl=self.made.client(), server_hostname="127.0.0.1", limit=1 << 14
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - counters are no events
                await asyncio.sleep(0.01)

    def refused(self, reason: str) -> float:
        return self.metrics.clients_refused.values[reason,]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("tls"))


@contextlib.asynccontextmanager
async def serving(made: Made, answer: Answer) -> AsyncIterator[Served]:
    async def handle(request: Request) -> ClientResponse:
        response = ClientResponse(request.connection, request.head, (), exposes_routing=True)
        await answer(request, response)
        return response

    metrics, port = Metrics(), free_port()
    certificate = Certificate(TlsSpec(cert=str(made.cert), key=str(made.key)))
    addresses = ClientAddresses(ClientsSpec(connections_per_address=50), metrics)
    server = ClientServer(handle, OverloadWatch(OverloadSpec(), metrics), addresses, certificate.context)
    await server.start(f"127.0.0.1:{port}")
    try:
        yield Served(server, port, metrics, made)
    finally:
        async with asyncio.timeout(10):
            await server.stop(5)
    assert not server.connections
    assert not addresses._connections._held


async def small(_: Request, response: ClientResponse) -> None:
    response.send(200, (), b"whole")


async def large(_: Request, response: ClientResponse) -> None:
    response.send(200, (), b"x" * LARGE)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(connections, "LINGER_S", 0.3)
    monkeypatch.setattr(accepting, "HANDSHAKE_S", 0.3)


@pytest.mark.usefixtures("hasty")
async def test_a_client_that_never_finishes_its_handshake_is_cut(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(made, small) as served:
        for begun in (b"", b"\x16\x03\x01\x02\x00"):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(begun)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        await served.until(lambda: served.refused("tls_handshake") == 2)
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


async def test_plain_text_on_a_tls_port_is_the_end_of_that_connection_only(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(made, small) as served:
        for _ in range(20):
            plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", served.port)
            plain_writer.write(GET)
            with contextlib.suppress(ConnectionError):
                assert b"HTTP" not in await asyncio.wait_for(plain_reader.read(), 5)
            plain_writer.close()
        reader, writer = await served.connect()
        writer.write(GET)
        assert (await asyncio.wait_for(reader.readuntil(b"whole"), 5)).startswith(b"HTTP/1.1 200")
        writer.close()
        assert served.refused("tls_handshake") == 20
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_leaves_ends_its_request(made: Made, how: str) -> None:
    given_up = asyncio.Event()

    async def never(_: Request, response: ClientResponse) -> None:
        response.start(200, (), None)
        response.write(b"begun")
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    async with serving(made, never) as served:
        reader, writer = await served.connect()
        writer.write(GET)
        await asyncio.wait_for(reader.readuntil(b"begun"), 5)
        (writer.close if how == "close" else writer.transport.abort)()
        await asyncio.wait_for(given_up.wait(), 5)


async def test_a_slow_reader_holds_up_what_it_is_sent_and_gets_it_all(made: Made) -> None:
    paused, resumed = asyncio.Event(), asyncio.Event()

    class Flow:
        def pause(self) -> None:
            paused.set()
            resumed.clear()

        def resume(self) -> None:
            resumed.set()

    async def stream(_: Request, response: ClientResponse) -> None:
        response.start(200, (), None)
        response.follow(Flow())
        resumed.set()
        for _chunk in range(200):
            response.write(b"x" * 20_000)
            await resumed.wait()
        response.finish()

    async with serving(made, stream) as served:
        reader, writer = await served.connect()
        writer.write(GET.replace(b"Host", b"Connection: close\r\nHost"))
        await asyncio.wait_for(paused.wait(), 5)
        await asyncio.sleep(0.1)
        (connection,) = served.server.connections
        assert connection.transport is not None
        assert connection.transport.get_write_buffer_size() < 3 * connections.WRITE_BUFFER_BYTES
        received = b""
        async with asyncio.timeout(20):
            while piece := await reader.read(1 << 16):
                received += piece
                await asyncio.sleep(0.001)
        assert received.count(b"x" * 20_000) == 200
        assert received.endswith(b"0\r\n\r\n")
        writer.close()


async def test_an_early_answer_is_whole_and_then_told_to_be_all(made: Made) -> None:
    async def early(_: Request, response: ClientResponse) -> None:
        await asyncio.sleep(0)
        response.send(200, (), b"x" * LARGE)

    async with serving(made, early) as served:
        reader, writer = await served.connect()
        writer.write(POST + bytes(1_000_000))
        received = await asyncio.wait_for(reader.read(), 10)
        assert received.partition(b"\r\n\r\n")[2] == b"x" * LARGE
        writer.close()


@pytest.mark.usefixtures("hasty")
async def test_a_client_that_does_not_say_goodbye_is_cut_once_it_has_everything(made: Made) -> None:
    async with serving(made, small) as served:
        loop = asyncio.get_running_loop()
        here, to_server, to_client = socket.socket(), ssl.MemoryBIO(), ssl.MemoryBIO()
        here.setblocking(False)
        await loop.sock_connect(here, ("127.0.0.1", served.port))
        tls = made.client().wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await loop.sock_sendall(here, to_server.read())
                to_client.write(await loop.sock_recv(here, 1 << 16))
        tls.write(GET.replace(b"Host", b"Connection: close\r\nHost"))
        await loop.sock_sendall(here, to_server.read())
        await served.until(lambda: bool(served.server.connections))
        await served.until(lambda: not served.server.connections)
        while piece := await loop.sock_recv(here, 1 << 16):
            to_client.write(piece)
        assert tls.read(1 << 16).endswith(b"whole")
        here.close()


async def test_a_stop_lets_what_is_answered_finish_and_closes_what_is_idle(made: Made) -> None:
    held = asyncio.Event()

    async def waits(_: Request, response: ClientResponse) -> None:
        await held.wait()
        response.send(200, (), b"whole")

    async with serving(made, waits) as served:
        idle_reader, idle_writer = await served.connect()
        reader, writer = await served.connect()
        writer.write(GET)
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(served.server.stop(5))
        assert await asyncio.wait_for(idle_reader.read(), 5) == b""
        held.set()
        assert (await asyncio.wait_for(reader.read(), 5)).endswith(b"whole")
        await asyncio.wait_for(stopping, 5)
        idle_writer.close()
        writer.close()


async def test_a_client_that_still_shakes_hands_when_a_server_stops_gets_its_answer(made: Made) -> None:
    async with serving(made, small) as served:
        (acceptor,) = served.server._listening
        assert isinstance(acceptor, accepting.Acceptor)
        here = socket.socket()
        here.setblocking(False)
        await asyncio.get_running_loop().sock_connect(here, ("127.0.0.1", served.port))
        await served.until(lambda: bool(acceptor._settling))
        served.server.drain(accepting=False)
        stopping = asyncio.create_task(served.server.stop(5))
        await asyncio.sleep(0.1)
        assert not stopping.done()
        reader, writer = await asyncio.open_connection(sock=here, ssl=made.client(), server_hostname="127.0.0.1")
        writer.write(GET)
        assert (await asyncio.wait_for(reader.readuntil(b"whole"), 5)).startswith(b"HTTP/1.1 200")
        writer.close()
        await asyncio.wait_for(stopping, 5)


async def test_a_stop_waits_for_no_client_that_does_not_shake_hands_longer_than_it_may(made: Made) -> None:
    async with serving(made, small) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        (acceptor,) = served.server._listening
        assert isinstance(acceptor, accepting.Acceptor)
        await served.until(lambda: bool(acceptor._settling))
        async with asyncio.timeout(5):
            await served.server.stop(0.1)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_a_large_answer_reaches_a_slow_client_of_a_server_that_stops(made: Made) -> None:
    async with serving(made, large) as served:
        reader, writer = await served.connect()
        writer.write(GET)
        await asyncio.wait_for(reader.readexactly(1000), 5)
        stopping = asyncio.create_task(served.server.stop(8))
        received = 0
        while piece := await asyncio.wait_for(reader.read(1 << 16), 5):
            received += len(piece)
            await asyncio.sleep(0.002)
        assert received > LARGE - 1000
        await asyncio.wait_for(stopping, 8)
        writer.close()


async def test_connections_over_the_cap_are_closed_before_they_shake_hands(made: Made) -> None:
    async with serving(made, small) as served:
        kept = [await served.connect() for _ in range(50)]
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await served.connect()
        assert (served.refused("connections"), served.refused("tls_handshake")) == (1, 0)
        kept.pop()[1].close()
        await served.until(lambda: len(served.server.connections) == 49)
        kept.append(await served.connect())
        for _, writer in kept:
            writer.close()
