"""Triton's HTTP API (KServe v2) in front: requests go to a Triton of the route, bodies untouched.

The path's model is the route. It is rewritten to the name the engine knows; everything else a client sends or gets is
the engine's: bodies byte for byte, in both directions, with the headers that say how to read them. Errors of Triton's
are its own; those of the gateway take the same shape, `{"error": "..."}`.

A request body may be 2 GiB. So much of it is read ahead as routing looks at; a request of which more has been read can
be sent only once, and is not tried at a second endpoint.
"""

import contextlib
import itertools
from importlib.metadata import version

import msgspec

from gateway.corridor import Corridor
from gateway.exchange import Exchange
from gateway.http.answering import Answering, refuse
from gateway.http.client_response import NOBODY, ClientResponse
from gateway.http.connection import Request
from gateway.http.errors import as_api_error
from gateway.http.kserve_engine import GENERATING, Sending, open_answer
from gateway.http.kserve_paths import METHODS, ModelPath, parse, why_unsupported
from gateway.http.passed_headers import TRACE_CONTEXT, authorization, passed_headers
from gateway.http.placement import placement
from gateway.http.request_body import RequestBody
from gateway.kserve import API, BODY_LIMIT, EXTENSIONS, any_servable, reachable, repository_index
from gateway.oidc.callers import Caller
from gateway.upstream.base import UpstreamError
from gateway.upstream.collected import Collected
from router.admission.standing import PREFER_HEADER, PRIORITY_HEADER
from router.errors import ApiError, invalid
from router.fleet import FleetView
from router.kserve_json import READ_AHEAD_BYTES, Conversation, inflate_start, read_generate, read_infer, view
from router.plan import Plan, plan
from router.prefix import RAW_PROMPT_KEY_BYTES
from router.timeouts import TIMEOUTS_HEADER, read_timeouts

PASSED_REQUEST_HEADERS = (
    "accept",
    "accept-encoding",
    "content-encoding",
    "content-type",
    "endpoint-load-metrics-format",
    "inference-header-content-length",
    "triton-request-id",
    *TRACE_CONTEXT,
)
PASSED_RESPONSE_HEADERS = frozenset(
    {
        "accept-encoding",  # of a 415-like answer: the codings Triton knows
        "content-encoding",
        "content-type",
        "endpoint-load-metrics",
        "inference-header-content-length",
        "retry-after",
    }
)
OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"})
"""Answered to anybody: what probes ask has no key with it."""
_JSON = ("Content-Type", "application/json")


class _Error(msgspec.Struct):
    error: str


class _IndexRequest(msgspec.Struct):
    ready: bool = False


class _Statistics(msgspec.Struct):
    model_stats: list[dict[str, msgspec.Raw]]


class KServeFront:
    """Answers everything under `/v2`."""

    def __init__(self, corridor: Corridor) -> None:
        self._corridor = corridor
        self._turns = itertools.count()

    async def handle(self, request: Request, request_id: str, caller: Caller, response: ClientResponse) -> None:
        """Answer one request; of `OPEN_PATHS`, anybody's."""
        path = request.head.raw_path
        asked = parse(path) if path != "/v2/models/stats" else None
        if asked is not None:
            if request.head.method != METHODS[asked.operation]:
                _refuse_method(response, METHODS[asked.operation])
            else:
                await self._pass_on(asked, request, request_id, caller, response)
        elif path == "/v2/models/stats":
            if request.head.method != "GET":
                _refuse_method(response, "GET")
            else:
                await self._statistics(request, request_id, self._corridor.access.view(caller), response)
        elif path == "/v2/repository/index":
            if request.head.method != "POST":
                _refuse_method(response, "POST")
            else:
                await self._index(request, self._corridor.access.view(caller), response)
        elif (reason := why_unsupported(path)) is not None:
            refuse(response, ApiError(501, reason), kserve_body)
        else:
            self._own(path, request, response)

    async def _statistics(self, request: Request, request_id: str, fleet: FleetView, response: ClientResponse) -> None:
        """The statistics of every route's model, each from one of its endpoints, under the route's name."""
        found: list[dict[str, msgspec.Raw]] = []
        given = authorization(request.head.headers)
        for name in tuple(fleet.routes):
            asked = ModelPath(name, "", "stats")
            kept = Collected()
            with (
                Exchange(self._corridor.live, response) as exchange,
                contextlib.suppress(UpstreamError, ApiError, msgspec.MsgspecError),
            ):
                decided = _over_http(plan(view(name, Conversation(), None, 0), fleet))
                sending = Sending(asked, "GET", request_id, (), given, b"", None)
                answer = await open_answer(exchange, decided, sending, self._corridor.fleet)
                if answer.error_body is None:
                    await answer.call.relay(kept)
                    entries = msgspec.json.decode(kept.body, type=_Statistics).model_stats
                    found += [{**entry, "name": msgspec.Raw(msgspec.json.encode(name))} for entry in entries]
        _send_own(response, 200, msgspec.json.encode({"model_stats": found}))

    async def _index(self, request: Request, fleet: FleetView, response: ClientResponse) -> None:
        """The routes that have Triton behind them, as a repository's models."""
        try:
            body = request.body
            body.begin(READ_AHEAD_BYTES)
            said = await _read_ahead(body)
            only_ready = bool(said) and msgspec.json.decode(said, type=_IndexRequest).ready
        except msgspec.MsgspecError as error:
            refuse(response, ApiError(400, f"failed to parse the request JSON buffer: {error}"), kserve_body)
        except ApiError as error:
            refuse(response, error, kserve_body)
        else:
            models = repository_index(fleet, "http", only_ready=only_ready)
            _send_own(response, 200, msgspec.json.encode(models))

    def _own(self, path: str, request: Request, response: ClientResponse) -> None:
        """What the gateway answers itself."""
        if path == "/v2/health/live":
            answer: tuple[int, bytes] | None = (200, b"")
        elif path == "/v2/health/ready":
            answer = (200 if any_servable(self._corridor.fleet.view, "http") else 400, b"")
        elif path == "/v2":
            said = {"name": "headrace", "version": version("headrace"), "extensions": EXTENSIONS}
            answer = (200, msgspec.json.encode(said))
        else:
            answer = None
        if answer is None:
            refuse(response, ApiError(404, "Not Found"), kserve_body)
        elif request.head.method != "GET":
            _refuse_method(response, "GET")
        else:
            _send_own(response, *answer)

    async def _pass_on(
        self, asked: ModelPath, request: Request, request_id: str, caller: Caller, response: ClientResponse
    ) -> None:
        api = API if asked.operation in GENERATING else None
        with Answering(self._corridor, api, request, request_id, response, kserve_body) as exchange:
            request.body.begin(BODY_LIMIT)
            await self._relay(asked, request, request_id, caller, exchange, response)

    async def _relay(
        self,
        asked: ModelPath,
        request: Request,
        request_id: str,
        caller: Caller,
        exchange: Exchange,
        response: ClientResponse,
    ) -> None:
        corridor = self._corridor
        fleet = corridor.access.view(caller)
        exchange.tenant = fleet.tenant
        if asked.model not in fleet.routes:
            raise _unknown(asked)
        body = request.body
        start = await _read_ahead(body)
        conversation, turn = Conversation(), 0
        if asked.operation in GENERATING:
            conversation, turn = _conversation(asked, request, start), next(self._turns)
            if (asked_timeouts := request.head.headers.get(TIMEOUTS_HEADER)) is not None:
                exchange.asked_timeouts = read_timeouts(asked_timeouts)
        fleet = corridor.access.view(caller)  # it may have changed while the body came
        prompt = view(asked.model, conversation, request.head.headers.get("x-session-id"), turn, fleet.salt)
        exchange.route = asked.model
        response.headers += (("x-headrace-route", exchange.route),)
        if fleet.limits is not None and asked.operation in GENERATING:
            route = fleet.route(asked.model)
            cut = len(conversation.prompt) >= RAW_PROMPT_KEY_BYTES
            at_most = max(body.length or 0, body.size) if cut else 0
            response.headers += await corridor.limiter.reserve(exchange, fleet.limits, prompt, route, at_most)
        try:
            decided = _over_http(exchange.decide(prompt, fleet))
        except ApiError:
            if asked.operation == "ready":
                raise _unknown(asked) from None
            raise
        headers = request.head.headers
        if asked.operation in GENERATING:
            waiting = corridor.admission.enter(
                exchange,
                decided,
                lambda: _over_http(plan(prompt, corridor.access.view(caller))),
                fleet.standing.asking(headers.get(PRIORITY_HEADER), headers.get(PREFER_HEADER)),
                size=body.length or body.size,
                kept=body.size,
                answer=None,
            )
            if waiting is not None:
                decided = await waiting
        passed = tuple(passed_headers(headers, PASSED_REQUEST_HEADERS))
        sending = Sending(asked, request.head.method, request_id, passed, authorization(headers), start, body)
        answer = await open_answer(exchange, decided, sending, corridor.fleet)
        body.drop()  # a client that sends all before it reads would never come to the answer
        head, endpoint = answer.head, answer.attempt.endpoint
        exchange.streamed = head.events
        told = tuple((name, value) for name, value in head.headers if name in PASSED_RESPONSE_HEADERS)
        length = None if head.events else head.content_length  # an error may be added to events
        response.start(head.status, (*told, *placement(exchange)), length)
        response.flush_soon()
        if answer.error_body is not None:
            if answer.error_body:
                response.write(answer.error_body)
            response.finish()
            return
        response.follow(answer.call)
        try:
            await answer.call.relay(response)
        except UpstreamError as error:
            corridor.fleet.failed(answer.attempt, error)
            exchange.failed(error)
            exchange.told(error.code)
            if head.events:
                response.write(b"data: %b\n\n" % kserve_body(as_api_error(error)))
                response.finish()
            else:
                response.abort()
        else:
            response.finish()
            if head.status < 400 and asked.operation in GENERATING:
                corridor.fleet.succeeded(endpoint)


async def _read_ahead(body: RequestBody) -> bytes:
    """As much of the body as routing looks at."""
    pieces: list[bytes] = []
    while body.size < READ_AHEAD_BYTES and (piece := await body.read()):
        pieces.append(piece)
    return b"".join(pieces)


def _conversation(asked: ModelPath, request: Request, start: bytes) -> Conversation:
    start = start[:READ_AHEAD_BYTES]
    if asked.operation != "infer":
        return read_generate(start)
    if request.head.headers.get("content-encoding", "identity").lower() != "identity":
        start = inflate_start(start)
    length = request.head.headers.get("inference-header-content-length")
    return read_infer(start, int(length) if length and length.isascii() and length.isdigit() else None)


def _over_http(decided: Plan) -> Plan:
    """The plan without the endpoints that have no HTTP address. Raises a 400 ApiError if none has."""
    decided = decided.only(lambda endpoint: reachable(endpoint, "http"))
    if not decided.attempts:
        raise invalid(
            f"No ready endpoint of {decided.route.name!r} has an `http` address in the fleet: call it over gRPC."
        )
    return decided


def _unknown(asked: ModelPath) -> ApiError:
    """What Triton says of a model it does not have."""
    if asked.operation == "ready":
        return ApiError(400, "Model version not ready")
    if asked.operation == "stats":
        return ApiError(400, f"requested model '{asked.model}' is not available")
    return ApiError(404, f"Request for unknown model: '{asked.model}' is not found")


def kserve_body(error: ApiError) -> bytes:
    """An error in Triton's shape."""
    return msgspec.json.encode(_Error(error.message))


def _send_own(response: ClientResponse, status: int, body: bytes) -> None:
    """Answer without an engine."""
    kind = _JSON if body else ("Content-Type", "text/plain")
    response.send(status, (kind, ("x-headrace-endpoint", NOBODY), ("x-headrace-route", NOBODY)), body)


def _refuse_method(response: ClientResponse, method: str) -> None:
    response.send(405, (_JSON, ("Allow", method)), kserve_body(ApiError(405, "Method Not Allowed")))
