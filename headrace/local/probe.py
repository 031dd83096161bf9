"""Readiness asked from the outside: each probe answers whether a part would serve a client now.

Probes raise nothing and take at most `PROBE_TIMEOUT_S`; a part that is starting refuses connections, and that is an
answer like any other.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from headrace.local.ports import LOOPBACK

PROBE_TIMEOUT_S = 2.0

Probe = Callable[[], Awaitable[bool]]


def http_probe(port: int, path: str) -> Probe:
    """Ready when GET `path` answers 200."""
    request = f"GET {path} HTTP/1.1\r\nhost: {LOOPBACK}\r\nconnection: close\r\n\r\n".encode()
    return _exchange(port, request, lambda line: line.split(b" ")[1:2] == [b"200"])


def redis_probe(port: int) -> Probe:
    """Ready when PING answers PONG (a server that still loads its data answers an error)."""
    return _exchange(port, b"*1\r\n$4\r\nPING\r\n", lambda line: line == b"+PONG\r\n")


def _exchange(port: int, request: bytes, accept: Callable[[bytes], bool]) -> Probe:
    async def probe() -> bool:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(LOOPBACK, port)
                try:
                    writer.write(request)
                    return accept(await reader.readline())
                finally:
                    writer.close()
        return False

    return probe
