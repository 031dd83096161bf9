"""Workers of a gateway accept about as many connections each, and none waits for one that does not accept."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.spec.fleet import EndpointSpec
from tests.fault.worker_command import Command, clients_of, command
from tests.harness import one_pool

WORKERS = 3
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
CONNECTIONS = 150


@contextlib.asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Command]:
    spec = one_pool(EndpointSpec(id="nobody", http="http://127.0.0.1:9"))
    async with command(folder, spec, workers=WORKERS) as running:
        await running.until(lambda state: state["detail"]["workers"]["serving"] == WORKERS)
        yield running


@contextlib.asynccontextmanager
async def clients(running: Command, *, pause_s: float) -> AsyncIterator[None]:
    """Connections that are kept, each of which has been answered."""
    port = int(running.addresses.http.rpartition(":")[2])
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


@pytest.mark.parametrize("pause_s", [0, 0.003])
async def test_each_worker_gets_about_its_share_of_a_burst_and_of_connections_that_come_now_and_then(
    tmp_path: Path, pause_s: float
) -> None:
    async with gateway(tmp_path) as running, clients(running, pause_s=pause_s):
        shares = [len(clients_of(worker, running.addresses.http)) for worker in running.workers]
    assert sum(shares) == CONNECTIONS
    assert min(shares) >= CONNECTIONS / WORKERS / 2


async def test_a_worker_that_does_not_accept_leaves_its_share_to_the_others(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        hung, *others = running.workers
        hung.suspend()
        try:
            async with clients(running, pause_s=0):
                assert sum(len(clients_of(worker, running.addresses.http)) for worker in others) == CONNECTIONS
        finally:
            hung.resume()
