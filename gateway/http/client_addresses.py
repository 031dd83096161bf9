"""Whose requests these are, by address, and how much one address may have at a time.

An address is counted as long as it has something, so the tables are no larger than there are connections or requests.
IPv6 addresses count by their /64, the least that anybody gets. Trusted proxies are not counted: their address is
everybody's.
"""

import functools
import ipaddress
import logging
from collections.abc import Mapping

from gateway.http.forwarded import client_of, normal_address
from gateway.metrics import Metrics
from gateway.seldom import Seldom
from router.errors import ApiError
from router.spec.fleet import ClientsSpec

_RETRY_AFTER_S = 1
_HINT = "if that is a proxy or load balancer, name it in gateway.clients.trusted_proxies"

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
        self._too_many = Seldom(
            logger, f"closed %d new connections of addresses that have too many, the last of %s; {_HINT}"
        )
        self._too_busy = Seldom(
            logger, f"refused %d requests of addresses that have too many open, the last of %s; {_HINT}"
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

    def connected(self, address: str) -> "Place | None":
        """A place for a new connection; None if the address has too many."""
        if self.trusts(address):
            return _NO_PLACE
        place = self._connections.place(address)
        if place is None:
            self._refusals.values["connections",] += 1
            self._too_many.happened(address)
        return place

    def asked(self, address: str) -> "Place":
        """A place for a new request. Raises a 429 ApiError if the address has too many."""
        if self.trusts(address):
            return _NO_PLACE
        place = self._requests.place(address)
        if place is None:
            self._refusals.values["requests",] += 1
            self._too_busy.happened(address)
            message = "Your address has too many requests open. Wait for one to finish."
            raise ApiError(429, message, type="rate_limit_error", code="too_many_requests", retry_after=_RETRY_AFTER_S)
        return place

    def spoke_no_proxy_protocol(self, peer: str, why: str) -> None:
        """Count a connection of a trusted proxy without the header that it has to begin with."""
        self._refusals.values["proxy_header",] += 1
        self._no_header.happened(peer, why)

    def shook_no_hands(self) -> None:
        """Count a connection on which TLS did not come about."""
        self._refusals.values["tls_handshake",] += 1


class Place:
    """One connection or request of an address. `leave` it once or more often."""

    __slots__ = ("_address", "_held")

    def __init__(self, held: dict[str, int], address: str) -> None:
        self._held: dict[str, int] | None = held
        self._address = address

    def leave(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            left = held.pop(self._address) - 1
            if left:
                held[self._address] = left


_NO_PLACE = Place({}, "")
_NO_PLACE._held = None


class _Cap:
    """How much each address may have at a time."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._held: dict[str, int] = {}

    def place(self, address: str) -> Place | None:
        if self.most is None:
            return _NO_PLACE
        address = _counted_as(address)
        count = self._held.get(address, 0)
        if count >= self.most:
            return None
        self._held[address] = count + 1
        return Place(self._held, address)


@functools.lru_cache(maxsize=4096)
def _counted_as(address: str) -> str:
    return str(ipaddress.ip_network(f"{address}/64", strict=False)) if ":" in address else address


def peer_address(name: tuple[str, int] | tuple[str, int, int, int] | None) -> str:
    """The address of a socket's other end, by its name; empty for one that has gone."""
    return normal_address(name[0].partition("%")[0]) or "" if name else ""
