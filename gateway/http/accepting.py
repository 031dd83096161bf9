"""Accepting connections of clients about which something is to be settled before HTTP is spoken.

That is the PROXY protocol's header, TLS, and how many connections an address may have: a loop's own server would shake
hands first, without a look at the address, and cannot read anything before. Nor does it leave connections to other
workers (`fair_share`). Where none of it is asked for, that server is used, since it costs less.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from gateway.http.client_addresses import ClientAddresses, Place, peer_address
from gateway.http.fair_share import FairShare
from gateway.http.forwarded import normal_address
from gateway.http.proxy_protocol import ProxyHeaderError, read_source
from gateway.listening import BACKLOG, not_to_be_had
from gateway.tls import HANDSHAKE_S

_AT_ONCE = 64
"""Connections accepted before others have their turn."""
_LEFT_TO_OTHERS_S = 0.002
"""How long a worker that has more than its share leaves a connection to the others."""
_LEFT_OVER = 16
"""How many of those that nobody else has accepted it then accepts at least."""
_PAUSE_S = 1.0
"""How long none is accepted when the system has no file for it."""

logger = logging.getLogger(__name__)


class Acceptor:
    """Accepts connections and hands them to `make`'s protocols, with the client's address and its place."""

    def __init__(
        self,
        make: Callable[[str, Place], asyncio.Protocol],
        addresses: ClientAddresses,
        refuses: Callable[[int], bool],
        tls: ssl.SSLContext | None,
        shutdown_s: float,
        share: FairShare | None,
        accepted: Callable[[], None],
    ) -> None:
        """`refuses` says of a new file descriptor whether it is one too many. A connection that is closed has
        `shutdown_s` seconds for what is still to be written. A worker has a `share` of what all of them accept.
        `accepted` is called for every connection."""
        self._make = make
        self._addresses = addresses
        self._refuses = refuses
        self._tls = tls
        self._shutdown_s = shutdown_s
        self._share = share
        self._loop = asyncio.get_running_loop()
        self._accepted = accepted
        self._sockets: list[socket.socket] = []
        self._settling: set[asyncio.Task[None]] = set()
        """Each with a deadline."""

    def listen(self, what: str, address: str, bound: Sequence[socket.socket]) -> None:
        """Accept from the sockets that are `bound` to `address`. Raises ListenError."""
        self._sockets = list(bound)
        try:
            for one in self._sockets:
                one.setblocking(False)
                one.listen(BACKLOG)
                self._loop.add_reader(one, self._accept, one)
        except OSError as error:
            self.close()
            raise not_to_be_had(what, address, error) from None
        logger.info("%s: listening on %s%s", what, address, " with TLS" if self._tls is not None else "")

    def close(self) -> None:
        """Accept no more. What has been accepted is settled on."""
        for one in self._sockets:
            self._loop.remove_reader(one)
            one.close()
        self._sockets.clear()

    def cut(self) -> None:
        """End the connections that are not settled yet."""
        for task in self._settling:
            task.cancel()

    async def settled(self, patience: float) -> None:
        """Wait until every connection that has been accepted is one, or has ended; for at most `patience` seconds."""
        if self._settling:
            await asyncio.wait(self._settling, timeout=patience)

    @property
    def settling(self) -> int:
        """How many connections are being settled."""
        return len(self._settling)

    def _accept(self, listening: socket.socket, least: int = 0) -> None:
        for accepted in range(_AT_ONCE):
            if self._share is not None and accepted >= least and self._share.exceeded:
                self._loop.remove_reader(listening)
                self._loop.call_later(_LEFT_TO_OTHERS_S, self._take_what_is_left, listening)
                return
            try:
                connection, name = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("no connection can be accepted for %g s: %s", _PAUSE_S, error.strerror or error)
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE_S, self._resume, listening)
                return
            connection.setblocking(False)
            peer = peer_address(name)
            expects_header = self._addresses.proxy_protocol != "off" and self._addresses.trusts(peer)
            place = None if expects_header else self._addresses.connected(peer)
            out_of_files = self._refuses(connection.fileno())
            if out_of_files or (place is None and not expects_header):
                if out_of_files:
                    self._addresses.refused("files")
                connection.close()
                if place is not None:
                    place.leave()
                continue
            task = self._loop.create_task(self._settle(connection, peer, place))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)
            self._accepted()

    def _take_what_is_left(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)
            self._accept(listening, _LEFT_OVER)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    async def _settle(self, connection: socket.socket, peer: str, place: Place | None) -> None:
        """Read what stands before HTTP, and hand the connection over. Without a place it begins with a header."""
        address = peer
        if place is None:
            try:
                address = await self._told(connection, peer)
            except (ProxyHeaderError, OSError, TimeoutError) as error:
                why = str(error) if isinstance(error, ProxyHeaderError) else "it did not come"
                self._addresses.spoke_no_proxy_protocol(peer, why)
            else:
                place = self._addresses.connected(address)
            finally:
                if place is None:
                    connection.close()
            if place is None:
                return
        try:
            await self._hand_over(connection, address, place)
        except OSError:
            place.leave()
            self._addresses.refused("tls_handshake")
        except BaseException:
            place.leave()
            raise

    async def _hand_over(self, connection: socket.socket, address: str, place: Place) -> None:
        tls = self._tls
        await self._loop.connect_accepted_socket(
            lambda: self._make(address, place),
            connection,
            ssl=tls,
            ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
            ssl_shutdown_timeout=self._shutdown_s if tls is not None else None,
        )

    async def _told(self, connection: socket.socket, peer: str) -> str:
        """The address that the PROXY header tells. Raises ProxyHeaderError, OSError, TimeoutError."""
        version = self._addresses.proxy_protocol
        assert version != "off"
        async with asyncio.timeout(HANDSHAKE_S):
            source = await read_source(connection, version)
        return peer if source is None else normal_address(source) or source
