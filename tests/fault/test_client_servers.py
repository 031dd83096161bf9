"""The client port's server alone, with handlers that do what routes seldom do: answer before the body has come, never
end, or say more than their clients read."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway.http import connection as connections
from gateway.http.client_addresses import ClientAddresses
from gateway.http.client_response import ClientResponse
from gateway.http.connection import Request
from gateway.http.server import ClientServer
from gateway.metrics import Metrics
from gateway.overload import OverloadWatch
from router.spec.gateway import ClientsSpec, OverloadSpec
from tests.harness import free_port

LARGE = 1_000_000
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 90000000\r\n\r\n"

Answer = Callable[[Request, ClientResponse], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[ClientServer, socket.socket]]:
    """A server, and a client whose kernel takes little of what it does not read."""

    async def handle(request: Request) -> ClientResponse:
        response = ClientResponse(request.connection, request.head, (), exposes_routing=True)
        await answer(request, response)
        return response

    metrics, port = Metrics(), free_port()
    addresses = ClientAddresses(ClientsSpec(), metrics)
    server = ClientServer(handle, OverloadWatch(OverloadSpec(), metrics), addresses)
    await server.start(f"127.0.0.1:{port}")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        yield server, client
    async with asyncio.timeout(5):
        await server.stop(5)
    assert not server.connections


async def send(client: socket.socket, data: bytes) -> None:
    async with asyncio.timeout(5):
        await asyncio.get_running_loop().sock_sendall(client, data)


async def receive(client: socket.socket, until: bytes = b"") -> bytes:
    """What the server says, up to `until`, or else to the end of the connection."""
    received = b""
    async with asyncio.timeout(5):
        while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            received += piece
            if until and received.endswith(until):
                break
    return received


async def large(_: Request, response: ClientResponse) -> None:
    response.send(200, (), b"x" * LARGE)


async def early(_: Request, response: ClientResponse) -> None:
    """Answers a request without a look at its body."""
    await asyncio.sleep(0)
    response.send(200, (), b"x" * LARGE)


async def written(server: ClientServer) -> connections.ClientConnection:
    """The connection of a client that does not read, once its answer is written."""
    async with asyncio.timeout(5):
        while not server.connections or not next(iter(server.connections)).writing_paused:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return next(iter(server.connections))


async def test_a_request_that_comes_while_the_last_answer_is_read_slowly_is_answered() -> None:
    async with serving(large) as (server, client):
        await send(client, GET)
        await written(server)
        await send(client, GET[:9])
        await asyncio.sleep(0.02)
        await send(client, GET[9:] + GET.replace(b"Host", b"Connection: close\r\nHost"))
        assert (await receive(client)).count(b"HTTP/1.1 200") == 3


async def test_what_is_pipelined_behind_an_answer_that_is_not_read_is_bounded() -> None:
    async with serving(large) as (server, client):
        await send(client, GET)
        await written(server)
        with pytest.raises(ConnectionError):
            while True:
                await send(client, bytes(16 * 1024))
        assert not server.connections


async def test_an_early_answer_is_not_cut_while_its_client_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.1)
    async with serving(early) as (server, client):
        await send(client, POST)
        connection = await written(server)
        connection.check(server.time() + 1)
        assert (await receive(client)).count(b"x") == LARGE


async def test_a_client_that_sends_everything_before_it_reads_comes_to_its_early_answer() -> None:
    async def streams(request: Request, response: ClientResponse) -> None:
        request.body.begin(1 << 30)
        await request.body.read()
        response.start(200, (), None)
        response.write(b"early")
        request.body.drop()
        await ended.wait()
        response.finish()

    ended = asyncio.Event()
    async with serving(streams) as (_, client):
        await send(client, POST + bytes(10))
        await send(client, bytes(20_000_000))
        ended.set()
        received = await receive(client)
        assert b"Connection: close" in received
        assert received.endswith(b"early\r\n0\r\n\r\n")


async def test_a_client_that_pipelined_behind_the_last_answer_gets_that_answer() -> None:
    async def waits(_: Request, response: ClientResponse) -> None:
        await held.wait()
        response.send(200, (), b"whole")

    held = asyncio.Event()
    async with serving(waits) as (_, client):
        await send(client, GET.replace(b"Host", b"Connection: close\r\nHost") + GET)
        await asyncio.sleep(0.02)
        held.set()
        await asyncio.sleep(0.02)
        await send(client, GET * 100)  # on a connection that is closed, this resets it
        await asyncio.sleep(0.02)
        received = await receive(client)
        assert (received.count(b"HTTP/1.1 200"), received[-5:]) == (1, b"whole")


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_stop_cuts_what_does_not_end_and_waits_for_no_client(cancelled: bool) -> None:
    async def never(_: Request, response: ClientResponse) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    given_up = asyncio.Event()
    async with serving(never) as (server, client):
        await send(client, GET)
        await asyncio.sleep(0.02)
        async with asyncio.timeout(1):
            stopping = asyncio.create_task(server.stop(60 if cancelled else 0.1))
            if cancelled:
                await asyncio.sleep(0.02)
                stopping.cancel()
            await asyncio.wait([stopping])
            await given_up.wait()


async def test_a_client_whose_answer_waits_for_it_when_the_server_stops_gets_it_all() -> None:
    async with serving(large) as (server, client):
        await send(client, GET)
        await written(server)
        stopping = asyncio.create_task(server.stop(5))
        assert (await receive(client)).count(b"x") == LARGE
        await asyncio.wait_for(stopping, 5)


async def test_blank_lines_are_no_use_of_a_connection() -> None:
    async def small(_: Request, response: ClientResponse) -> None:
        response.send(200, (), b"whole")

    async with serving(small) as (server, client):
        await send(client, GET)
        assert (await receive(client, b"whole")).startswith(b"HTTP/1.1 200")
        (connection,) = server.connections
        since = connection._since
        await send(client, b"\r\n")
        await asyncio.sleep(0.02)
        assert connection._since == since
        await send(client, b"\r\n" * 10_000)
        assert (await receive(client)).startswith(b"HTTP/1.1 400")
