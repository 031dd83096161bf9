"""The PROXY protocol's headers: read strictly, and not a byte further."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.proxy_protocol import ProxyHeaderError, Version, read_source, source_v1, source_v2

SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"


def v1(source: str, destination: str = "10.0.0.1") -> bytes:
    family = "TCP6" if ":" in source else "TCP4"
    return f"PROXY {family} {source} {destination} 51000 8000\r\n".encode()


def v2(source: str, destination: str = "10.0.0.1", more: bytes = b"") -> bytes:
    addresses = [ipaddress.ip_address(one).packed for one in (source, destination)]
    rest = b"".join(addresses) + b"\xc7\x38\x1f\x40" + more
    return SIGNATURE + bytes([0x21, 0x21 if ":" in source else 0x11]) + len(rest).to_bytes(2) + rest


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        yield here, there


@pytest.mark.parametrize(
    ("header", "version", "source"),
    [
        (v1("203.0.113.7"), "v1", "203.0.113.7"),
        (v1("2001:db8::7", "::1"), "any", "2001:db8::7"),
        (b"PROXY UNKNOWN\r\n", "v1", None),
        (b"PROXY UNKNOWN ffff:f...f:ffff ffff:f...f:ffff 65535 65535\r\n", "v1", None),
        (v2("203.0.113.7"), "v2", "203.0.113.7"),
        (v2("2001:db8::7", "::1", b"\x04\x00\x01x"), "any", "2001:db8::7"),
        (SIGNATURE + b"\x20\x00\x00\x00", "v2", None),
        (SIGNATURE + b"\x20\x11\x00\x05abcde", "v2", None),
        (SIGNATURE + b"\x21\x00\x00\x00", "v2", None),
        (SIGNATURE + b"\x21\x31\x00\xd8" + bytes(216), "v2", None),
    ],
)
@pytest.mark.parametrize("step", [1, 13, 1000])
async def test_a_header_is_taken_however_it_comes_and_what_follows_is_left(
    header: bytes, version: Version, source: str | None, step: int
) -> None:
    with pair() as (here, there):
        reading = asyncio.create_task(read_source(there, version))
        data = header + b"GET / HTTP/1.1\r\n"
        for at in range(0, len(data), step):
            here.send(data[at : at + step])
            await asyncio.sleep(0)
        assert await asyncio.wait_for(reading, 5) == source
        assert there.recv(100) == b"GET / HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("header", "version"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "any"),
        (v1("203.0.113.7"), "v2"),
        (v2("203.0.113.7"), "v1"),
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 51000 8000\n" + bytes(100), "v1"),
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 51000 8000 \r\n", "v1"),
        (b"PROXY  TCP4 203.0.113.7 10.0.0.1 51000 8000\r\n", "v1"),
        (b"proxy TCP4 203.0.113.7 10.0.0.1 51000 8000\r\n", "v1"),
        (b"PROXY TCP6 203.0.113.7 10.0.0.1 51000 8000\r\n", "v1"),
        (b"PROXY TCP4 203.0.113.07 10.0.0.1 51000 8000\r\n", "v1"),
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 65536 8000\r\n", "v1"),
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 08 8000\r\n", "v1"),
        (b"PROXY TCP4 203.0.113.7 51000\r\n", "v1"),
        (b"PROXY UNKNOWN " + b"x" * 200 + b"\r\n", "v1"),
        (SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12), "v2"),
        (SIGNATURE + b"\x22\x11\x00\x0c" + bytes(12), "v2"),
        (SIGNATURE + b"\x21\x12\x00\x0c" + bytes(12), "v2"),
        (SIGNATURE + b"\x21\x11\x00\x0b" + bytes(11), "v2"),
        (SIGNATURE + b"\x21\x21\x00\x0c" + bytes(12), "v2"),
        (SIGNATURE + b"\x21\x11\xff\xff", "v2"),
        (SIGNATURE + b"\x21\x11\x00\x0c", "v2"),
        (b"PROXY TCP4 203.0.113.7 ", "v1"),
        (b"", "any"),
    ],
)
async def test_whatever_else_a_connection_begins_with_is_refused(header: bytes, version: Version) -> None:
    with pair() as (here, there):
        here.send(header)
        here.shutdown(socket.SHUT_WR)
        with pytest.raises(ProxyHeaderError):
            await asyncio.wait_for(read_source(there, version), 5)


@given(st.binary(max_size=120))
def test_no_bytes_are_more_than_refused(data: bytes) -> None:
    for version in (1, 2):
        with contextlib.suppress(ProxyHeaderError):
            source = source_v1(b"PROXY " + data) if version == 1 else source_v2(data[:4].ljust(4), data[4:])
            assert source is None or ipaddress.ip_address(source)
