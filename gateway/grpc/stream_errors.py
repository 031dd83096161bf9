"""What can go wrong with one request of a stream, beyond what calls raise."""

from dataclasses import dataclass

from gateway.grpc import wire
from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.triton.raw import RawTriton


class ClientGoneError(Exception):
    """There is nobody to write to any more."""


@dataclass(slots=True)
class ReportedError(UpstreamError):
    """A failure that an engine reported inside its stream, in this message."""

    reported: bytes = b""


def raise_if_retryable(raw: RawTriton, message: bytes, *, versioned: bool) -> None:
    """Raise the failure an engine reported as its first message if another endpoint may be tried. `versioned`: the
    client had asked for one version of the model."""
    judged = raw.judged_text(wire.error_text(message), received=False, versioned=versioned)
    if judged.retryable:
        raise ReportedError(judged.failure, judged.message, judged.status, judged.code, message)


def ended_early(endpoint: str) -> UpstreamError:
    """The failure of a request whose stream ended without an answer to it."""
    message = f"Engine {endpoint} ended its stream before it answered."
    return UpstreamError(Failure.LOST_BEFORE_ANSWER, message, 502, "upstream_lost")
