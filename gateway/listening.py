"""The addresses a gateway listens on: taking them, and saying in one sentence why one is not to be had."""

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence

from gateway.tls import HANDSHAKE_S, Certificate, CertificateError
from router.spec.gateway import TlsSpec
from router.spec.units import host_and_port

BACKLOG = 4096
"""Connections that may wait to be accepted; Linux cuts it to `net.core.somaxconn`, which is that by default. A client
whose connection does not fit is reset after it has sent its request."""

logger = logging.getLogger(__name__)


class ListenError(Exception):
    """A listening address cannot be used. The message is one sentence for the operator.

    `what` is what is at fault, by its name in the fleet file: an address (`http`, `grpc`, `admin`) or the certificate
    of one (`tls`, `admin_tls`).
    """

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


async def listen(
    protocol: Callable[[], asyncio.Protocol],
    what: str,
    address: str,
    bound: Sequence[socket.socket] | None = None,
    tls: ssl.SSLContext | None = None,
) -> list[asyncio.Server]:
    """Serve connections by what `protocol` makes, on `address` or on the sockets that are `bound` to it already, with
    TLS where there is a context for it. Raises ListenError."""
    host, port = host_and_port(address)
    patience = HANDSHAKE_S if tls is not None else None
    loop = asyncio.get_running_loop()
    servers: list[asyncio.Server] = []
    try:
        if bound is None:
            servers.append(
                await loop.create_server(protocol, host, port, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=patience)
            )
        else:
            for one in bound:
                one.listen(BACKLOG)  # uvloop does it again, but would keep to itself that it fails
                servers.append(
                    await loop.create_server(
                        protocol, sock=one, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=patience
                    )
                )
    except OSError as error:
        for server in servers:
            server.close()
        raise not_to_be_had(what, address, error) from None
    logger.info("%s: listening on %s", what, address)
    return servers


def certificate(what: str, files: TlsSpec | None) -> Certificate | None:
    """The certificate in `files`, if there are any. Raises ListenError."""
    try:
        return Certificate(files) if files is not None else None
    except CertificateError as error:
        raise ListenError(what, f"The certificate of gateway.{what} cannot be used: {error}.") from None


def bind(what: str, address: str) -> list[socket.socket]:
    """Sockets bound to every interface `address` means, not listening yet. Raises ListenError."""
    host, port = host_and_port(address)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, where in _resolved(host, port):
            try:
                one = socket.socket(family, kind, protocol)
            except OSError:  # a kernel without IPv6 resolves to it nonetheless
                continue
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(where)
    except OSError as error:
        for one in sockets:
            one.close()
        raise not_to_be_had(what, address, error) from None
    return sockets


def free_port(address: str) -> int:
    """The port of `address`, chosen by the system for port 0, after a look whether it can be bound. Raises OSError if
    not."""
    family, kind, protocol, _, where = _resolved(*host_and_port(address))[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        port: int = probe.getsockname()[1]
        return port


def not_to_be_had(what: str, address: str, error: OSError) -> ListenError:
    """Why `address` cannot be used, in the operator's words."""
    if error.errno == errno.EADDRINUSE:
        reason = "it is in use by another program"
    elif isinstance(error, socket.gaierror):
        reason = "its host is not known"
    else:
        reason = os.strerror(error.errno or 0).lower()
    return ListenError(what, f"Cannot listen on {address} (gateway.{what}): {reason}.")


def _resolved(host: str | None, port: int) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(found))
