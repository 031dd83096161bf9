"""What can go wrong with one request of a stream, beyond what calls raise."""

from dataclasses import dataclass

from gateway.grpc import wire
from gateway.upstream.base import UpstreamError
from gateway.upstream.triton.failures import is_refusal
from gateway.upstream.triton.raw import EngineStatusError, RawTriton
from router.kserve import Inference


class ClientGoneError(Exception):
    """There is nobody to write to any more."""


@dataclass(slots=True)
class ReportedError(UpstreamError):
    """A failure that an engine reported inside its stream, in this message."""

    reported: bytes = b""


def raise_if_retryable(raw: RawTriton, message: bytes, found: Inference) -> None:
    """Raise the failure an engine reported as its first message for a request if another endpoint may be tried."""
    judged = raw.judged_text(wire.error_text(message), found, received=False)
    if judged.retryable:
        raise ReportedError(judged.failure, judged.message, judged.status, judged.code, message)


def refused_before_the_model(error: Exception | None, request_id: str) -> bool:
    """Whether an engine's status is for a request that its model was never given, as far as the words tell."""
    return isinstance(error, EngineStatusError) and is_refusal(error.details, request_id)
