"""What can be wrong with an engine's HTTP answer, as its client is told."""

from gateway.relay.events import EventTooLongError
from gateway.upstream.base import Failure, UpstreamError


def lost(endpoint: str) -> UpstreamError:
    """There was no answer."""
    message = f"Engine {endpoint} closed the connection without an answer."
    return UpstreamError(Failure.LOST_BEFORE_ANSWER, message, code="engine_lost")


def broke_off(endpoint: str) -> UpstreamError:
    """The answer ended too soon."""
    message = f"Engine {endpoint} broke off in the middle of its answer."
    return UpstreamError(Failure.DIED, message, code="engine_died")


def broke_protocol(endpoint: str, error: Exception) -> UpstreamError:
    """The answer cannot be read, by a FramingError or EventTooLongError."""
    what = "an event without end" if isinstance(error, EventTooLongError) else str(error)
    message = f"Engine {endpoint} broke its protocol: {what}."
    return UpstreamError(Failure.PROTOCOL, message, code="engine_protocol_error")
