"""Whose requests these are, by address, and how much one address may have at a time.

An address is counted as long as it has something, so the tables are no larger than there are connections or requests.
IPv6 addresses count by their /64, the least that anybody gets. Trusted proxies are not counted: their address is
everybody's.

gRPC's connections are accepted by its library, which tells of none before its first call. So what is counted of them
here is calls, by the connection and by the address that they come from.
"""

import functools
import ipaddress
import logging
from collections.abc import Iterable, Mapping
from typing import Literal
from urllib.parse import unquote

from gateway.http.forwarded import client_of, normal_address
from gateway.metrics import Metrics
from gateway.seldom import Seldom
from router.errors import ApiError
from router.spec.gateway import ClientsSpec

_RETRY_AFTER_S = 1
_HINT = "if that is a proxy or load balancer, name it in gateway.clients.trusted_proxies"

Refusal = Literal[
    "connections", "requests", "connection_streams", "peer_streams", "files", "overload", "proxy_header",
    "tls_handshake", "bad_head", "head_too_large", "head_timeout",
]  # fmt: skip
"""Why a client was refused before its request was known, or for what its address or connection has already."""
_OF_HEADS: Mapping[int, Refusal] = {408: "head_timeout", 431: "head_too_large"}

logger = logging.getLogger(__name__)


class ClientAddresses:
    """What is known of clients by their addresses, and held against them."""

    def __init__(self, spec: ClientsSpec, metrics: Metrics) -> None:
        self._proxies = [ipaddress.ip_network(one) for one in spec.trusted_proxies]
        self._header = spec.address_header
        self.proxy_protocol = spec.proxy_protocol
        self._refusals = metrics.clients_refused
        self._connections = _Cap(spec.connections_per_address)
        self._requests = _Cap(spec.requests_per_address)
        self.caps_requests = spec.requests_per_address is not None
        """Whether there is anything to ask `asked` about."""
        self._connection_streams = _Cap(spec.streams_per_connection)
        self._peer_streams = _Cap(spec.streams_per_peer)
        self.caps_streams = spec.streams_per_connection is not None or spec.streams_per_peer is not None
        """Whether there is anything to ask `called` about."""
        self._too_many = Seldom(
            logger, f"closed %d new connections of addresses that have too many, the last of %s; {_HINT}"
        )
        self._too_busy = Seldom(
            logger, f"refused %d requests of addresses that have too many open, the last of %s; {_HINT}"
        )
        self._too_many_streams = Seldom(
            logger,
            f"refused %d gRPC calls of connections or addresses that have too many open, the last of %s; {_HINT}",
        )
        self._no_header = Seldom(
            logger, "closed %d connections of trusted proxies that began with no good PROXY header, the last of %s: %s"
        )
        self.trusts = functools.lru_cache(maxsize=4096)(self._trusts)
        """Whether an address is a trusted proxy's."""

    def _trusts(self, address: str) -> bool:
        if not address:  # of a socket that had none any more
            return False
        parsed = ipaddress.ip_address(address)
        return any(parsed in network for network in self._proxies)

    @property
    def judges_connections(self) -> bool:
        """Whether something has to be known of connections before their first byte is read."""
        return self._connections.most is not None or self.proxy_protocol != "off"

    def client(self, peer: str, headers: Mapping[str, str]) -> str:
        """The address of the client of a request that came from `peer` with these headers."""
        if not self._proxies or (value := headers.get(self._header)) is None or not self.trusts(peer):
            return peer
        return client_of(peer, self._header, value, self.trusts)

    def rpc_client(self, peer: str, metadata: Iterable[tuple[str, str]]) -> str:
        """The address of the client of a gRPC call from `peer`, as gRPC names connections, with this metadata."""
        origin = rpc_address(peer)
        if not self._proxies:
            return origin
        said = [value for name, value in metadata if name == self._header]  # each proxy may add an entry of its own
        return self.client(origin, {self._header: ",".join(said)} if said else {})

    def connected(self, address: str) -> "Place | None":
        """A place for a new connection; None if the address has too many."""
        if self.trusts(address):
            return _NO_PLACE
        place = self._connections.place(_counted_as(address))
        if place is None:
            self.refused("connections")
            self._too_many.happened(address)
        return place

    def asked(self, address: str) -> "Place":
        """A place for a new request. Raises a 429 ApiError if the address has too many."""
        if self.trusts(address):
            return _NO_PLACE
        place = self._requests.place(_counted_as(address))
        if place is None:
            self.refused("requests")
            self._too_busy.happened(address)
            message = "Your address has too many requests open. Wait for one to finish."
            raise ApiError(429, message, type="rate_limit_error", code="too_many_requests", retry_after=_RETRY_AFTER_S)
        return place

    def called(self, peer: str, metadata: Iterable[tuple[str, str]]) -> "tuple[Place, Place]":
        """Places for a new gRPC call from `peer`, as gRPC names connections. Raises a 429 ApiError if its connection
        or its address has too many."""
        origin = rpc_address(peer)
        if self.trusts(origin):
            on_connection = _NO_PLACE
            if self.trusts(address := self.rpc_client(peer, metadata)):
                return _NO_PLACE, _NO_PLACE
        else:
            address = origin
            if (found := self._connection_streams.place(peer)) is None:
                raise self._refused_stream("connection_streams", origin, "This connection")
            on_connection = found
        if (place := self._peer_streams.place(_counted_as(address))) is None:
            on_connection.leave()
            raise self._refused_stream("peer_streams", address, "Your address")
        return on_connection, place

    def _refused_stream(self, reason: Refusal, address: str, who: str) -> ApiError:
        self.refused(reason)
        self._too_many_streams.happened(address)
        message = f"{who} has too many calls open. Wait for one to finish."
        return ApiError(429, message, type="rate_limit_error", code="too_many_requests")

    def spoke_no_proxy_protocol(self, peer: str, why: str) -> None:
        """Count a connection of a trusted proxy without the header that it has to begin with."""
        self.refused("proxy_header")
        self._no_header.happened(peer, why)

    def refused_head(self, status: int) -> None:
        """Count a request whose head was refused with `status`."""
        self.refused(_OF_HEADS.get(status, "bad_head"))

    def refused(self, reason: Refusal) -> None:
        """Count a client that was refused."""
        self._refusals.values[reason,] += 1


class Place:
    """One connection, request or call of whoever is counted. `leave` it once or more often."""

    __slots__ = ("_held", "_whose")

    def __init__(self, held: dict[str, int], whose: str) -> None:
        self._held: dict[str, int] | None = held
        self._whose = whose

    def leave(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            left = held.pop(self._whose) - 1
            if left:
                held[self._whose] = left


_NO_PLACE = Place({}, "")
_NO_PLACE._held = None


class _Cap:
    """How much each one who is counted may have at a time."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._held: dict[str, int] = {}

    def place(self, whose: str) -> Place | None:
        if self.most is None:
            return _NO_PLACE
        count = self._held.get(whose, 0)
        if count >= self.most:
            return None
        self._held[whose] = count + 1
        return Place(self._held, whose)


@functools.lru_cache(maxsize=4096)
def _counted_as(address: str) -> str:
    return str(ipaddress.ip_network(f"{address}/64", strict=False)) if ":" in address else address


def peer_address(name: tuple[str, int] | tuple[str, int, int, int] | None) -> str:
    """The address of a socket's other end, by its name; empty for one that has gone."""
    return normal_address(name[0].partition("%")[0]) or "" if name else ""


def rpc_address(peer: str) -> str:
    """The address in what gRPC calls a peer: `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`."""
    address = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    return normal_address(address.partition("%")[0]) or ""
