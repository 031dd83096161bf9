"""A client's connection: one request after another, each answered by a task of its own.

Our own `asyncio.Protocol` instead of an HTTP server library, because what those do for every request costs a gateway of
short answers a quarter of its time, and because a gateway has to know what they hide: how far a body has come, who
still owes what since when, whether what is pipelined may still be waited for. It is always in one `_Stage`.

The request's task is cancelled when the client leaves: that is how a disconnect reaches the engine. A connection that
is not read does not show that its other end is gone, so it is always read, unless an engine is slow to take the body;
one on which too much is pipelined is closed. Nothing here has a timer: the server looks at all its connections once a
second (`check`).

With TLS there is no closing of one side only: a connection that is closed sends what it owes, says that this was all,
and throws away what comes until its client has said so, too. So that is how it lingers, and `check` cuts it when the
client has everything and says nothing.
"""

import asyncio
import enum
import fcntl
import logging
import math
import socket
import termios
from typing import TYPE_CHECKING, cast

from gateway.http.client_addresses import Place, peer_address
from gateway.http.client_response import NOBODY, ClientResponse
from gateway.http.errors import error_body
from gateway.http.request_body import RequestBody
from gateway.http.request_head import HEAD_LIMIT, BadHeadError, RequestHead, parse_head
from gateway.request_ids import new_request_id
from router.errors import ApiError

if TYPE_CHECKING:
    from gateway.http.server import ClientServer

WRITE_BUFFER_BYTES = 64 * 1024
"""Bytes queued for a client that does not read before reading from the engine is paused."""
SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel may queue besides (it takes twice that): left alone it swallows megabytes before anybody notices that
a client is slow."""
PIPELINED_BYTES = 128 * 1024
"""What a client may send behind the request being answered."""

KEEP_ALIVE_S = 75.0
"""How long an idle connection is kept."""
HEAD_S = 60.0
"""How long a client may take for a request's head, from the connection's beginning or the head's first byte."""
FIRST_REQUEST_S = 1.0
"""How long a connection waits for its first request when idle ones are closed: one that has just been made has hardly
been made for nothing, and its client would not try again."""
TAIL_S = 60.0
"""How long a client may take for what is still queued when its answer is complete."""
LINGER_S = 5.0
"""How long a client that still sends may do so after its answer, or with TLS take to say that it has all of it."""

logger = logging.getLogger(__name__)


class Request:
    """One request as its handler gets it."""

    __slots__ = ("body", "connection", "head", "place", "recorded")

    def __init__(self, head: RequestHead, body: RequestBody, connection: "ClientConnection") -> None:
        self.head = head
        self.body = body
        self.connection = connection
        self.recorded = False
        """It has an exchange, whose end is told of."""
        self.place: Place | None = None
        """What it takes of what its address may have; left when it has been answered."""

    @property
    def address(self) -> str:
        """The client's address: the connection's, or what a trusted proxy says."""
        return self.connection.client_of(self.head)


class _Stage(enum.Enum):
    """What a connection is doing."""

    HEAD = enum.auto()
    """It waits for a request's head."""
    ANSWER = enum.auto()
    """A request is being answered: what comes is its body, then what is pipelined behind it."""
    TAIL = enum.auto()
    """The answer is written, its client slow to take the rest: what comes is pipelined."""
    LINGER = enum.auto()
    """The answer was the last, but its client still sends. What comes is thrown away for a while, because closing at
    once would reset the connection and with it the answer under way."""
    CLOSE = enum.auto()
    """It ends when what has been written is gone. What comes is thrown away."""


# As attributes of the class they are properties in Python 3.11, and slow.
_HEAD, _ANSWER, _TAIL, _LINGER, _CLOSE = _Stage


class ClientConnection(asyncio.Protocol):
    """One connection of a client; see above."""

    __slots__ = (
        "_body", "_head", "_paused", "_place", "_server", "_since", "_stage", "_task", "_used",
        "address", "descriptor", "loop", "response", "transport", "writing_paused",
    )  # fmt: skip

    def __init__(self, server: "ClientServer", address: str = "", place: Place | None = None) -> None:
        """`address` is the client's where it is not the socket's, `place` what is left when the connection ends."""
        self._server = server
        self._place = place
        self.address = address
        self.loop = server.loop
        self.transport: asyncio.Transport | None = None
        """None once the client has gone."""
        self.descriptor = -1
        """The transport's socket; -1 if what goes to the socket is not what is written to the transport (TLS)."""
        self.response: ClientResponse | None = None
        """What is being relayed to the client, and held up when it does not keep up."""
        self.writing_paused = False
        self._stage = _HEAD
        self._head = b""
        """What has come of the next head, and of what may be behind it."""
        self._body: RequestBody | None = None
        self._task: asyncio.Task[None] | None = None
        """Both of the request being answered."""
        self._since = 0.0
        """Loop time of what the stage's deadline counts from."""
        self._used = False
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        connection = self.transport.get_extra_info("socket")
        if self._server.files.refuses(connection.fileno()):
            self._server.addresses.refused("files")
            self._stage = _CLOSE
            self.transport.abort()
            return
        self._server.connections.add(self)
        self._since = self._server.time()
        if not self.address:
            self.address = peer_address(self.transport.get_extra_info("peername"))
        if self.transport.can_write_eof():
            self.descriptor = connection.fileno()
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._server.lost(self)
        if self._place is not None:
            self._place.leave()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        body = self._body
        if body is not None:
            if not body.arrived:
                body.last_fed = self._server.time()
                data = body.feed(data)
                if not data:
                    return
        elif self._stage is _HEAD:
            self._read_head(self._head + data if self._head else data)
            return
        elif self._stage is not _TAIL:
            return
        self._head += data
        if len(self._head) > PIPELINED_BYTES:
            self.abort()

    def _read_head(self, data: bytes) -> None:
        """Begin the request in `data`, if its head is complete."""
        if data.startswith(b"\r\n"):  # some clients end a body with one line end too many
            data = data[2:]
        end = data.find(b"\r\n\r\n", 0, HEAD_LIMIT)
        if end < 0:
            if data and not self._head:
                self._since = self._server.time()
            self._head = data
            if len(data) >= HEAD_LIMIT:
                message = f"The request's head is larger than {HEAD_LIMIT} bytes."
                self._refuse(BadHeadError(431, message, "headers_too_large"))
            elif data.count(b"\n") != data.count(b"\r\n"):
                self._refuse(BadHeadError(400, "The request is not valid HTTP/1.1: its lines end in CRLF."))
            return
        try:
            head = parse_head(data[:end])
        except BadHeadError as error:
            self._refuse(error)
            return
        self._stage = _ANSWER
        self._body = body = RequestBody(self, head)
        rest = data[end + 4 :]
        if rest and not body.arrived:
            rest = body.feed(rest)
        self._head = rest
        self._task = self.loop.create_task(self._answer(Request(head, body, self)))

    async def _answer(self, request: Request) -> None:
        try:
            response = await self._server.handle(request)
        except Exception:
            logger.exception("unhandled error on %s %s", request.head.method, request.head.path)
            self._task = None
            self.abort()
        else:
            self._task = None
            self._answered(response.keep_alive)
        finally:
            if request.place is not None:
                request.place.leave()

    def client_of(self, head: RequestHead) -> str:
        """The address of the client of a request with this head."""
        return self._server.addresses.client(self.address, head.headers)

    def refuse_body(self, error: ApiError) -> None:
        """Have whoever reads the request's body raise `error`, if it has not all come."""
        if self._body is not None and not self._body.arrived:
            self._body.fail(error)

    def _answered(self, keep_alive: bool) -> None:
        """Go on after an answer that has been written."""
        body, self._body = self._body, None
        if self.transport is None:
            return
        if self.transport.is_closing():
            self._enter(_CLOSE)
        elif body is not None and not body.arrived:
            self._linger()
        elif not keep_alive or self._server.closing:
            self._end()
        elif self.writing_paused:
            self._enter(_TAIL)
        else:
            self._next()

    def _enter(self, stage: _Stage) -> None:
        self._stage = stage
        self._since = self._server.time()

    def _next(self) -> None:
        self._enter(_HEAD)
        self._used = True
        self.resume_reading()
        data, self._head = self._head, b""
        if data:
            self._read_head(data)

    def _refuse(self, error: BadHeadError) -> None:
        """Answer what cannot be read, and end the connection."""
        self._head = b""
        self._server.addresses.refused_head(error.status)
        told = ApiError(error.status, str(error), code=error.code)
        headers = (("x-request-id", new_request_id()), ("x-headrace-endpoint", NOBODY), ("x-headrace-route", NOBODY))
        response = ClientResponse(self, None, headers, exposes_routing=True)
        response.send(error.status, (("Content-Type", "application/json"),), error_body(told))
        self._linger()

    def _linger(self) -> None:
        self._enter(_LINGER)
        self._head = b""
        self.resume_reading()
        if self.transport is not None:
            if self.transport.can_write_eof():
                self.transport.write_eof()
            else:
                self.transport.close()

    def _end(self) -> None:
        """Take no further request."""
        if self._head:  # there may be more of it
            self._linger()
        elif self.transport is not None:
            self._enter(_CLOSE)
            self.transport.close()

    def eof_received(self) -> None:
        """A client that closes its side has gone: so do proxies tell of it. The transport closes by itself, but that of
        TLS warns of all that is written while it flushes what nobody may read."""
        if self._stage is not _ANSWER:
            self._enter(_CLOSE)
        elif self.transport is not None and not self.transport.can_write_eof():
            self.transport.abort()

    def pause_writing(self) -> None:
        self.writing_paused = True
        if self.response is not None:
            self.response.writing_paused()

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self.response is not None:
            self.response.writing_resumed()
        if self._stage is _LINGER:
            self._since = self._server.time()
        elif self._stage is _TAIL:
            if self._server.closing:
                self._end()
            else:
                self._next()

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def pause_reading(self) -> None:
        """Take no more of a body that nobody takes on."""
        if not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            if self.transport is not None:
                self.transport.resume_reading()

    @property
    def ending(self) -> bool:
        """Whether the answer being written has to be this connection's last."""
        server = self._server
        kept = server.overload.keeps_connections and not server.draining
        return not kept or (self._body is not None and not self._body.arrived)

    def close_if_idle(self, unused_since: float = math.inf) -> None:
        """Close a connection that nobody is being answered on, unless its first request, or the rest of a request's
        head, has been waited for from later than `unused_since` on."""
        waits_for_none = (self._used and not self._head) or self._since <= unused_since
        if self._stage is _HEAD and waits_for_none and self.transport is not None:
            self._enter(_CLOSE)
            self.transport.close()

    def abort(self) -> None:
        """End the connection, whatever is under way."""
        if self.transport is not None:
            self.transport.abort()

    def _only_lingers(self) -> bool:
        """Whether the client has all of its answer, and has only to stop sending or, with TLS, to say so."""
        transport = self.transport
        if transport is None or transport.can_write_eof():
            return self._stage is _LINGER and not self.writing_paused
        if self._stage is _TAIL or transport.get_write_buffer_size():
            return False
        # What the layer below TLS holds is not told: but then the kernel's buffer is not empty, either.
        descriptor = transport.get_extra_info("socket").fileno()
        return fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)) == bytes(4)

    def check(self, now: float) -> None:
        """Hold the deadlines that are not those of a request at its engine."""
        stage, body = self._stage, self._body
        waited = now - self._since
        if body is not None:
            if not body.arrived:
                body.overdue(now)
        elif stage is not _HEAD:
            if waited > TAIL_S or (waited > LINGER_S and self._only_lingers()):
                self.abort()
        elif self._head:
            if waited > HEAD_S:
                self._refuse(BadHeadError(408, "The request's head did not arrive in time.", "request_timeout"))
        elif self._used:
            if waited > KEEP_ALIVE_S or not self._server.overload.keeps_connections:
                self.close_if_idle()
        elif waited > HEAD_S:
            self._server.addresses.refused("head_timeout")
            self.close_if_idle(now)
        elif waited > FIRST_REQUEST_S and not self._server.overload.keeps_connections:
            self._server.addresses.refused("overload")
            self.close_if_idle(now)
