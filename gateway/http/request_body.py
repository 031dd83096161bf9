"""A client's request body, as it comes in.

Whether it is collected or streamed on, it is read in the same way: bounded, with a limit to how long the client may
pause, and with a refusal for whatever its framing turns out not to be. A body that was not read to its end leaves a
connection that cannot be used again, so every refusal here closes it.
"""

import asyncio

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from gateway.http.client_response import ClientResponse, write_continue
from router.errors import ApiError, invalid

BODY_IDLE_S = 60.0
"""How long a client may pause in the middle of sending its request body."""


class RequestBody:
    """The body of one request, to be read once. Holds no more than what one read gave."""

    __slots__ = ("_content", "_limit", "_response", "length", "size")

    def __init__(self, request: web.BaseRequest, response: ClientResponse, limit: int) -> None:
        """Raises ApiError (413) for a body that is announced to be larger than `limit` bytes."""
        self._content = request.content
        self._response = response
        self._limit = limit
        self.length = request.content_length
        """Its announced length; None if chunked, or without a body."""
        self.size = 0
        """Bytes read so far."""
        if (self.length or 0) > limit:
            raise self._too_large()
        if request.headers.get("expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
            write_continue(request)

    @property
    def ended(self) -> bool:
        """Whether it has been read to its end."""
        return self.size == self.length or self._content.at_eof()

    async def read(self) -> bytes:
        """The next bytes; none at its end. Raises ApiError: 413 over the limit, 408 for a client that stops sending,
        400 for bytes that are not what their framing says."""
        content = self._content
        try:
            if content.is_eof():  # all of it has come, as nearly always: nothing to wait for
                piece = content.read_nowait()
            else:
                async with asyncio.timeout(BODY_IDLE_S):
                    piece = await content.readany()
        except TimeoutError:
            self._response.close_after()
            raise ApiError(408, "The request body did not arrive in time.", code="request_timeout") from None
        except (RequestPayloadError, HttpProcessingError):
            self._response.close_after()
            raise invalid("The request body is not what its headers say.", code="bad_http_request") from None
        self.size += len(piece)
        if self.size > self._limit:
            raise self._too_large()
        return piece

    def _too_large(self) -> ApiError:
        self._response.close_after()
        message = f"The request body is larger than the limit of {self._limit} bytes."
        return ApiError(413, message, code="request_too_large")
