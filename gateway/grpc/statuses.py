"""What a gRPC client is told: the engine's own status if there is one, else the gateway's.

The gateway's codes are those Triton gives for the same: an unknown model is NOT_FOUND, a malformed request
INVALID_ARGUMENT, no capacity UNAVAILABLE. Requests are counted in the metrics by HTTP status like those of the other
fronts, so that one alert fits all.
"""

import msgspec
from grpc import StatusCode

from gateway.http import errors
from gateway.metrics import CLIENT_GONE
from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.triton.raw import EngineStatusError
from router.errors import ApiError
from router.kserve import MalformedError

_OF_HTTP = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    410: StatusCode.CANCELLED,
    429: StatusCode.RESOURCE_EXHAUSTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
_TO_HTTP = {
    StatusCode.OK: 200,
    StatusCode.CANCELLED: CLIENT_GONE,
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.OUT_OF_RANGE: 400,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}


class Status(msgspec.Struct, frozen=True):
    """How an RPC or one request of it ended."""

    code: StatusCode
    details: str = ""

    @property
    def http(self) -> int:
        """The HTTP status it is counted under."""
        return _TO_HTTP.get(self.code, 500)


OK = Status(StatusCode.OK)
GONE = Status(StatusCode.CANCELLED, "the client has gone")
INTERNAL = Status(StatusCode.INTERNAL, errors.INTERNAL.message)


def status_of(error: ApiError | UpstreamError | MalformedError) -> Status:
    """The status for a request that failed."""
    if isinstance(error, EngineStatusError):
        return Status(error.grpc_code, error.details)
    if isinstance(error, MalformedError):
        return Status(StatusCode.INVALID_ARGUMENT, f"The request cannot be read: it holds {error}.")
    if isinstance(error, UpstreamError) and error.failure in (Failure.LOST_BEFORE_ANSWER, Failure.DIED):
        return Status(StatusCode.UNAVAILABLE, error.message)
    return Status(_OF_HTTP.get(error.status, StatusCode.INTERNAL), error.message)
