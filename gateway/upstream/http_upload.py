"""An HTTP request whose body is streamed to the engine, never held whole.

What the gateway read ahead goes out with the head; the rest flows from its `Source` as the engine takes it: a piece is
read only when the one before has left for the kernel. An engine that answers before it has everything has made up its
mind, and is sent no more.

A body that flows can be sent once. So it never goes out on a connection used before, which may turn out to be closed.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.relay.http1 import ResponseHead
from gateway.upstream.http_call import HttpCall
from gateway.upstream.http_connection import Connection, ConnectionPool
from gateway.upstream.opening import Opening
from router.errors import ApiError


class Source(Protocol):
    """Where the rest of a body comes from."""

    async def read(self) -> bytes:
        """The next bytes; none at its end. Raises ApiError if there is no more to be had."""


class HttpUpload(HttpCall):
    """One request on one connection of `pool`: `start` is its head and the body read so far, `rest` gives more.

    `chunked`: the head announces a chunked body. `sent` is called whenever the engine has taken more of it.
    """

    __slots__ = ("_chunked", "_complete_request", "_rest", "_sent")

    def __init__(
        self,
        pool: ConnectionPool,
        start: tuple[bytes, ...],
        rest: Source | None,
        connect_timeout: float,
        *,
        chunked: bool,
        sent: Callable[[], None],
        opening: Opening | None = None,
    ) -> None:
        super().__init__(pool, start, connect_timeout, opening)
        self._rest = rest
        self._chunked = chunked
        self._sent = sent
        self._complete_request = rest is None

    async def send(self) -> ResponseHead:
        """Send the request and wait for the head of the answer. Raises UpstreamError, or the source's ApiError."""
        if self._rest is None:
            return await super().send()
        return await self._send_on(await self._pool.connect(self._timeout))

    async def _send_on(self, connection: Connection) -> ResponseHead:
        if self._rest is None:
            return await super()._send_on(connection)
        upload = asyncio.create_task(self._upload(connection, self._rest), name="upload")
        try:
            return await super()._send_on(connection)
        finally:
            upload.cancel()
            await asyncio.wait([upload])

    async def _upload(self, connection: Connection, rest: Source) -> None:
        """Starts when `_send_on` waits: the head is out by then."""
        assert connection.transport is not None
        try:
            while piece := await rest.read():
                connection.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
                await connection.writable()
                self._sent()
        except ApiError as error:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
            return
        if self._chunked:
            connection.transport.write(b"0\r\n\r\n")
        self._complete_request = True

    def _complete(self, *, reusable: bool) -> None:
        super()._complete(reusable=reusable and self._complete_request)
