"""gRPC statuses and engine messages -> `UpstreamError`.

Triton reports most things with a handful of statuses, so its texts matter: a full queue, a shutdown and an unloaded
model are all UNAVAILABLE, as is a connection that broke. Because streams ask for `triton_grpc_error`, an error comes
as a status; servers that do not know it send `error_message` in the stream, a text without status, which is judged by
the same words.

Some of these texts quote the client: names of its tensors, its request id. So words are looked for anywhere only under
a status that no mistake of a client's earns; elsewhere they count where a text begins, which is always Triton's own: in
front of a refusal Triton puts the id of the request, which is taken off as exactly what the request said.

What follows from a failure depends on whether the client could have seen text. Before, everything that did not run to
its end by the request's own fault may be tried elsewhere; after, the answer broke off.
"""

import re

import grpc

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.http2.grpc_stream import CallEnd, Cause

_QUEUE_FULL = re.compile(r"exceeds maximum queue|maximum queue|queue[ _]?size|queue is full", re.IGNORECASE)
_WAITED_TOO_LONG = re.compile(r"(?:request )?timeout expired", re.IGNORECASE)
_SHUTTING_DOWN = re.compile(
    r"(?:grpc )?server is shutting down|server is stopping|server exiting|shutting down", re.IGNORECASE
)
_NOT_SERVED = re.compile(
    r"request for unknown model|model '[^']*' is not ready|unknown model|no available versions", re.IGNORECASE
)
_NOT_IN_SEQUENCE = re.compile(r"inference request (?:for sequence|to model) ")
_STUB_DEAD = re.compile(
    r"(?:in ensemble '[^']*', )?(?:Failed to process the request\(s\) for model [^,]*, message: )?"
    r"Stub process '[^']*' is not healthy"
)
_NEVER_CONNECTED = re.compile(r"failed to connect|name resolution|DNS resolution|no address", re.IGNORECASE)
_NOBODY_THERE = re.compile(r"refused|resolution|no address|unreachable", re.IGNORECASE)
_STREAM_BROKE = re.compile(r"RST_STREAM|stream removed|socket closed|connection reset|GOAWAY", re.IGNORECASE)
_ENGINES_OWN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED})
_CHANNEL_CODES = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}
)

_ADDRESS = re.compile(r"\bipv[46]:\S+?:(?=\s|[A-Za-z])")
"""An engine's address in gRPC's texts, which is no client's business."""

MODEL_DEAD = "model_process_died"
"""The code of an error that says that the process behind a model is dead."""

_MESSAGE_LIMIT = 2000
"""Characters of an engine's message that are passed on."""


def from_status(code: grpc.StatusCode, details: str | None, *, endpoint: str, received: bool) -> UpstreamError:
    """The error for an RPC that ended with `code`. `received`: the engine had begun to answer."""
    text = details or code.name
    if judged := _by_text(text, endpoint, received, anywhere=code in _ENGINES_OWN):
        return judged
    if code is grpc.StatusCode.CANCELLED:
        return _cut_off(text, endpoint, received) if received else _busy(503, endpoint, "cancelled the request")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UpstreamError(Failure.TIMEOUT, f"Engine {endpoint} ran out of time.", 504, "engine_timeout")
    if code is grpc.StatusCode.UNAVAILABLE:
        if not received and _NEVER_CONNECTED.search(text):
            failure = Failure.CONNECT if _NOBODY_THERE.search(text) else Failure.NO_CONNECTION
            return UpstreamError(failure, f"Engine {endpoint} cannot be reached.", 503, "connect_failed")
        return _cut_off(text, endpoint, received)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return UpstreamError(Failure.PROTOCOL, f"Engine {endpoint} exceeded a limit: {text[:_MESSAGE_LIMIT]}", 502)
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        return UpstreamError(Failure.ENGINE, text[:_MESSAGE_LIMIT], 400, "engine_refused")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        status = 401 if code is grpc.StatusCode.UNAUTHENTICATED else 403
        return UpstreamError(Failure.ENGINE, text[:_MESSAGE_LIMIT], status, "engine_refused")
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and _STREAM_BROKE.search(text):
        return _cut_off(text, endpoint, received)
    return UpstreamError(Failure.ENGINE, text[:_MESSAGE_LIMIT], 500, "engine_error")


def from_end(end: CallEnd, *, endpoint: str, received: bool) -> UpstreamError:
    """The error for a call of our own HTTP/2 client that did not end in order: what gRPC's libraries put into the words
    of a status, that client tells."""
    if end.cause is Cause.STATUS:
        return from_status(end.code, end.details, endpoint=endpoint, received=received)
    if end.cause is Cause.CLOSED:
        return UpstreamError(Failure.DIED, f"Engine {endpoint} has left the fleet.", 502, "engine_died")
    if end.cause is Cause.MALFORMED:
        message = f"Engine {endpoint} sent a malformed answer: {end.details}."
        return UpstreamError(Failure.PROTOCOL, message, 502, "engine_protocol_error")
    if end.cause is Cause.REFUSED and not received:
        return _busy(503, endpoint, "did not take the request")
    return _cut_off(end.details, endpoint, received)


def from_message(text: str, *, endpoint: str, received: bool, request_id: str = "") -> UpstreamError:
    """The error for an `error_message` inside a stream, for the request with that id."""
    text = text.removeprefix(_id_prefix(request_id))
    if judged := _by_text(text, endpoint, received, anywhere=False):
        return judged
    if "cancelled" in text.lower():
        return _cut_off(text, endpoint, received) if received else _busy(503, endpoint, "cancelled the request")
    return UpstreamError(Failure.ENGINE, text[:_MESSAGE_LIMIT], 500, "engine_error")


def from_http(status: int, text: str, *, endpoint: str, received: bool) -> UpstreamError:
    """The error for an HTTP answer with `status` (RFC 9110) and an error text.

    Triton says 400 of most failures, whoever's fault they are, so that is what the client is told as well.
    """
    if judged := _by_text(text, endpoint, received, anywhere=False):
        return judged
    if status in (429, 503):
        return _busy(status, endpoint, "cannot take more now")
    return UpstreamError(
        Failure.ENGINE, text[:_MESSAGE_LIMIT], status, "engine_error" if status >= 500 else "engine_refused"
    )


def _by_text(text: str, endpoint: str, received: bool, *, anywhere: bool) -> UpstreamError | None:
    """What the words say, where they say more than the status."""
    if is_stub_death(text):
        if received:
            return UpstreamError(
                Failure.DIED, f"Engine {endpoint} broke off its answer: its model process has died.", 502, MODEL_DEAD
            )
        # The request was not run, and none will be until the model is loaded anew, however healthy Triton looks.
        return UpstreamError(Failure.CONNECT, f"Engine {endpoint} has no living model process.", 503, MODEL_DEAD)
    if received:
        return None

    def says(words: re.Pattern[str]) -> bool:
        return (words.search(text) if anywhere else words.match(text)) is not None

    if says(_QUEUE_FULL):
        return _busy(429, endpoint, "has a full queue")
    if says(_WAITED_TOO_LONG):
        return _busy(503, endpoint, "had the request in its queue for too long")
    if says(_SHUTTING_DOWN):
        # Nothing was run, and nothing will be: as good as gone, though its running streams go on to their ends.
        return UpstreamError(Failure.CONNECT, f"Engine {endpoint} is shutting down.", 503, "engine_stopping")
    if says(_NOT_SERVED):
        return UpstreamError(
            Failure.CONNECT, f"Engine {endpoint} does not serve the model now.", 503, "model_unavailable"
        )
    return None


def is_stub_death(details: str | None) -> bool:
    """Whether an error says that the process behind a Python-backend model is gone."""
    return details is not None and _STUB_DEAD.match(details) is not None


def is_refusal(details: str, request_id: str) -> bool:
    """Whether an error is Triton's refusal of a request that its model was never given, as far as the words tell."""
    return details.startswith(_id_prefix(request_id)) or any(
        says.match(details) is not None for says in (_NOT_SERVED, _NOT_IN_SEQUENCE)
    )


def _id_prefix(request_id: str) -> str:
    """What stands in front of what Triton's core says of a request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def is_channels_own(code: grpc.StatusCode, details: str) -> bool:
    """Whether a status was made by this side's channel, not by the engine: its text is about connections."""
    return code in _CHANNEL_CODES and (
        _NEVER_CONNECTED.search(details) is not None or _STREAM_BROKE.search(details) is not None
    )


def _busy(status: int, endpoint: str, what: str) -> UpstreamError:
    return UpstreamError(Failure.BUSY, f"Engine {endpoint} {what}.", status, "engine_busy")


def _cut_off(text: str, endpoint: str, received: bool) -> UpstreamError:
    reason = _ADDRESS.sub("", text)[:_MESSAGE_LIMIT]
    if received:
        return UpstreamError(Failure.DIED, f"Engine {endpoint} broke off its answer: {reason}", 502, "engine_died")
    return UpstreamError(
        Failure.LOST_BEFORE_ANSWER, f"Engine {endpoint} was lost before it answered: {reason}", 502, "engine_lost"
    )
