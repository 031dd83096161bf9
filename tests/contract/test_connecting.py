"""Connections to engines whose host has several addresses, or vanishes; over real sockets."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest

from gateway.upstream import addresses
from gateway.upstream.base import UpstreamError
from gateway.upstream.connecting import Connector
from gateway.upstream.triton.control import GrpcControl
from tests.harness import free_port

HERE, OTHER, NOWHERE = "127.0.0.1", "127.77.0.2", "127.77.0.3"  # that no other test is a client from


class Greeted(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
async def serving(port: int) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """A server at the first address; the connections that it has."""
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), HERE, port)
    yield held
    server.close()
    for writer in held:
        writer.close()


@pytest.fixture
def hung(port: int) -> Iterator[None]:
    """At the second address nothing is accepted, and no more can wait for it."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind((OTHER, port))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((OTHER, port))
        yield


def connector(monkeypatch: pytest.MonkeyPatch, port: int, *hosts: str) -> Connector:
    async def resolve(_: str, __: int) -> list[str]:
        return list(hosts)

    monkeypatch.setattr(addresses, "resolve", resolve)
    return Connector("engine", "engine.test", port)


@pytest.mark.usefixtures("hung")
@pytest.mark.parametrize("hosts", [(OTHER, HERE), (NOWHERE, OTHER, HERE), (NOWHERE, HERE, OTHER)])
async def test_an_address_that_does_not_answer_leaves_time_for_the_others(
    serving: list[asyncio.StreamWriter], port: int, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...]
) -> None:
    made = await connector(monkeypatch, port, *hosts).connect(Greeted, 10)
    transport = made.transport
    assert transport is not None
    assert transport.get_extra_info("peername")[0] == HERE
    async with asyncio.timeout(5):
        while not serving:  # noqa: ASYNC110 - the server's own task
            await asyncio.sleep(0.01)
    assert len(serving) == 1
    transport.close()


@pytest.mark.usefixtures("hung")
async def test_of_several_addresses_none_of_which_answers_the_whole_takes_no_longer_than_it_may(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UpstreamError, match=r"accepted no connection within 0\.6 s"):
        await connector(monkeypatch, port, OTHER, OTHER).connect(Greeted, 0.6)
    with pytest.raises(UpstreamError, match="connection refused"):
        await connector(monkeypatch, port, NOWHERE, HERE).connect(Greeted, 5)
    assert not [task for task in asyncio.all_tasks() if "create_connection" in str(task.get_coro())]


async def test_a_triton_that_has_vanished_loses_its_control_connection_after_30_s_without_a_ping() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    control = GrpcControl("engine", f"127.0.0.1:{port}", 1.0, Mock())
    try:
        async with asyncio.timeout(10):
            await control.channel.channel_ready()
        assert list(unacknowledged_ms(port)) == [30_000]
    finally:
        await control.close()
        await server.stop(0)


def unacknowledged_ms(port: int) -> Iterator[int]:
    """For how long data may go unacknowledged on this process's connections to a port of its own; 0 for ever."""
    for file in Path("/proc/self/fd").iterdir():  # gRPC shows its sockets to nobody
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                yield one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
