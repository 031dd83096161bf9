"""`headrace gateway --workers` in processes of its own, and clients of streams."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from router.spec.fleet import FleetSpec
from router.spec.gateway import AuthSpec, GatewaySpec
from tests.harness import AT_ONCE, CALM, DONE, ONE, OPEN, STREAM, free_port

WORKERS = 2


class Client:
    """One client's stream."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.port = 0
        """The client's own."""
        self.received = b""
        self.began = asyncio.Event()
        self.ended = asyncio.create_task(self._run(session, url))

    @property
    def complete(self) -> bool:
        return self.received == ONE + DONE

    async def _run(self, session: aiohttp.ClientSession, url: str) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(f"{url}/v1/chat/completions", json=STREAM) as response:
                assert response.status == 200 and response.connection is not None
                assert response.connection.transport is not None
                self.port = response.connection.transport.get_extra_info("sockname")[1]
                async for piece in response.content.iter_any():
                    self.received += piece
                    self.began.set()


@contextlib.asynccontextmanager
async def streams(url: str, count: int) -> AsyncIterator[list[Client]]:
    """Streams that have begun, one a little after the other: their engine accepts in the process that makes them."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients: list[Client] = []
        try:
            for _ in range(count):
                clients.append(Client(session, url))
                await asyncio.sleep(0.002)
            async with asyncio.timeout(20 + count / 10):
                for client in clients:
                    await client.began.wait()
            yield clients
        finally:
            for client in clients:
                client.ended.cancel()
            await asyncio.gather(*(client.ended for client in clients), return_exceptions=True)


@dataclass
class Command:
    """A running `headrace gateway --workers`."""

    process: asyncio.subprocess.Process
    addresses: GatewaySpec
    log: Path
    patience_s: float = 30.0

    @property
    def url(self) -> str:
        return f"http://{self.addresses.http}"

    @property
    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    async def get(self, path: str) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.addresses.admin}{path}") as response:
            return await response.text()

    async def samples(self) -> dict[tuple[str, ...], float]:
        """The value of each sample of a scrape, by its name and its labels."""
        families = text_string_to_metric_families(await self.get("/metrics"))
        samples = [sample for family in families for sample in family.samples]
        return {(one.name, *map("=".join, sorted(one.labels.items()))): one.value for one in samples}

    async def readiness(self) -> Any:
        return msgspec.json.decode(await self.get("/readyz"))

    async def until(self, holds: Callable[[Any], bool]) -> None:
        """Wait for a condition of `/readyz`."""
        async with asyncio.timeout(self.patience_s):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if holds(await self.readiness()):
                        return
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.02)

    async def until_ready(self, serving: int = WORKERS) -> None:
        """Wait until so many workers serve, and one of them can serve the route."""
        await self.until(lambda state: state["detail"]["workers"]["serving"] == serving and state["status"] == "ready")

    async def ends(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def command(
    folder: Path,
    spec: FleetSpec,
    addresses: GatewaySpec | None = None,
    workers: int = WORKERS,
    auth: AuthSpec = OPEN,
) -> AsyncIterator[Command]:
    """Run the command for `spec`; whatever a test leaves of it is killed."""
    addresses = addresses or GatewaySpec(
        http=f"127.0.0.1:{free_port()}",
        admin=f"127.0.0.1:{free_port()}",
        grpc=f"127.0.0.1:{free_port()}",
        drain=AT_ONCE,
    )
    gateway = msgspec.structs.replace(addresses, auth=auth, overload=CALM)
    file, log = folder / "fleet.yaml", folder / "log"
    file.write_text(yaml.safe_dump(msgspec.to_builtins(msgspec.structs.replace(spec, gateway=gateway))))
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", "gateway", "--config", str(file), "--workers", str(workers)),
            stderr=output,
        )
    running = Command(process, addresses, log)
    try:
        yield running
    finally:
        if process.returncode is None:
            for one in running.workers:
                one.kill()
            process.kill()
        await process.wait()


async def connects_forever(address: str) -> None:
    """Connect again and again. Raises OSError when a connection is refused."""
    host, _, port = address.rpartition(":")
    while True:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        await asyncio.sleep(0.001)


def clients_of(worker: psutil.Process, address: str | None) -> set[int]:
    """The other ends' ports of a worker's connections at one of its own addresses."""
    assert address is not None
    port = int(address.rpartition(":")[2])
    at_it = [one for one in worker.net_connections("tcp") if one.laddr.port == port]
    return {one.raddr.port for one in at_it if one.raddr}
