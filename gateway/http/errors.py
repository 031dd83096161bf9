"""Errors in the shape of the OpenAI API, which is the admin API's too: whole, or as an event of a stream."""

import msgspec

from gateway.upstream.base import Failure, UpstreamError
from router.errors import ApiError

_NOT_NOW = frozenset({Failure.CONNECT, Failure.NO_CONNECTION, Failure.GATEWAY, Failure.BUSY})
"""Failures after which the same request may well succeed a little later."""
INTERNAL = ApiError(500, "The gateway failed to handle the request.", "server_error", code="internal_error")
"""What a client is told of a mistake of the gateway's. Not to be raised: it is shared."""
_TYPES = {429: "rate_limit_error"}
_encoder = msgspec.json.Encoder()


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    """For people: what is wrong, and what to do."""
    type: str
    param: str | None
    """The field, or the part of the path, that it is about."""
    code: str | None
    """Stable, for programs."""


class Error(msgspec.Struct, frozen=True):
    """Every refusal."""

    error: ErrorDetail


def error_body(error: ApiError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return _encoder.encode(Error(ErrorDetail(error.message, error.type, error.param, error.code)))


def error_event(error: ApiError) -> bytes:
    """The same as the last event of a stream: no `[DONE]` follows it."""
    return b"data: %b\n\n" % error_body(error)


def as_api_error(error: UpstreamError) -> ApiError:
    """What a client is told when no engine answered its request, or its engine stopped answering."""
    retry_after = 1 if error.failure in _NOT_NOW else None
    type_ = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return ApiError(error.status, error.message, type_, code=error.code, retry_after=retry_after)
