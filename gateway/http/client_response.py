"""The client's side of a relay: a response that writes itself to its connection's transport.

Nothing stands between it and the transport, because a relay writes bytes that are framed already, in the moment they
arrive, and cannot wait. The head goes out with what is written right after it.
"""

import asyncio
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

from gateway.exchange import Origin
from gateway.http.errors import as_api_error
from gateway.http.request_head import RequestHead
from gateway.upstream.base import UpstreamError
from gateway.upstream.http_connection import reset
from router.errors import ApiError

LAST_CHUNK = b"0\r\n\r\n"
"""What ends a chunked body."""

NOBODY = "-"
"""What `x-headrace-endpoint` and `x-headrace-route` say when no endpoint or route had a part in the answer."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}

Headers = tuple[tuple[str, str], ...]


class Flow(Protocol):
    """What can be held up when the client does not keep up."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Wire(Protocol):
    """A client's connection, as far as its answer is concerned."""

    loop: asyncio.AbstractEventLoop
    """The running one: asking for it costs a system call in Python 3.11."""
    transport: asyncio.Transport | None
    """None once the client has gone."""
    descriptor: int
    """The transport's socket; -1 if what goes to the socket is not what is written to the transport (TLS)."""
    response: "ClientResponse | None"
    """Is told when the client stops and begins to keep up."""
    writing_paused: bool

    @property
    def ending(self) -> bool:
        """Whether the answer has to be the connection's last."""

    def client_of(self, head: RequestHead) -> str:
        """The address of the client of a request with this head."""

    def refuse_body(self, error: ApiError) -> None:
        """Have whoever reads the request's body raise `error`, if it has not all come."""


class _Date:
    """The current time as a header's value (RFC 9110 section 5.6.7), made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = ""

    def __call__(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


_date = _Date()


class ClientResponse:
    """A response that writes itself, as a whole or as it comes in. A `Sink` for relays."""

    def __init__(self, wire: Wire, head: RequestHead | None, headers: Headers, *, exposes_routing: bool) -> None:
        """Without `exposes_routing`, headers that tell of the fleet (`x-headrace-*`) are left out. `head` is None for a
        request that could not be read: its connection ends."""
        self.headers = headers
        """What goes into the head whatever the answer will be."""
        self._exposes_routing = exposes_routing
        self._wire = wire
        self._request_head = head
        self._http11 = head is None or head.http11
        self._keep = head is not None and head.keep_alive
        self._bodyless = head is not None and head.method == "HEAD"
        self._remaining: int | None = None
        self._chunked_body = False
        self._body_ended = False
        self._head = b""
        """The head, as long as it waits for the first of the body."""
        self._flow: Flow | None = None
        self.status = 0
        self.started = False
        self.finished = False
        self.first_write = 0.0
        """Loop time of the first body byte; 0 before."""
        self.paused_since = 0.0
        """Loop time since when the client has not kept up; 0 if it does."""
        self.resumed_at = 0.0
        """Loop time when it last caught up."""

    def origin(self) -> Origin:
        """Where the request came from; see `gateway.exchange.Client`."""
        head, request_id = self._request_head, dict(self.headers).get("x-request-id", "")
        assert head is not None
        return Origin("http", head.path, request_id, self._wire.client_of(head))

    def refuse(self, error: UpstreamError) -> None:
        """See `gateway.exchange.Client`."""
        self._wire.refuse_body(as_api_error(error))

    @property
    def keep_alive(self) -> bool:
        return self._keep and self.finished

    @property
    def chunks(self) -> "ClientResponse | None":
        return self if self._chunked_body else None

    def start(self, status: int, headers: Headers, content_length: int | None) -> None:
        """Write the head, together with what is written right after it; if that may take a while, `flush_soon` is to be
        called. Without a length the body is chunked, or ends with the connection for an HTTP/1.0 client."""
        self.started = True
        self.status = status
        if content_length is not None:
            self._remaining = content_length
            framing = f"Content-Length: {content_length}\r\n"
        elif self._http11:
            self._chunked_body = True
            framing = "Transfer-Encoding: chunked\r\n"
        else:
            self._keep, framing = False, ""
        if self._keep and self._wire.ending:
            self._keep = False
        if not self._keep:
            framing += "Connection: close\r\n"
        elif not self._http11:
            framing += "Connection: keep-alive\r\n"
        shown = (*self.headers, *headers)
        if not self._exposes_routing:
            shown = tuple(header for header in shown if not header[0].startswith("x-headrace-"))
        lines = "".join([f"{name}: {value}\r\n" for name, value in shown])
        status_line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
        self._head = f"{status_line}{framing}Date: {_date()}\r\n{lines}\r\n".encode("latin-1", "replace")

    def flush_soon(self) -> None:
        """Write the head when the event loop turns, if it has not been written until then."""
        self._wire.loop.call_soon(self._write_head)

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Write a whole response; of one to HEAD, the head."""
        self.start(status, headers, len(body))
        if self._bodyless:
            self._remaining = 0
        else:
            self.write(body)
        self.finish()

    def write(self, payload: bytes) -> None:
        """Write body bytes."""
        if not self.first_write:
            self.first_write = self._wire.loop.time()
        self.comment(payload)

    def comment(self, payload: bytes) -> None:
        """Write body bytes that are no content."""
        if self._chunked_body:
            self._write(b"%x\r\n%b\r\n" % (len(payload), payload))
        else:
            if self._remaining is not None:
                self._remaining -= len(payload)
            self._write(payload)

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._wire.transport

    @property
    def descriptor(self) -> int:
        return self._wire.descriptor

    def write_last(self, payload: bytes) -> None:
        """Write the end of a chunked body, in one go with what says that it is the end."""
        self.first_write = self.first_write or self._wire.loop.time()
        self._body_ended = True
        self._write(b"%x\r\n%b\r\n%b" % (len(payload), payload, LAST_CHUNK))

    def finish(self) -> None:
        """End the body. One that is shorter than announced ends with the connection, so that nobody takes it for
        whole."""
        if self._remaining:
            self.abort()
            return
        if self._chunked_body and not self._body_ended:
            self._write(LAST_CHUNK)
        else:
            self._write_head()  # of an answer without a body
        self.finished = True
        self.follow(None)

    @property
    def complete(self) -> bool:
        """All of the answer has been written."""
        return self.finished or self._body_ended or self._remaining == 0

    def close_after(self) -> None:
        """Take no further request on this connection."""
        self._keep = False

    def abort(self) -> None:
        """Cut the connection: the client must not take what it got for a whole answer."""
        self._keep = False
        self.follow(None)
        transport = self._wire.transport
        if transport is None:
            return
        if self._remaining is None and not self._chunked_body:
            reset(transport)  # an orderly end of the connection would be that of the body
        else:
            transport.abort()

    def follow(self, flow: Flow | None) -> None:
        """Hold up `flow` from now on when the client does not keep up."""
        self._flow = flow
        self._wire.response = self if flow is not None else None
        if flow is not None and self._wire.writing_paused:
            self.writing_paused()  # since the answer before this one

    def writing_paused(self) -> None:
        self.paused_since = self._wire.loop.time()
        if self._flow is not None:
            self._flow.pause()

    def writing_resumed(self) -> None:
        self.paused_since = 0.0
        self.resumed_at = self._wire.loop.time()
        if self._flow is not None:
            self._flow.resume()

    def _write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        transport = self._wire.transport
        if transport is not None:  # else the client has gone, and the handler is about to be cancelled
            transport.write(data)

    def _write_head(self) -> None:
        if self._head:
            self._write(b"")
