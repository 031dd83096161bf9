"""The OpenAI API: from an HTTP request to a dispatched plan.

Each request goes one way through the corridor: find out whose it is, read the body, view the prompt, plan, wait if
every endpoint is full, dispatch.
Whatever is wrong on the way is raised and answered by the frame around it (`gateway.http.answering`), in OpenAI's error
shape; once an answer has begun, the relay itself tells the client within the stream.
"""

import time
from functools import partial

import msgspec

from gateway.corridor import Corridor
from gateway.dispatch import ClientRequest, OpenAnswer, open_answer, relay
from gateway.exchange import Exchange
from gateway.http.answering import Answering, refuse
from gateway.http.client_response import NOBODY, ClientResponse
from gateway.http.connection import Request
from gateway.http.errors import error_body
from gateway.http.kserve import OPEN_PATHS, KServeFront, kserve_body
from gateway.http.passed_headers import TRACE_CONTEXT, authorization, passed_headers
from gateway.http.pings import ping
from gateway.http.placement import placement
from gateway.http.request_head import RequestHead
from gateway.kserve import API as KSERVE
from gateway.metrics import UNKNOWN_ROUTE
from gateway.oidc.callers import Caller, Pending
from gateway.relay.accounting import Account
from gateway.request_ids import is_request_id, new_request_id
from router.admission.standing import PREFER_HEADER, PRIORITY_HEADER
from router.errors import ApiError
from router.fleet import FleetView, Route
from router.plan import plan
from router.prompt import Api, isolate, read_fields, read_prompt
from router.timeouts import TIMEOUTS_HEADER, read_timeouts

APIS: dict[str, Api] = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
}
OPENAPI = "/openapi.json"
"""Where the API is described."""
MODELS = "models"
OTHER = "other"
"""What requests are counted under that no engine answers: for `/v1/models`, and for what is nowhere."""
_JSON = ("Content-Type", "application/json")
_OWN = (("x-headrace-endpoint", NOBODY), ("x-headrace-route", NOBODY))
"""Of what is about no route."""


class Front:
    """The handler of the client-facing HTTP server."""

    def __init__(self, corridor: Corridor, body_limit: int) -> None:
        self._corridor = corridor
        self._body_limit = body_limit
        self._started = int(time.time())
        self._kserve = KServeFront(corridor)

    async def handle(self, request: Request) -> ClientResponse:
        """Answer one request."""
        corridor, head = self._corridor, request.head
        request_id = head.headers.get("x-request-id")
        if request_id is None or not is_request_id(request_id):
            request_id = new_request_id()
        headers = (("x-request-id", request_id),)
        response = ClientResponse(request.connection, head, headers, exposes_routing=corridor.exposes_routing)
        path = head.path
        api = APIS.get(path)
        kserve = path == "/v2" or path.startswith("/v2/")
        caller = corridor.access.caller(head.headers)
        if isinstance(caller, Pending):
            caller = await caller.settled()
        view: FleetView | None = None
        try:
            if head.raw_path not in OPEN_PATHS:
                view = corridor.access.view(caller)
                corridor.overload.admit()
                if corridor.addresses.caps_requests:
                    request.place = corridor.addresses.asked(request.address)
        except ApiError as error:
            shape = kserve_body if kserve else error_body
            with Answering(corridor, KSERVE if kserve else api, request, request_id, response, shape):
                raise error
            if api is None and not kserve:
                self._count(MODELS if _is_models(path) else OTHER, response)
            return response
        if api is not None:
            assert view is not None
            if _allows("POST", head, response):
                await self._generate(api, request, request_id, caller, view, response)
        elif _is_models(path):
            assert view is not None
            if _allows("GET", head, response):
                self._models(path, view, response)
            self._count(MODELS, response)
        elif path == OPENAPI:
            if _allows("GET", head, response):
                from gateway.http.openapi import document_text  # made of what this module holds

                response.send(200, (_JSON, *_OWN), document_text().encode())
            self._count(OTHER, response)
        elif kserve:
            await self._kserve.handle(request, request_id, caller, response)
        else:
            refuse(response, ApiError(404, f"There is no {path[:200]!r} here.", code="unknown_url"), error_body)
            self._count(OTHER, response)
        return response

    def _count(self, api: str, response: ClientResponse) -> None:
        """Count a request that was no engine's business."""
        self._corridor.metrics.requests.values[api, UNKNOWN_ROUTE, response.status] += 1

    async def _generate(
        self, api: Api, request: Request, request_id: str, caller: Caller, view: FleetView, response: ClientResponse
    ) -> None:
        """`view` is the fleet as the caller sees it now."""
        with Answering(self._corridor, api, request, request_id, response, error_body) as exchange:
            answer = await self._open(api, request, request_id, caller, view, exchange, response)
            await relay(exchange, response, answer, self._corridor.fleet)

    async def _open(
        self,
        api: Api,
        request: Request,
        request_id: str,
        caller: Caller,
        view: FleetView,
        exchange: Exchange,
        response: ClientResponse,
    ) -> OpenAnswer:
        """Read, view, plan, wait, and get an engine to answer. The body is let go of on return."""
        corridor, headers = self._corridor, request.head.headers
        came_whole = request.body.arrived
        fields = read_fields(await self._read_body(request))
        if not came_whole:  # the caller may have lost its place meanwhile
            view = corridor.access.view(caller)
        exchange.tenant = view.tenant
        isolate(fields, view.salt)
        prompt = read_prompt(api, fields, headers.get("x-session-id"))
        if prompt.model in view.routes:  # else it is counted under no name that a client makes up
            exchange.route = prompt.model
            response.headers += (("x-headrace-route", exchange.route),)
            if view.limits is not None:
                route = view.routes[prompt.model]
                response.headers += await corridor.limiter.reserve(exchange, view.limits, prompt, route)
        decided = exchange.decide(prompt, view)
        passed = (("x-request-id", request_id), *passed_headers(headers, TRACE_CONTEXT))
        if (asked_timeouts := headers.get(TIMEOUTS_HEADER)) is not None:
            exchange.asked_timeouts = read_timeouts(asked_timeouts)
        gaps = None
        if prompt.stream:
            exchange.ping = partial(_ping, exchange, response)
            gaps = corridor.metrics.gaps.of((api, exchange.route))
        exchange.account = account = Account(shows_usage=prompt.include_usage, gaps=gaps)
        size = request.body.size
        waiting = corridor.admission.enter(
            exchange,
            decided,
            lambda: plan(prompt, corridor.access.view(caller)),
            view.standing.asking(headers.get(PRIORITY_HEADER), headers.get(PREFER_HEADER)),
            size=size,
            kept=size,
            answer=prompt.completion_tokens,
        )
        if waiting is not None:
            decided = await waiting
        asked = ClientRequest(prompt, fields, request_id, passed, authorization(headers), account)
        return await open_answer(exchange, decided, asked, corridor.fleet)

    async def _read_body(self, request: Request) -> bytes:
        """The whole request body. Raises ApiError: 413 over the limit, 408 for a client that stops sending, 400 for
        bytes that are not what their framing says, 415 for a coding: a few bytes of it could keep a core busy for
        long."""
        if request.head.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "Send the request body without Content-Encoding.", code="unsupported_encoding")
        request.body.begin(self._body_limit)
        return await request.body.collect()

    def _models(self, path: str, view: FleetView, response: ClientResponse) -> None:
        """The routes as OpenAI's model list, each with what its engine says of the model."""
        name = path.removeprefix("/v1/models").removeprefix("/")
        if not name:
            entries = [self._model(route) for route in view.routes.values()]
            body = msgspec.json.encode({"object": "list", "data": entries})
        else:
            try:
                body = msgspec.json.encode(self._model(view.route(name)))
            except ApiError as error:
                refuse(response, error, error_body)
                return
        response.send(200, (_JSON, ("x-headrace-endpoint", NOBODY), ("x-headrace-route", _header_value(name))), body)

    def _model(self, route: Route) -> dict[str, object]:
        """A route's entry: its engine's own, if it has one, under the route's name."""
        entry: dict[str, object] = {"object": "model", "created": self._started, "owned_by": "headrace"}
        for pool in route.all_pools:
            known = [msgspec.json.decode(raw, type=dict[str, object]) for raw in self._corridor.fleet.models(pool)]
            if known:
                entry |= next((model for model in known if model.get("id") == pool.spec.model), known[0])
                break
        return entry | {"id": route.name}


def _is_models(path: str) -> bool:
    return path == "/v1/models" or path.startswith("/v1/models/")


def _ping(exchange: Exchange, response: ClientResponse) -> None:
    exchange.streamed = True
    ping(response, placement(exchange))


def _allows(method: str, head: RequestHead, response: ClientResponse) -> bool:
    """Whether a request has the method that its path takes; if not, it has been refused."""
    if head.method == method:
        return True
    response.headers += (("Allow", method),)
    refuse(
        response,
        ApiError(405, f"{head.path} takes {method}, not {head.method}.", code="method_not_allowed"),
        error_body,
    )
    return False


def _header_value(text: str) -> str:
    return text or NOBODY
