"""A small GET to an engine: what probes are made of."""

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.http_call import HttpCall
from gateway.upstream.http_connection import ConnectionPool

BODY_LIMIT = 4 * 1024 * 1024
"""Bytes of an answer that is kept whole."""


class Collected:
    """A sink that keeps a body whole, up to `limit` bytes. `what` is the answer, for the error beyond them."""

    chunks = None

    def __init__(self, limit: int = BODY_LIMIT, what: str = "A probe was answered") -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._limit = limit
        self._what = what

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def write(self, payload: bytes) -> None:
        self._size += len(payload)
        if self._size > self._limit:
            raise UpstreamError(Failure.PROTOCOL, f"{self._what} with more than {self._limit} bytes.")
        self._pieces.append(payload)


async def get(pool: ConnectionPool, path: str, connect_timeout: float) -> tuple[int, bytes]:
    """Status and body of the answer. Raises UpstreamError."""
    lines = (f"GET {pool.path}{path} HTTP/1.1", f"host: {pool.host_header}", "accept: */*", "", "")
    call = HttpCall(pool, ("\r\n".join(lines).encode("latin-1"),), connect_timeout)
    try:
        head = await call.send()
        sink = Collected()
        await call.relay(sink)
        return head.status, sink.body
    finally:
        call.close()
