"""New TCP connections to an engine, and what it means that there is none.

A name may stand for several addresses. They are tried in turn, each with a short head start before the next one (RFC
8305), so that one that does not answer takes a quarter of a second and not the whole deadline.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import TypeVar

from gateway.upstream.addresses import HostAddresses
from gateway.upstream.base import Failure, UpstreamError

_OWN_TROUBLE = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""Why a connection may fail that says nothing of the engine."""
_HEAD_START_S = 0.25

_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


class Connector:
    """Connects to one server. `endpoint` is the engine's name in error messages: clients are told that, never an
    address."""

    def __init__(self, endpoint: str, host: str, port: int) -> None:
        self._endpoint = endpoint
        self._addresses = HostAddresses(host, port)
        self._port = port

    async def connect(self, protocol: Callable[[], _Protocol], timeout: float) -> _Protocol:
        """The protocol of a new connection. Raises UpstreamError if there is none within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._connect_to_any(protocol, await self._addresses.get())
        except TimeoutError:
            raise self.too_late(timeout) from None
        except OSError as error:
            if isinstance(error, socket.gaierror):
                reason = "its name cannot be resolved"
            else:
                reason = os.strerror(error.errno).lower() if error.errno else "no address"
            failure = Failure.GATEWAY if error.errno in _OWN_TROUBLE else Failure.CONNECT
            raise UpstreamError(
                failure, f"Engine {self._endpoint} cannot be reached: {reason}.", 503, "connect_failed"
            ) from None

    def too_late(self, timeout: float) -> UpstreamError:
        """The error of a connection that was not made in time."""
        message = f"Engine {self._endpoint} accepted no connection within {timeout:g} s."
        return UpstreamError(Failure.NO_CONNECTION, message, 503, "connect_timeout")

    async def _connect_to_any(self, protocol: Callable[[], _Protocol], addresses: list[str]) -> _Protocol:
        """A connection to the first of `addresses` that takes one. Raises the last OSError."""
        loop = asyncio.get_running_loop()
        if len(addresses) == 1:
            return (await loop.create_connection(protocol, addresses[0], self._port))[1]
        error: BaseException = OSError("no address")
        untried = iter(addresses)
        trying: set[asyncio.Task[tuple[asyncio.Transport, _Protocol]]] = set()
        try:
            while True:
                address = next(untried, None)
                if address is not None:
                    trying.add(asyncio.create_task(loop.create_connection(protocol, address, self._port)))
                elif not trying:
                    raise error
                patience = _HEAD_START_S if address is not None else None
                ended, trying = await asyncio.wait(trying, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                made = []
                for one in ended:
                    if (failed := one.exception()) is None:
                        made.append(one.result())
                    else:
                        error = failed
                for transport, _ in made[1:]:
                    transport.abort()
                if made:
                    return made[0][1]
        finally:
            for one in trying:
                one.cancel()
