"""Connections to an engine's HTTP server, kept alive between requests.

Our own `asyncio.Protocol` instead of an HTTP client library, because a relay needs what those hide: bytes as they were
framed, in the moment they arrive, without a task in between. A connection carries one request at a time and hands
everything it reads to its receiver.
"""

import asyncio
import contextlib
import socket
import struct
from collections import deque
from typing import cast
from urllib.parse import urlsplit

from gateway.relay.steady import Feed
from gateway.upstream.connecting import Connector

IDLE_LIMIT_S = 4.0
"""How long an unused connection is kept. Engines close theirs after 5 s or more (uvicorn, llama.cpp): ours goes first,
so that no request meets a connection that is just being closed."""
_RESET = struct.pack("ii", 1, 0)
"""`SO_LINGER` with no time to linger: closing resets the connection."""
RECEIVE_BUFFER_BYTES = 128 * 1024
"""What the kernel may queue of an answer that is not read, because its client does not keep up (it takes twice that):
left alone it grows to megabytes, and stays so for all that the connection serves later."""
IDLE_CONNECTIONS = 256
"""Unused connections kept for one engine."""


class Connection(Feed, asyncio.Protocol):
    """One TCP connection to an engine.

    Who it reads for changes twice a request, its transport's protocol never: to exchange that would have an event loop
    stop and begin to read, which costs several system calls.
    """

    __slots__ = ("_paused", "_writable", "closed", "idle_since", "transport")

    def __init__(self) -> None:
        super().__init__()
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.idle_since = 0.0
        self._paused = False
        self._writable: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)

    def unasked(self) -> None:
        self.drop()  # not a connection to trust

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.resume_writing()
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.connection_lost(exc)

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    async def writable(self) -> None:
        """Wait until the engine has taken most of what was written, or is gone."""
        if self._writable is not None:
            await self._writable

    def pause(self) -> None:
        """Stop reading."""
        if self.transport is not None and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport is not None and self._paused:
            self._paused = False
            self.transport.resume_reading()

    def drop(self) -> None:
        """Close at once, by a reset: the engine's next write fails, and it stops working for nobody. An orderly close
        would let that write succeed and only the one after it fail, which in a prefill is a whole batch later."""
        self.receiver = None
        if self.transport is not None and not self.closed:
            self.closed = True
            reset(self.transport)


def reset(transport: asyncio.Transport) -> None:
    """End a connection at once, so that the other side does not take it for an orderly end."""
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


class ConnectionPool:
    """The connections to one engine, last used first."""

    def __init__(self, endpoint: str, base_url: str) -> None:
        """`endpoint` is the engine's name in error messages: clients are told that, never an address."""
        self.endpoint = endpoint
        parts = urlsplit(base_url)
        self._connector = Connector(endpoint, parts.hostname or "", parts.port or 80)
        self.host_header = parts.netloc
        self.path = parts.path.rstrip("/")
        """What the engine's URL puts before every path."""
        self._idle: deque[Connection] = deque()
        self._closed = False

    def take(self, now: float) -> Connection | None:
        """A connection used before, or None."""
        oldest = now - IDLE_LIMIT_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().drop()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def connect(self, timeout: float) -> Connection:
        """A new connection. Raises UpstreamError if there is none within `timeout` seconds."""
        return await self._connector.connect(Connection, timeout)

    def give_back(self, connection: Connection, now: float) -> None:
        """Keep a connection for the next request."""
        connection.receiver = None
        if self._closed or connection.closed or len(self._idle) >= IDLE_CONNECTIONS:
            connection.drop()
            return
        connection.resume()  # the client of the last answer may have fallen behind with its very end
        connection.idle_since = now
        self._idle.append(connection)

    def close(self) -> None:
        """Close what is unused, and what is given back from now on."""
        self._closed = True
        while self._idle:
            self._idle.pop().drop()
