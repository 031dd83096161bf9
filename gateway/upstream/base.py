"""The seam between dispatch and the engine protocols.

An `Engine` stands for one endpoint: it probes it and makes calls to it. An `EngineCall` is one request on its way:
`open` sends it and waits until the engine commits to an answer, `relay` then hands the answer to a `Sink` in the wire
form of the OpenAI API, whatever the engine itself speaks. Two phases, because everything may still be retried on
another endpoint until `open` has returned, and nothing after.

A call never watches the clock. It records when it last heard from the engine (`last_read`), and the one sweep that
looks at all live requests calls `abort` with the error that `open` or `relay` is then to raise. `close` may come at any
time and any number of times; if the answer was not complete, it tells the engine to stop.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from gateway.relay.accounting import Account
from gateway.relay.steady import ClientTransport
from router.fleet import Endpoint, Pool
from router.prompt import Api, Fields
from router.spec.fleet import RetentionSpec

Headers = tuple[tuple[str, str], ...]
"""Names and values of what is sent to an engine: HTTP headers, or gRPC metadata."""


class Failure(Enum):
    """What went wrong between gateway and engine, by what may be done about it."""

    CONNECT = "connect"
    """There is nothing to connect to: the engine has seen nothing, and nobody else will do better."""
    NO_CONNECTION = "no_connection"
    """No connection was made in time: the engine has seen nothing, and may only be busy."""
    GATEWAY = "gateway"
    """The gateway itself had not what it takes to connect: file descriptors, ports, memory."""
    LOST_BEFORE_ANSWER = "lost_before_answer"
    """The connection ended after the request was sent and before any answer."""
    BUSY = "busy"
    """The engine said that it cannot take more now (queue full, shutting down)."""
    DIED = "died"
    """The answer broke off."""
    TIMEOUT = "timeout"
    """A deadline passed."""
    PROTOCOL = "protocol"
    """The engine broke its protocol: malformed framing, an event without end, wrong lengths."""
    ENGINE = "engine"
    """The engine refused this request, or failed at it in a way that says nothing of the engine."""
    CANCELLED = "cancelled"
    """An operator ended the request."""
    INTERNAL = "internal"
    """The engine failed at this request by its own fault, as far as its words tell."""


@dataclass(slots=True)
class UpstreamError(Exception):
    """An engine did not answer as it should. `status`, `message` and `code` are what the client is told."""

    failure: Failure
    message: str
    status: int = 502
    code: str = "upstream_error"
    own_deadline: bool = field(default=False, kw_only=True)
    """It was the request's own deadline that passed, shorter than its pool's: that says nothing of the engine."""

    def __str__(self) -> str:
        return self.message

    @property
    def retryable(self) -> bool:
        """Whether another endpoint may be tried, as long as the client has seen nothing."""
        return self.failure in _RETRYABLE

    @property
    def endpoint_fault(self) -> bool:
        """Whether it speaks against the endpoint's health: then it is probed at once, and counts."""
        return self.failure not in _NOT_ITS_FAULT and self.code not in _NOT_ITS_DOING and not self.own_deadline


_REQUEST_CLOSED = "request_closed"
TOTAL_TIMEOUT = "total_timeout"
"""The code of a call that took longer than a request may take in all, however well it went."""
_RETRYABLE = frozenset({Failure.CONNECT, Failure.NO_CONNECTION, Failure.LOST_BEFORE_ANSWER, Failure.BUSY})
_NOT_ITS_FAULT = frozenset({Failure.BUSY, Failure.ENGINE, Failure.GATEWAY, Failure.CANCELLED})
_NOT_ITS_DOING = frozenset({_REQUEST_CLOSED, TOTAL_TIMEOUT})


def closed() -> UpstreamError:
    """The error of a request that nobody waits for any more. One for each: what is raised again and again gathers
    tracebacks, and keeps all that they refer to."""
    return UpstreamError(Failure.DIED, "The request was closed.", 499, _REQUEST_CLOSED)


class EngineRequest(msgspec.Struct, frozen=True):
    """One request as an engine adapter gets it."""

    api: Api
    body: Fields
    """The client's JSON object, values unparsed; `model` still names the route."""
    stream: bool
    include_usage: bool
    """The client asked for a usage event at the end of the stream (`stream_options.include_usage`)."""
    request_id: str
    headers: tuple[tuple[str, str], ...]
    """Headers to send along: request id, trace context."""
    endpoint: Endpoint
    pool: Pool
    connect_timeout: float
    """Seconds that a new connection may take."""
    account: Account
    """To be filled in with what the answer says about itself."""
    retention: RetentionSpec | None = None
    """The route's hints on the KV cache."""


class AnswerHead(msgspec.Struct, frozen=True):
    """What the client's response head is made of."""

    status: int
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()
    content_length: int | None = None
    events: bool = False
    """The body is a stream of server-sent events."""
    fault: UpstreamError | None = None
    """The failure of the engine's that this answer tells of. The client gets it as it is, unless it is retried."""


class ChunkSink(Protocol):
    """A client that reads chunks (HTTP/1.1's framing of a body without a length)."""

    @property
    def transport(self) -> ClientTransport | None:
        """Takes bytes that already are complete chunks, once `write` has begun the body. None if the client has
        gone."""

    @property
    def descriptor(self) -> int:
        """The transport's socket; -1 if what goes to the socket is not what is written to the transport (TLS)."""

    def write_last(self, payload: bytes) -> None:
        """As `Sink.write`, of what the body ends with."""


class Sink(Protocol):
    """The client's side of a relay. Nothing blocks: back-pressure comes back through `EngineCall.pause`."""

    @property
    def chunks(self) -> ChunkSink | None:
        """The same client, if it reads chunks."""

    def write(self, payload: bytes) -> None:
        """Send body bytes; of an event stream, whole events only."""


class LiveCall(Protocol):
    """One request to one engine, as far as its deadlines and its end are concerned."""

    last_read: float
    """Loop time of the last byte or message from the engine; of the send, before the first."""
    answering: bool
    """The engine has sent its first content."""

    def abort(self, error: UpstreamError) -> None:
        """Give up: tell the engine to stop and let whoever waits for it raise `error`."""

    def close(self) -> None:
        """Release everything; an unfinished answer is cancelled at the engine. Idempotent."""


class EngineCall(LiveCall, Protocol):
    """One request to one engine, answered in the wire form of the OpenAI API."""

    async def open(self) -> AnswerHead:
        """Send the request and wait for the head of the answer. Raises UpstreamError, or ApiError for a request
        that the engine's contract cannot express."""

    async def relay(self, sink: Sink) -> None:
        """Pass the answer on until it is complete. Raises UpstreamError when it breaks off."""

    def pause(self) -> None:
        """Stop reading from the engine: the client does not keep up."""

    def resume(self) -> None: ...


@dataclass(slots=True, frozen=True)
class ProbeReport:
    """What a probe found out about an engine that answered."""

    ready: bool
    detail: str
    capabilities: frozenset[str] | None = None
    """As `EndpointState.capabilities`."""
    kv_block_tokens: int | None = None
    slots: int | None = None
    """How many requests it works on at a time; None if it does not say."""
    models: tuple[msgspec.Raw, ...] = ()
    """The entries of the engine's own model list, for `/v1/models`."""


class Engine(Protocol):
    """One endpoint's engine. Made once for an endpoint, closed when the endpoint leaves the fleet; what its pool says
    may change meanwhile, and comes with each request and probe."""

    def call(self, request: EngineRequest) -> EngineCall: ...

    async def probe(self, pool: Pool) -> ProbeReport:
        """Ask the engine how it is. Raises UpstreamError if it does not answer; the caller sets the deadline."""

    async def close(self) -> None: ...
