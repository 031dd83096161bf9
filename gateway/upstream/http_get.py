"""A small GET to an engine: what probes are made of."""

from gateway.upstream.base import Headers
from gateway.upstream.collected import Collected
from gateway.upstream.http_call import HttpCall
from gateway.upstream.http_connection import ConnectionPool


async def get(pool: ConnectionPool, path: str, connect_timeout: float, headers: Headers = ()) -> tuple[int, bytes]:
    """Status and body of the answer. Raises UpstreamError."""
    given = [f"{name}: {value}" for name, value in headers]
    lines = (f"GET {pool.path}{path} HTTP/1.1", f"host: {pool.host_header}", "accept: */*", *given, "", "")
    call = HttpCall(pool, ("\r\n".join(lines).encode("latin-1"),), connect_timeout)
    try:
        head = await call.send()
        sink = Collected()
        await call.relay(sink)
        return head.status, sink.body
    finally:
        call.close()
