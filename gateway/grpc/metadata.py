"""A client's metadata: what of it goes on to the engine, and what comes back with the answer.

Only what is known to be harmless goes on (`_PASSED`): credentials are the gateway's business (`gateway.access`), and
what an engine may be told is told in the request's parameters, which pass through untouched.

An entry of metadata costs about as much as an asyncio task, on either side of the gateway. So a request id goes along
and comes back only if the client gave one (a KServe request has its own `id`), and the route is named where KServe
names it: as the answer's model.
"""

from typing import Any

from gateway.access import KEY_HEADERS
from gateway.admission import POSITION_HEADER
from gateway.corridor import Corridor
from gateway.credentials import AUTHORIZATION
from gateway.exchange import Origin
from gateway.oidc.callers import Caller, Pending
from gateway.request_ids import is_request_id, new_request_id
from gateway.upstream.base import Headers, UpstreamError
from gateway.upstream.triton.raw import SERVICE, Metadata
from router.admission.standing import PREFER_HEADER, PRIORITY_HEADER

REQUEST_ID = "x-request-id"
_PASSED = ("traceparent", "tracestate")
_WANTS_STATUS = ("triton_grpc_error", "true")
_HEARD = frozenset({REQUEST_ID, *_PASSED, _WANTS_STATUS[0], PRIORITY_HEADER, PREFER_HEADER, *KEY_HEADERS})


class ClientMetadata:
    """The metadata of one RPC."""

    __slots__ = (
        "_corridor",
        "_echoed",
        "authorization",
        "caller",
        "context",
        "method",
        "passed",
        "passed_stream",
        "prefers",
        "priority",
        "request_id",
        "wants_status",
    )

    _echoed: Headers
    authorization: str
    """The client's own; see `gateway.credentials`."""
    caller: Caller
    """As `Access.view` takes it."""
    context: Any
    """The RPC's."""
    passed: Headers
    """What goes on to the engine."""
    passed_stream: Headers
    """What goes on to the engine with a stream of one request."""
    prefers: str | None
    priority: str | None
    """As `Standing.asking` takes them."""
    request_id: str
    """The client's id of the RPC, or one made for the log."""
    wants_status: bool
    """A stream's first error is to end it, as a status."""
    method: str
    """The RPC's."""
    paused_since = resumed_at = 0.0
    """As the client of its exchange (`gateway.exchange.Client`), to whom nothing is written before a unary call's
    end."""

    def __init__(self, context: Any, corridor: Corridor, method: str) -> None:
        self._corridor = corridor
        self.context = context
        self.method = method
        given = {key: value for key, value in context.invocation_metadata() or () if key in _HEARD}
        self.caller = corridor.access.caller(given)
        self.authorization = given.get(AUTHORIZATION, "")
        if not given:
            self._echoed = self.passed = self.passed_stream = ()
            self.request_id = new_request_id()
            self.wants_status = False
            self.priority = self.prefers = None
            return
        self.priority, self.prefers = given.get(PRIORITY_HEADER), given.get(PREFER_HEADER)
        asked = given.get(REQUEST_ID, "")
        self._echoed = ((REQUEST_ID, asked),) if is_request_id(asked) else ()
        self.request_id = asked if self._echoed else new_request_id()
        self.passed = (*self._echoed, *((name, given[name]) for name in _PASSED if name in given))
        self.wants_status = given.get(_WANTS_STATUS[0]) == _WANTS_STATUS[1]
        self.passed_stream = (*self.passed, _WANTS_STATUS) if self.wants_status else self.passed

    def abort(self) -> None: ...

    def origin(self) -> Origin:
        """Where the request came from; see `gateway.exchange.Client`."""
        client = self._corridor.addresses.rpc_client(self.context.peer(), self.context.invocation_metadata() or ())
        return Origin("grpc", f"/{SERVICE}/{self.method}", self.request_id, client)

    def refuse(self, _: UpstreamError) -> None:
        """A request's message has come before anything is done about it."""

    async def settle(self) -> None:
        """Wait a little for what the caller's token is to be checked with, if that is on its way."""
        if isinstance(self.caller, Pending):
            self.caller = await self.caller.settled()

    def answer(self, endpoint: str, position: int = 0) -> Metadata:
        """What comes back with the answer; `position` is the request's in the queue, if it had to wait."""
        if not self._corridor.exposes_routing:
            return self._echoed
        placed = (*self._echoed, ("x-headrace-endpoint", endpoint))
        return (*placed, (POSITION_HEADER, str(position))) if position else placed
