"""Clients that take more than their address may have, and proxies that tell whose requests they bring."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.http import accepting
from router.spec.fleet import FleetSpec
from router.spec.gateway import ClientsSpec, TlsSpec
from tests.certificates import make
from tests.harness import CHAT, EngineConnection, RunningGateway, ScriptedEngine, one_pool, running_gateway

BODY = json.dumps(CHAT).encode()
SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"


def post(*headers: str, path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(BODY)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + BODY


def told(source: str) -> bytes:
    return f"PROXY TCP4 {source} 10.0.0.1 51000 8000\r\n".encode()


def spec_of(engine: ScriptedEngine, **clients: Any) -> FleetSpec:
    spec = one_pool(engine.endpoint())
    gateway = msgspec.structs.replace(spec.gateway, clients=ClientsSpec(**clients))
    return msgspec.structs.replace(spec, gateway=gateway)


class Holding:
    """An engine's script that answers when it is let."""

    def __init__(self) -> None:
        self.held = asyncio.Event()

    async def __call__(self, connection: EngineConnection) -> None:
        await self.held.wait()
        await connection.json()


class Client:
    """A connection on which bytes are written as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, running: RunningGateway, data: bytes = b"", host: str | None = None) -> "Client":
        """Connect from `host`, one of the many addresses of this machine."""
        local = (host, 0) if host else None
        client = cls(*await asyncio.open_connection("127.0.0.1", running.http_port, local_addr=local))
        client.writer.write(data)
        return client

    async def response(self) -> tuple[int, dict[str, Any]]:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await asyncio.wait_for(self.reader.readexactly(int(length.split(b":")[1])), 5)
        return int(head.split(b" ")[1]), json.loads(body)

    async def closed(self) -> bool:
        """Whether the gateway ends the connection without a word."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(), 5) == b""
        return True


def refused(running: RunningGateway, reason: str) -> float:
    return running.gateway.registry.get_sample_value("headrace_clients_refused_total", {"reason": reason}) or 0.0


async def test_requests_over_the_cap_of_an_address_are_429_until_one_has_finished(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Holding()
    async with ScriptedEngine(script) as engine, running_gateway(spec_of(engine, requests_per_address=2)) as running:
        first = [await Client.to(running, post()) for _ in range(2)]
        await running.until(lambda: len(engine.requests) == 2, "both are at the engine")
        for path in ("/v1/chat/completions", "/v2/models/m/infer"):
            over = await Client.to(running, post(path=path))
            code, body = await over.response()
            assert code == 429
            assert "too many requests open" in str(body["error"])
            over.writer.close()
        other = await Client.to(running, post(), host="127.0.0.2")
        await running.until(lambda: len(engine.requests) == 3, "another address is served")
        first.pop().writer.transport.abort()  # a client that leaves gives its place back, too
        await running.until(lambda: running.live_requests == 2, "one is gone")
        third = await Client.to(running, post())
        await running.until(lambda: len(engine.requests) == 4, "the next one is served")
        script.held.set()
        for one in (*first, third, other):
            assert (await one.response())[0] == 200
            one.writer.write(post())  # on a connection that is kept
            assert (await one.response())[0] == 200
            one.writer.close()
        assert refused(running, "requests") == 2
        assert not running.gateway._addresses._requests._held
    assert len([record for record in caplog.records if "too many open" in record.message]) == 1


async def test_connections_over_the_cap_of_an_address_are_closed_and_others_are_not() -> None:
    script = Holding()
    script.held.set()
    async with ScriptedEngine(script) as engine, running_gateway(spec_of(engine, connections_per_address=3)) as running:
        kept = [await Client.to(running) for _ in range(3)]
        over = await Client.to(running, post())
        assert await over.closed()
        other = await Client.to(running, post(), host="127.0.0.2")
        assert (await other.response())[0] == 200
        kept.pop().writer.close()
        await running.until(lambda: running.gateway._addresses._connections._held["127.0.0.1"] == 2, "one is gone")
        again = await Client.to(running, post())
        assert (await again.response())[0] == 200
        for one in (*kept, over, other, again):
            one.writer.close()
        assert refused(running, "connections") == 1
        await running.until(lambda: not running.gateway._addresses._connections._held, "nothing is counted any more")


async def test_behind_a_trusted_proxy_requests_count_for_whom_it_names() -> None:
    script = Holding()
    async with ScriptedEngine(script) as engine:
        spec = spec_of(engine, requests_per_address=1, trusted_proxies=["127.0.0.1"])
        async with running_gateway(spec) as running:
            first = await Client.to(running, post("x-forwarded-for: 203.0.113.7"))
            second = await Client.to(running, post("x-forwarded-for: 203.0.113.7, 203.0.113.8"))
            await running.until(lambda: len(engine.requests) == 2, "two addresses, two requests")
            over = await Client.to(running, post("x-forwarded-for: 198.51.100.1, 203.0.113.7"))
            assert (await over.response())[0] == 429
            liar = await Client.to(running, post("x-forwarded-for: 203.0.113.9"), host="127.0.0.2")
            await running.until(lambda: len(engine.requests) == 3, "who is not trusted counts itself")
            again = await Client.to(running, post("x-forwarded-for: 203.0.113.10"), host="127.0.0.2")
            assert (await again.response())[0] == 429
            script.held.set()
            for one in (first, second, liar):
                assert (await one.response())[0] == 200
            for one in (first, second, liar, over, again):
                one.writer.close()


async def test_a_proxys_header_says_whose_connection_it_is() -> None:
    script = Holding()
    script.held.set()
    async with ScriptedEngine(script) as engine:
        spec = spec_of(
            engine,
            connections_per_address=1,
            requests_per_address=1,
            trusted_proxies=["127.0.0.1"],
            proxy_protocol="any",
        )
        async with running_gateway(spec) as running:
            clients = running.gateway._clients
            assert clients is not None
            first = await Client.to(running, told("203.0.113.7") + post())
            assert (await first.response())[0] == 200
            assert [one.address for one in clients.connections] == ["203.0.113.7"]
            over = await Client.to(running, told("203.0.113.7") + post())
            assert await over.closed()
            rest = socket.inet_aton("203.0.113.8") + socket.inet_aton("10.0.0.1") + bytes(4)
            second = await Client.to(running, SIGNATURE + b"\x21\x11\x00\x0c" + rest + post())
            assert (await second.response())[0] == 200
            checks = [await Client.to(running, SIGNATURE + b"\x20\x00\x00\x00" + post()) for _ in range(3)]
            for check in checks:
                assert (await check.response())[0] == 200
            direct = await Client.to(running, post(), host="127.0.0.2")
            assert (await direct.response())[0] == 200
            liar = await Client.to(running, told("203.0.113.9") + post(), host="127.0.0.3")
            assert (await liar.response())[0] == 400
            for one in (first, over, second, *checks, direct, liar):
                one.writer.close()
            await running.until(lambda: not running.gateway._addresses._connections._held, "nothing is counted")


async def test_a_trusted_proxy_without_a_good_header_is_closed_and_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKE_S", 0.3)
    script = Holding()
    script.held.set()
    async with ScriptedEngine(script) as engine:
        spec = spec_of(engine, trusted_proxies=["127.0.0.0/31"], proxy_protocol="v2")
        async with running_gateway(spec) as running:
            for begins in (post(), told("203.0.113.7") + post(), SIGNATURE + b"\x21", b""):
                client = await Client.to(running, begins)
                assert await client.closed()
                client.writer.close()
            assert refused(running, "proxy_header") == 4
            assert not engine.requests
    (line,) = (record.message for record in caplog.records if "PROXY header" in record.message)
    assert "127.0.0.1: it does not begin as one" in line


async def test_a_proxys_header_stands_before_tls(tmp_path: Path) -> None:
    made = make(tmp_path)
    script = Holding()
    script.held.set()
    async with ScriptedEngine(script) as engine:
        spec = spec_of(engine, trusted_proxies=["127.0.0.1"], proxy_protocol="v1")
        tls = TlsSpec(cert=str(made.cert), key=str(made.key))
        spec = msgspec.structs.replace(spec, gateway=msgspec.structs.replace(spec.gateway, tls=tls))
        async with running_gateway(spec) as running:
            here = socket.socket()
            here.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(here, ("127.0.0.1", running.http_port))
            await loop.sock_sendall(here, told("203.0.113.7"))
            reader, writer = await asyncio.open_connection(sock=here, ssl=made.client(), server_hostname="127.0.0.1")
            client = Client(reader, writer)
            writer.write(post())
            assert (await client.response())[0] == 200
            clients = running.gateway._clients
            assert clients is not None
            assert [one.address for one in clients.connections] == ["203.0.113.7"]
            writer.close()


async def test_a_flood_of_connections_over_the_cap_leaves_nothing_behind() -> None:
    script = Holding()
    script.held.set()
    async with ScriptedEngine(script) as engine, running_gateway(spec_of(engine, connections_per_address=5)) as running:
        flood = await asyncio.gather(*(Client.to(running) for _ in range(300)), return_exceptions=True)
        served = await Client.to(running, post(), host="127.0.0.2")
        assert (await served.response())[0] == 200
        for one in flood:
            if isinstance(one, Client):
                one.writer.close()
        served.writer.close()
        await running.until(lambda: not running.gateway._addresses._connections._held, "nothing is counted any more")
        assert refused(running, "connections") >= 250
