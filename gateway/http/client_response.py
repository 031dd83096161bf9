"""The client's side of a relay: the one module that reaches into aiohttp's server.

aiohttp holds the client's connection and parses its requests. Its own streaming response costs a coroutine per write
and cannot pass on bytes that are already framed, so a `ClientResponse` writes to the connection's transport itself, and
only looks like a finished response to aiohttp when the handler returns it. What is used of aiohttp's inside, and pinned
by a contract test for the version in use:

- `RequestHandler` is the connection's asyncio protocol; `pause_writing` and `resume_writing` tell that the client does
  not keep up. `ClientProtocol` passes both on to the response being written.

- After a handler returns a response, the connection calls its `prepare` and `write_eof` and reads `keep_alive`.

- `handle_error` makes the response to what is not HTTP, and to an exception nobody caught; `log_exception` writes of
  what failed outside of handlers.

- `writing_paused` and `_drain_helper` tell whether the client is behind and when it has caught up.

- `_current_request` is the request being handled, `_messages` holds those read behind it, `_ErrInfo` among them stands
  for what could not be parsed, and aiohttp stops reading by `pause_reading` and `_pause_reading_for_buffer`.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_writer import HttpVersion11
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo

from gateway.file_limit import ClientFiles
from gateway.http.errors import INTERNAL, error_body
from gateway.request_ids import new_request_id
from gateway.upstream.http_connection import reset
from router.errors import ApiError

logger = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 64 * 1024
"""Bytes queued for a client that does not read before reading from the engine is paused."""
SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel may queue besides (it takes twice that): left alone it swallows megabytes before anybody notices that
a client is slow."""

LAST_CHUNK = b"0\r\n\r\n"
"""What ends a chunked body."""

NOBODY = "-"
"""What `x-headrace-endpoint` and `x-headrace-route` say when no endpoint or route had a part in the answer."""

TAIL_S = 60.0
"""How long a client may take for what is still queued when its answer is complete."""

_REASONS = {status.value: status.phrase for status in HTTPStatus}

Headers = tuple[tuple[str, str], ...]


class Flow(Protocol):
    """What can be held up when the client does not keep up."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class ClientProtocol(RequestHandler):
    """aiohttp's connection, with back-pressure passed on, and never deaf to a client that leaves.

    A connection that is not read does not show that its other end is gone. aiohttp stops reading when too much lies
    behind the request being handled: such a connection is closed instead.
    """

    __slots__ = ("_body", "_server", "response")

    def __init__(self, manager: "ClientServer", **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._server = manager
        self._body: StreamReader | None = None
        """The body of the request read last."""
        self.response: ClientResponse | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self._server.open_connections.add(self)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        connection = self.transport.get_extra_info("socket")
        if self._server.files.refuses(connection.fileno()):
            self.transport.abort()
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.open_connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._messages:
            return
        message, payload = self._messages[-1]
        if not isinstance(message, _ErrInfo):
            self._body = payload
            return
        body = self._messages[-2][1] if len(self._messages) > 1 else self._body
        if body is not None and not body.is_eof():
            # It is what could not be parsed: whoever reads it would wait for ever.
            body.set_exception(RequestPayloadError("malformed body"))

    def pause_reading(self) -> None:
        super().pause_reading()
        if self._current_request is not None and self._current_request.content.is_eof():
            self.force_close()

    def _pause_reading_for_buffer(self) -> None:
        super()._pause_reading_for_buffer()
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is not HTTP (400), and to an exception nobody caught (500), in the API's error shape."""
        if status >= 500:
            logger.error("unhandled error on %s %s", request.method, request.path, exc_info=exc)
            error = INTERNAL
        elif isinstance(exc, LineTooLong):
            status = 431
            error = ApiError(status, f"The request's head is too large: {exc.message}.", code="headers_too_large")
        else:
            error = ApiError(status, "The request is not valid HTTP/1.1.", code="bad_http_request")
        self.close()
        headers = {"x-request-id": new_request_id(), "x-headrace-endpoint": NOBODY, "x-headrace-route": NOBODY}
        return web.Response(status=status, body=error_body(error), content_type="application/json", headers=headers)

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """aiohttp drains what is left of a body after its request has been refused; that it is malformed is the
        client's affair, and the connection closes."""
        if not isinstance(kwargs.get("exc_info"), RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.response is not None:
            self.response.writing_paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.response is not None:
            self.response.writing_resumed()


class ClientServer(web.Server):
    """aiohttp's low-level server (one handler, no router) on `ClientProtocol` connections.

    A handler is cancelled when its client goes: that is how a disconnect reaches the engine.
    """

    def __init__(self, handler: Callable[[web.BaseRequest], Any], **kwargs: Any) -> None:
        super().__init__(handler, handler_cancellation=True, auto_decompress=False, **kwargs)
        self.open_connections: set[ClientProtocol] = set()
        self.files = ClientFiles()

    def __call__(self) -> ClientProtocol:
        return ClientProtocol(self, loop=self._loop, **self._kwargs)

    async def shutdown(self, timeout: float | None = None) -> None:
        """Close every connection once its handler has ended and its client has taken what was written to it."""
        await super().shutdown(timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAIL_S):
                while self.open_connections:  # noqa: ASYNC110 - at the end of a process
                    await asyncio.sleep(0.02)


class ClientResponse:
    """A response that writes itself, as a whole or as it comes in. A `Sink` for relays."""

    def __init__(self, request: web.BaseRequest, headers: Headers, *, exposes_routing: bool) -> None:
        """Without `exposes_routing`, headers that tell of the fleet (`x-headrace-*`) are left out."""
        self.headers = headers
        """What goes into the head whatever the answer will be."""
        self._exposes_routing = exposes_routing
        protocol = request.protocol
        assert isinstance(protocol, ClientProtocol)
        self._protocol = protocol
        self._http11 = request.version >= HttpVersion11
        self._keep = request.keep_alive
        self._bodyless = request.method == "HEAD"
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

    # What aiohttp asks of a response once the handler has returned it.

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self) -> None:
        """Wait for a client that has fallen behind to take the rest, but not for ever."""
        if not self._protocol.writing_paused:
            return
        try:
            async with asyncio.timeout(TAIL_S):
                await self._protocol._drain_helper()
        except TimeoutError:
            self.abort()

    @property
    def keep_alive(self) -> bool:
        return self._keep and self.finished

    @property
    def chunks(self) -> "ClientResponse | None":
        return self if self._chunked_body else None

    def start(self, status: int, headers: Headers, content_length: int | None) -> None:
        """Write the head, together with what is written right after it. Without a length the body is chunked, or ends
        with the connection for an HTTP/1.0 client."""
        self.started = True
        self.status = status
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
        if content_length is not None:
            self._remaining = content_length
            lines.append(f"Content-Length: {content_length}")
        elif self._http11:
            self._chunked_body = True
            lines.append("Transfer-Encoding: chunked")
        else:
            self._keep = False
        if not self._keep:
            lines.append("Connection: close")
        elif not self._http11:
            lines.append("Connection: keep-alive")
        lines.append(f"Date: {rfc822_formatted_time()}")
        shown = (*self.headers, *headers)
        if not self._exposes_routing:
            shown = tuple(header for header in shown if not header[0].startswith("x-headrace-"))
        lines += [f"{name}: {value}" for name, value in shown]
        lines += ["", ""]
        self._head = "\r\n".join(lines).encode("latin-1", "replace")
        asyncio.get_running_loop().call_soon(self._write_head)

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
            self.first_write = asyncio.get_running_loop().time()
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
    def write_raw(self) -> Callable[[bytes], None]:
        transport = self._protocol.transport
        if transport is None:
            raise RuntimeError("the client has gone")
        return transport.write

    def write_last(self, payload: bytes) -> None:
        """Write the end of a chunked body, in one go with what says that it is the end."""
        self.first_write = self.first_write or asyncio.get_running_loop().time()
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
        transport = self._protocol.transport
        if transport is None:
            return
        if self._remaining is None and not self._chunked_body:
            reset(transport)  # an orderly end of the connection would be that of the body
        else:
            transport.abort()

    def follow(self, flow: Flow | None) -> None:
        """Hold up `flow` from now on when the client does not keep up."""
        self._flow = flow
        self._protocol.response = self if flow is not None else None
        if flow is not None and self._protocol.writing_paused:
            self.writing_paused()  # since the answer before this one

    def writing_paused(self) -> None:
        self.paused_since = asyncio.get_running_loop().time()
        if self._flow is not None:
            self._flow.pause()

    def writing_resumed(self) -> None:
        self.paused_since = 0.0
        self.resumed_at = asyncio.get_running_loop().time()
        if self._flow is not None:
            self._flow.resume()

    def _write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        transport = self._protocol.transport
        if transport is not None:  # else the client has gone, and the handler is about to be cancelled
            transport.write(data)

    def _write_head(self) -> None:
        if self._head:
            self._write(b"")


def write_continue(request: web.BaseRequest) -> None:
    """Tell a client that waits for it (`Expect: 100-continue`) to send its body."""
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
