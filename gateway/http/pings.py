"""Signs of life in a stream whose engine is silent, and what follows from the first one.

A long prompt may keep an engine busy for minutes before its first token, and proxies, load balancers and clients take a
connection without a byte for dead. A comment, which readers of event streams skip, tells them otherwise. It can only be
sent behind the head of an answer, so a ping before the first token commits the response to 200 and a stream: the
request may still be tried at another endpoint, but whatever goes wrong is from then on told in an event.
"""

import msgspec

from gateway.http.client_response import ClientResponse, Headers
from gateway.http.errors import error_event
from router.errors import ApiError

EVENT_STREAM = ("Content-Type", "text/event-stream; charset=utf-8")
UNBUFFERED: Headers = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
_PING = b": ping\n\n"
_ERROR_LIMIT = 64 * 1024


def ping(response: ClientResponse, headers: Headers) -> None:
    """Send a comment, behind a head with `headers` if there was none yet."""
    if not response.started:
        response.start(200, (EVENT_STREAM, *headers, *UNBUFFERED), None)
    response.comment(_PING)


class AsEvent:
    """A sink that makes one event of a whole body: of an answer that comes too late to be one."""

    chunks = None

    def __init__(self, endpoint: str, status: int) -> None:
        self._endpoint = endpoint
        self._status = status
        self._pieces: list[bytes] = []
        self._size = 0

    def write(self, payload: bytes) -> None:
        self._size += len(payload)
        if self._size <= _ERROR_LIMIT:
            self._pieces.append(payload)

    @property
    def event(self) -> bytes:
        """The engine's error, or one that says what it answered."""
        body = b"".join(self._pieces)
        try:
            if self._size <= _ERROR_LIMIT and "error" in msgspec.json.decode(body, type=dict[str, msgspec.Raw]):
                return b"".join(b"data: %b\n" % line for line in body.splitlines()) + b"\n"
        except (msgspec.DecodeError, RecursionError):
            pass
        message = f"Engine {self._endpoint} answered {self._status} instead of a stream."
        return error_event(ApiError(502, message, "server_error", code="upstream_error"))
