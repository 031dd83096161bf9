"""The access log of several processes that write to one place."""

import asyncio
import os
import threading
from pathlib import Path

import aiohttp
import msgspec
import pytest

from router.spec.gateway import GatewaySpec
from tests.fault.worker_command import command
from tests.harness import HeldEngine, free_port, one_pool

REQUESTS = 1000


def collect(pipe: Path, into: list[bytes]) -> None:
    """Read a pipe until everybody has closed it."""
    with pipe.open("rb") as reader:
        into.append(reader.read())


@pytest.mark.parametrize("kind", ["file", "pipe"])
async def test_workers_write_every_line_once_and_whole_to_the_same_place(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "access.log"
    read: list[bytes] = []
    reader = threading.Thread(target=collect, args=(path, read), daemon=True)
    if kind == "pipe":
        os.mkfifo(path)
        reader.start()
    addresses = GatewaySpec(http=f"127.0.0.1:{free_port()}", admin=f"127.0.0.1:{free_port()}", access_log=str(path))
    async with HeldEngine() as engine, command(tmp_path, one_pool(engine.endpoint()), addresses) as running:
        await running.until_ready()

        async def ask(number: int) -> None:
            async with aiohttp.ClientSession() as session:  # a connection each, so that all workers get some
                for one in range(number, REQUESTS, 20):
                    async with session.get(f"{running.url}/{one}", headers={"user-agent": "x" * 150}) as response:
                        assert response.status == 404

        await asyncio.gather(*(ask(number) for number in range(20)))
        running.process.terminate()
        assert await running.ends() == 0
    if kind == "pipe":
        await asyncio.to_thread(reader.join, 10)
    lines = (b"".join(read) if kind == "pipe" else path.read_bytes()).splitlines()
    asked = [msgspec.json.decode(line)["path"] for line in lines]
    assert sorted(asked, key=lambda path: int(path[1:])) == [f"/{number}" for number in range(REQUESTS)]


async def test_a_log_that_cannot_be_written_is_one_sentence_when_the_gateway_starts(tmp_path: Path) -> None:
    addresses = GatewaySpec(http=f"127.0.0.1:{free_port()}", admin=f"127.0.0.1:{free_port()}", access_log=str(tmp_path))
    async with HeldEngine() as engine, command(tmp_path, one_pool(engine.endpoint()), addresses) as running:
        assert await running.ends() == 1
    said = running.log.read_text().splitlines()
    assert said[-1] == f"Cannot write the access log to {tmp_path} (gateway.access_log): is a directory."
