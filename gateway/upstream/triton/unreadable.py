"""What is wrong with an answer that its reader gives up, as the client is told, over gRPC and HTTP alike."""

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.triton.answer import EarlyEndError
from gateway.upstream.triton.choices import AnswerTooLongError, NotNumberedError
from gateway.upstream.triton.text import TextChangedError

UNREADABLE = (EarlyEndError, NotNumberedError, AnswerTooLongError, TextChangedError, ValueError, RecursionError)
"""What reading an answer may raise."""

CHOICES_IGNORED = "choices_ignored"
"""Code of the error that tells of an engine that makes one answer where several were asked for."""


def unreadable(error: Exception, endpoint: str) -> UpstreamError:
    """What an error of `UNREADABLE` says of the engine."""
    match error:
        case EarlyEndError():
            failure, what, status, code = Failure.ENGINE, f"ended the answer early ({error})", 500, "engine_error"
        case NotNumberedError():
            failure, what, status, code = Failure.ENGINE, "makes one answer only", 400, CHOICES_IGNORED
        case AnswerTooLongError():
            failure, what, status, code = Failure.PROTOCOL, "sent an answer that is too long", 502, "answer_too_long"
        case TextChangedError():
            failure, what, status, code = Failure.PROTOCOL, "took back text it had sent", 502, "engine_protocol_error"
        case _:
            what = f"sent a malformed answer: {error}"
            failure, status, code = Failure.PROTOCOL, 502, "engine_protocol_error"
    return UpstreamError(failure, f"Engine {endpoint} {what}.", status, code)
