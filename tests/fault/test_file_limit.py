"""A gateway that may open no more files."""

import asyncio
import contextlib
import resource
from pathlib import Path

import aiohttp
import psutil

from tests.fault.worker_command import command
from tests.harness import CHAT, ScriptedEngine, answering, one_pool

answers = answering()


async def test_clients_do_not_take_the_last_files_from_the_admin_port_and_the_log_tells(tmp_path: Path) -> None:
    async with ScriptedEngine(answers) as engine, command(tmp_path, one_pool(engine.endpoint()), workers=1) as running:
        await running.until(lambda state: state["status"] == "ready")
        most = psutil.Process(running.process.pid).num_fds() * 2
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (most, most))
        host, _, port = running.addresses.http.rpartition(":")
        async with contextlib.AsyncExitStack() as connections:
            for _ in range(2 * most):  # far more than it may have
                _, writer = await asyncio.open_connection(host, int(port))
                connections.callback(writer.close)
            await running.until(lambda state: state["status"] == "ready")
            for _ in range(8):
                assert (await running.readiness())["status"] == "ready"
        told = [line for line in running.log.read_text().splitlines() if "new client connections" in line]
        assert len(told) == 1
        assert f"nearly all of the {most} files" in told[0]
        async with asyncio.timeout(10):
            while await asked(running.url) != 200:  # noqa: ASYNC110 - how the gateway is has no event
                await asyncio.sleep(0.05)


async def asked(url: str) -> int | None:
    """The status of a request on a connection of its own, if it is answered."""
    with contextlib.suppress(aiohttp.ClientError):
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json=CHAT) as response,
        ):
            return response.status
    return None
