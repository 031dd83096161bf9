"""Workers of a gateway accept about as many connections each, and none waits for one that does not accept."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.http import accepting
from gateway.http.client_addresses import ClientAddresses
from gateway.http.client_response import ClientResponse
from gateway.http.connection import Request
from gateway.http.fair_share import FairShare, shared_memory
from gateway.http.server import ClientServer
from gateway.listening import bind
from gateway.metrics import Metrics
from gateway.overload import OverloadWatch
from router.spec.fleet import EndpointSpec
from router.spec.gateway import ClientsSpec, OverloadSpec
from tests.fault.worker_command import Command, clients_of, command
from tests.harness import free_port, one_pool

WORKERS = 3
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
CONNECTIONS = 150


@pytest_asyncio.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Command]:
    spec = one_pool(EndpointSpec(id="nobody", http="http://127.0.0.1:9"))
    async with command(tmp_path_factory.mktemp("share"), spec, workers=WORKERS) as running:
        await running.until(lambda state: state["detail"]["workers"]["serving"] == WORKERS)
        yield running


def clients(running: Command, *, pause_s: float) -> contextlib.AbstractAsyncContextManager[None]:
    return answered(running.addresses.http, pause_s=pause_s)


@contextlib.asynccontextmanager
async def answered(address: str, *, pause_s: float) -> AsyncIterator[None]:
    """Connections that are kept, each of which has been answered."""
    port = int(address.rpartition(":")[2])
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(CONNECTIONS):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            await loop.sock_connect(one, ("127.0.0.1", port))
            opened.append(one)
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(20):
            for one in opened:
                await loop.sock_sendall(one, GET)
            for one in opened:
                assert (await loop.sock_recv(one, 4096)).startswith(b"HTTP/1.1 200")
        yield


async def test_connections_that_come_now_and_then_go_to_every_worker(running: Command) -> None:
    async with clients(running, pause_s=0.01):
        shares = [len(clients_of(worker, running.addresses.http)) for worker in running.workers]
    assert sum(shares) == CONNECTIONS
    assert min(shares) >= CONNECTIONS / WORKERS / 4  # how soon a worker comes to accept is its scheduler's to say


async def test_of_a_burst_those_who_accept_take_the_same() -> None:
    """In one process, where nobody has to wait for a core."""

    async def answer(request: Request) -> ClientResponse:
        response = ClientResponse(request.connection, request.head, (), exposes_routing=True)
        response.send(200, (), b"")
        return response

    metrics, memory = Metrics(), shared_memory(WORKERS)
    address = f"127.0.0.1:{free_port()}"
    with contextlib.closing(bind("http", address)[0]) as bound:
        servers = [
            ClientServer(
                *(answer, OverloadWatch(OverloadSpec(), metrics), ClientAddresses(ClientsSpec(), metrics)),
                share=FairShare(os.dup(memory), place, WORKERS),
            )
            for place in range(WORKERS)
        ]
        os.close(memory)
        for server in servers:
            await server.start(address, [bound.dup()])
        try:
            async with answered(address, pause_s=0):
                shares = [len(server.connections) for server in servers]
        finally:
            for server in servers:
                await server.stop(5)
    assert sum(shares) == CONNECTIONS
    assert max(shares) - min(shares) <= accepting._LEFT_OVER + 4


async def test_a_worker_that_does_not_accept_leaves_its_share_to_the_others(running: Command) -> None:
    hung, *others = running.workers
    hung.suspend()
    try:
        async with clients(running, pause_s=0):
            assert sum(len(clients_of(worker, running.addresses.http)) for worker in others) == CONNECTIONS
    finally:
        hung.resume()
