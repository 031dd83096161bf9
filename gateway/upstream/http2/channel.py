"""The connection to one gRPC server: made when a call needs it, and made anew when it was lost or is being closed.

Calls that come while it is being made wait for the same attempt, each as long as it may take for its request. A
connection counts as made when the server has introduced itself with its SETTINGS: of a process that hangs, the kernel
still accepts connections.
"""

import asyncio
from urllib.parse import urlsplit

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.connecting import Connector
from gateway.upstream.http2.connection import Connection
from gateway.upstream.http2.headers import encode


class Channel:
    """Calls to one server, whose address is HOST:PORT. `connect_timeout` is in seconds."""

    def __init__(self, endpoint: str, address: str, connect_timeout: float) -> None:
        """`endpoint` is the server's name in error messages."""
        self._endpoint = endpoint
        self._address = address
        self._timeout = connect_timeout
        parts = urlsplit(f"//{address}")
        self._connector = Connector(endpoint, parts.hostname or "", parts.port or 80)
        self.current: Connection | None = None
        """The one for new calls, if there is one now."""
        self._connections: set[Connection] = set()
        """All that are not closed: those that the server is closing, too."""
        self._attempt: asyncio.Task[UpstreamError | None] | None = None
        self._closed = False

    def head(self, method: str, *fields: tuple[str, str]) -> bytes:
        """The beginning of a request's block of fields: those that all calls of a method have."""
        return encode(
            (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", method),
                (":authority", self._address),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "headrace"),
                *fields,
            )
        )

    async def connect(self, timeout: float) -> None:
        """See that there is a `current` connection. Raises UpstreamError if there is none within `timeout` seconds, or
        no more may be made."""
        if self.current is not None:
            return
        if self._closed:
            raise self._left()
        if self._attempt is None:
            self._attempt = asyncio.create_task(self._connect(), name=f"connect to {self._endpoint}")
            self._attempt.add_done_callback(self._attempted)
        try:
            async with asyncio.timeout(timeout):
                failed = await asyncio.shield(self._attempt)
        except TimeoutError:
            raise self._connector.too_late(timeout) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._left() from None
        if failed is not None:
            raise UpstreamError(failed.failure, failed.message, failed.status, failed.code)
        if self.current is None:
            raise self._lost("it closed the connection")

    def close(self) -> None:
        """End all calls, and make no more."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        for connection in tuple(self._connections):
            connection.close()

    async def _connect(self) -> UpstreamError | None:
        """Make a connection. An error is returned, for each of those who wait to raise one of its own."""
        until = asyncio.get_running_loop().time() + self._timeout
        try:
            connection = await self._connector.connect(lambda: Connection(self._ended), self._timeout)
        except UpstreamError as error:
            return error
        if not connection.closed:
            self._connections.add(connection)
        try:
            async with asyncio.timeout_at(until):
                await connection.ready
        except TimeoutError:
            return self._connector.too_late(self._timeout)
        except ConnectionError as error:
            return self._lost(str(error))
        else:
            if connection.usable:
                self.current = connection
                return None
            return self._lost("it closes the connection")
        finally:
            if self.current is not connection:
                connection.close()

    def _attempted(self, _: "asyncio.Task[UpstreamError | None]") -> None:
        self._attempt = None

    def _ended(self, connection: Connection) -> None:
        if self.current is connection:
            self.current = None
        if connection.closed:
            self._connections.discard(connection)

    def _lost(self, why: str) -> UpstreamError:
        message = f"Engine {self._endpoint} cannot be reached: {why}."
        return UpstreamError(Failure.NO_CONNECTION, message, 503, "connect_failed")

    def _left(self) -> UpstreamError:
        return UpstreamError(Failure.CONNECT, f"Engine {self._endpoint} has left the fleet.", 503, "connect_failed")
