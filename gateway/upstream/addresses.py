"""The addresses behind an engine's host name: looked up now and then, and kept when looking up fails.

A resolver that fails or hangs must not take engines with it that stand where they stood, so what is known is used on
until something newer is. A lookup runs in a thread and cannot be cancelled; it is shared by all who wait for it.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket

logger = logging.getLogger(__name__)

FRESH_S = 30.0
"""How long addresses are used without asking again."""
PATIENCE_S = 1.0
"""How long a lookup is waited for where addresses from before can be used instead."""


class HostAddresses:
    """The IP addresses of one host."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known: list[str] = []
        self._until = 0.0
        self._lookup: asyncio.Task[list[str]] | None = None
        with contextlib.suppress(ValueError):
            self._known, self._until = [str(ipaddress.ip_address(host))], float("inf")

    async def get(self) -> list[str]:
        """The addresses, at least one. Raises OSError if none was ever found."""
        if asyncio.get_running_loop().time() < self._until:
            return self._known
        if self._lookup is None:
            self._lookup = asyncio.create_task(resolve(self._host, self._port), name=f"resolve {self._host}")
            self._lookup.add_done_callback(self._looked_up)
        lookup = asyncio.shield(self._lookup)
        if not self._known:
            return await lookup
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await lookup
        except (OSError, TimeoutError):
            return self._known

    def _looked_up(self, lookup: "asyncio.Task[list[str]]") -> None:
        self._lookup = None
        if lookup.cancelled():
            return
        error = lookup.exception()
        if error is None:
            self._known = lookup.result()
            self._until = asyncio.get_running_loop().time() + FRESH_S
        elif self._known:
            logger.warning("%s cannot be resolved (%s); its last known addresses are used on", self._host, error)


async def resolve(host: str, port: int) -> list[str]:
    """The addresses the system's resolver gives. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
