"""The client-facing HTTP server: its listening sockets, its connections, and how they come to an end."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

from gateway.file_limit import ClientFiles
from gateway.http.accepting import Acceptor
from gateway.http.client_addresses import ClientAddresses
from gateway.http.client_response import ClientResponse
from gateway.http.connection import FIRST_REQUEST_S, TAIL_S, ClientConnection, Request
from gateway.http.fair_share import FairShare
from gateway.listening import bind, listen
from gateway.overload import OverloadWatch

_CHECK_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class ClientServer:
    """Answers requests by `handle`, each in a task that is cancelled when its client goes."""

    def __init__(
        self,
        handle: Callable[[Request], Awaitable[ClientResponse]],
        overload: OverloadWatch,
        addresses: ClientAddresses,
        tls: ssl.SSLContext | None = None,
        share: FairShare | None = None,
    ) -> None:
        """With `tls`, connections are encrypted. A worker has a `share` of what all of them accept."""
        self.handle = handle
        self.overload = overload
        self.addresses = addresses
        self._tls = tls
        self._share = share
        self.loop = asyncio.get_running_loop()
        self.time = self.loop.time
        self.connections: set[ClientConnection] = set()
        self.files = ClientFiles()
        self.draining = False
        """Answers are their connections' last."""
        self.closing = False
        """No connection is kept or accepted any more."""
        self._listening: Sequence[asyncio.Server | Acceptor] = []
        self._checking: asyncio.Task[None] | None = None
        self._empty: asyncio.Future[None] | None = None

    async def start(self, address: str, bound: Sequence[socket.socket] | None = None) -> None:
        """Serve on `address`, or on the sockets that are `bound` to it already. Raises ListenError."""
        self._checking = asyncio.create_task(self._check(), name="client connections")
        if self._tls is None and not self.addresses.judges_connections and self._share is None:
            self._listening = await listen(lambda: ClientConnection(self), "http", address, bound)
            return
        acceptor = Acceptor(
            lambda client, place: ClientConnection(self, client, place),
            *(self.addresses, self.files.refuses, self._tls, TAIL_S, self._share, self._tell_share),
        )
        self._listening = [acceptor]
        acceptor.listen("http", address, bind("http", address) if bound is None else bound)

    def drain(self, *, accepting: bool) -> None:
        """Go on serving, but have clients make a new connection after each answer: it may lead elsewhere. Without
        `accepting` it surely does."""
        self.draining = True
        if not accepting:
            self._accept_no_more()

    async def stop(self, patience: float) -> None:
        """Accept no more, close what is idle, wait `patience` seconds for what is being answered or still on its way to
        a slow client, then cut it. Cancelled, it cuts at once."""
        self.draining = self.closing = True
        self._accept_no_more()
        end = self.time() + patience
        try:
            await asyncio.sleep(0)  # what has been accepted already becomes a connection
            self._close_idle()
            for listening in self._listening:
                if isinstance(listening, Acceptor):
                    await listening.settled(patience)
            await self._all_gone(end - self.time())
        finally:
            for listening in self._listening:
                if isinstance(listening, Acceptor):
                    listening.cut()
            if self._checking is not None:
                self._checking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._checking
            for connection in tuple(self.connections):
                connection.abort()

    def lost(self, connection: ClientConnection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        self._tell_share()
        if self._empty is not None and not self.connections and not self._empty.done():
            self._empty.set_result(None)

    def _tell_share(self) -> None:
        if self._share is not None:
            settling = sum(one.settling for one in self._listening if isinstance(one, Acceptor))
            self._share.has(len(self.connections) + settling)

    def _accept_no_more(self) -> None:
        for listening in self._listening:
            listening.close()

    def _close_idle(self) -> None:
        """Close what nobody is being answered on, unless it is so new that its first request may be on its way."""
        unused_since = self.time() - FIRST_REQUEST_S
        for connection in tuple(self.connections):
            connection.close_if_idle(unused_since)

    async def _all_gone(self, patience: float) -> None:
        """Wait until every connection has ended, for at most `patience` seconds."""
        if self.connections:
            self._empty = self.loop.create_future()
            await asyncio.wait([self._empty], timeout=patience)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            now = self.time()
            if self.closing:
                self._close_idle()
            for connection in tuple(self.connections):
                try:
                    connection.check(now)
                except Exception:  # one connection's trouble must not end everybody's deadlines
                    logger.exception("checking a connection")
