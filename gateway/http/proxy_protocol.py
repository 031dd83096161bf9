"""The PROXY protocol's header, versions 1 and 2 (HAProxy's specification): who a proxy's connection is for.

It stands before everything else, a TLS handshake included, so it is taken from the socket itself, and not a byte more:
what follows is for others to read. It is read strictly, for a header that two could read differently would let a client
choose its address.
"""

import asyncio
import ipaddress
import re
import socket
from typing import Literal

Version = Literal["v1", "v2", "any"]

_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_FIRST = len(_SIGNATURE)
_V2_REST = 4
_LONGEST_V1 = 107
_LONGEST_V2 = 4096
"""Bytes after the header's fixed part; addresses take 216 at most, the rest is what a proxy adds about TLS."""
_PORT = r"(?:0|[1-9][0-9]{0,4})"
_V1 = re.compile(
    rf"PROXY (?:UNKNOWN(?: [ -~]*)?|(TCP4|TCP6) ([0-9A-Fa-f.:]+) ([0-9A-Fa-f.:]+) ({_PORT}) ({_PORT}))\r\n"
)
_STREAM_SIZES = {0x11: 12, 0x21: 36, 0x31: 216}
"""Bytes of both addresses by family, over TCP or a Unix socket."""
_LOCAL, _PROXY = 0x20, 0x21
_UNSPECIFIED = 0x00


class ProxyHeaderError(Exception):
    """A connection does not begin with the header that it has to begin with."""


async def read_source(connection: socket.socket, version: Version) -> str | None:
    """Take the header from a non-blocking `connection`, and return the address of the proxy's client; None if it is
    about none, as when the proxy looks whether the gateway is there. Raises ProxyHeaderError, or OSError."""
    first = await _exactly(connection, _FIRST)
    if first == _SIGNATURE:
        if version == "v1":
            raise ProxyHeaderError("it has version 2")
        fixed = await _exactly(connection, _V2_REST)
        length = int.from_bytes(fixed[2:])
        if length > _LONGEST_V2:
            raise ProxyHeaderError("it is too long")
        return source_v2(fixed, await _exactly(connection, length))
    if version == "v2" or not first.startswith(b"PROXY "):
        raise ProxyHeaderError("it does not begin as one")
    return source_v1(first + await _line(connection, _LONGEST_V1 - _FIRST))


def source_v1(line: bytes) -> str | None:
    """The client's address in a header of version 1. Raises ProxyHeaderError."""
    found = _V1.fullmatch(line.decode("latin-1"))
    if found is None:
        raise ProxyHeaderError("it is malformed")
    family, *addresses, _, _ = found.groups()
    if family is None:
        return None
    kind = ipaddress.IPv4Address if family == "TCP4" else ipaddress.IPv6Address
    try:
        source, _ = (kind(address) for address in addresses)
    except ValueError:
        raise ProxyHeaderError("its addresses are malformed") from None
    if any(int(port) > 0xFFFF for port in found.groups()[3:]):
        raise ProxyHeaderError("its ports are malformed")
    return str(source)


def source_v2(fixed: bytes, rest: bytes) -> str | None:
    """The client's address in a header of version 2: the four bytes after its signature, and what follows. Raises
    ProxyHeaderError."""
    command, family = fixed[0], fixed[1]
    if command == _LOCAL:
        return None
    if command != _PROXY:
        raise ProxyHeaderError("its command is unknown")
    if family == _UNSPECIFIED:
        return None
    size = _STREAM_SIZES.get(family)
    if size is None or len(rest) < size:
        raise ProxyHeaderError("its addresses are malformed")
    if family == 0x11:
        return str(ipaddress.IPv4Address(rest[:4]))
    return str(ipaddress.IPv6Address(rest[:16])) if family == 0x21 else None


async def _exactly(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    read = b""
    while len(read) < size:
        piece = await loop.sock_recv(connection, size - len(read))
        if not piece:
            raise ProxyHeaderError("the connection ends within it")
        read += piece
    return read


async def _line(connection: socket.socket, most: int) -> bytes:
    """Up to the next line feed."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) >= most:
            raise ProxyHeaderError("it is too long")
        try:
            seen = connection.recv(most - len(line), socket.MSG_PEEK)
        except BlockingIOError:
            line += await _exactly(connection, 1)
        else:
            line += await _exactly(connection, seen.find(b"\n") + 1 or max(len(seen), 1))
    return line
