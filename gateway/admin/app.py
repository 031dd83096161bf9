"""The admin API as an aiohttp application, on a port of its own.

`/healthz`, `/readyz` and `/metrics` are for machines and need no token. Everything under `/admin` changes or shows the
fleet and needs one, if one is set, in the header `TOKEN_HEADER`.

Names of endpoints and routes may hold slashes (`org/model`). They may be escaped or not: the routes below take all of
the path up to a verb at its end.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from gateway.admin import ENDPOINTS, ROUTES, TOKEN_HEADER
from gateway.admin.changes import (
    NewEndpoint,
    NewRoute,
    add_endpoint,
    check_removal,
    drain_endpoint,
    set_route,
    undrain_endpoint,
)
from gateway.admin.readiness import readiness
from gateway.admin.view import AdminView, EndpointRow, RouteRow
from router.errors import ApiError, invalid, unavailable
from router.spec.units import Name
from router.state.errors import StateUnavailable, WriteConflict

BODY_LIMIT = 1024 * 1024

_Spec = TypeVar("_Spec")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def admin_app(gateway: AdminView, token: str | None) -> web.Application:
    """The admin API of `gateway`; with a `token`, `/admin` is for those only who send it."""
    handlers = _Handlers(gateway)
    app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_errors, _token_check(token)])
    app.add_routes(
        [
            web.get("/healthz", handlers.healthz),
            web.get("/readyz", handlers.readyz),
            web.get("/metrics", handlers.metrics),
            web.get(ENDPOINTS, handlers.list_endpoints),
            web.post(ENDPOINTS, handlers.add_endpoint),
            web.post(ENDPOINTS + "/{name:.+}/drain", handlers.drain),
            web.post(ENDPOINTS + "/{name:.+}/undrain", handlers.undrain),
            web.delete(ENDPOINTS + "/{name:.+}", handlers.remove_endpoint),
            web.get(ROUTES, handlers.list_routes),
            web.put(ROUTES + "/{name:.+}", handlers.set_route),
            web.delete(ROUTES + "/{name:.+}", handlers.remove_route),
        ]
    )
    return app


class _Handlers:
    def __init__(self, gateway: AdminView) -> None:
        self._gateway = gateway

    async def healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def readyz(self, _: web.Request) -> web.Response:
        state = readiness(self._gateway.lifecycle, self._gateway.fleet, self._gateway.state.status)
        return _json(state, status=200 if state.status == "ready" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encode(self._gateway.registry), headers={"content-type": content_type})

    async def list_endpoints(self, _: web.Request) -> web.Response:
        fleet, sources = self._gateway.fleet, self._gateway.merged.sources
        rows = [
            EndpointRow.of(endpoint, fleet.pools[endpoint.pool], sources.get(("endpoints", id_), ()))
            for id_, endpoint in sorted(fleet.endpoints.items())
        ]
        return _json({"endpoints": rows, "problems": fleet.problems})

    async def add_endpoint(self, request: web.Request) -> web.Response:
        endpoint = await _body(request, NewEndpoint)
        document = add_endpoint(endpoint, self._gateway.state.documents, self._gateway.merged)
        await self._gateway.state.put(document)
        return _json({"id": endpoint.id, "pool": endpoint.pool}, status=201)

    async def drain(self, request: web.Request) -> web.Response:
        id_ = request.match_info["name"]
        await self._gateway.state.put(drain_endpoint(id_, self._gateway.state.documents, self._gateway.merged))
        return _json({"id": id_, "drain": True})

    async def undrain(self, request: web.Request) -> web.Response:
        id_ = request.match_info["name"]
        document = undrain_endpoint(id_, self._gateway.state.documents, self._gateway.merged)
        if document is None:
            await self._gateway.state.delete("endpoints", id_, "cli")
        else:
            await self._gateway.state.put(document)
        return _json({"id": id_, "drain": False})

    async def remove_endpoint(self, request: web.Request) -> web.Response:
        id_ = request.match_info["name"]
        check_removal("endpoints", id_, self._gateway.state.documents, self._gateway.merged)
        await self._gateway.state.delete("endpoints", id_, "cli")
        return _json({"id": id_, "removed": True})

    async def list_routes(self, _: web.Request) -> web.Response:
        fleet, sources = self._gateway.fleet, self._gateway.merged.sources
        rows = [RouteRow.of(route, sources.get(("routes", name), ())) for name, route in sorted(fleet.routes.items())]
        return _json({"routes": rows, "problems": fleet.problems})

    async def set_route(self, request: web.Request) -> web.Response:
        name = _convert(request.match_info["name"], Name, "name")
        route = await _body(request, NewRoute)
        await self._gateway.state.put(set_route(name, route, self._gateway.state.documents, self._gateway.merged))
        return _json({"name": name})

    async def remove_route(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        check_removal("routes", name, self._gateway.state.documents, self._gateway.merged)
        await self._gateway.state.delete("routes", name, "cli")
        return _json(
            {"name": name, "removed": True, "still_from": self._gateway.merged.sources.get(("routes", name), ())}
        )


async def _body(request: web.Request, type_: type[_Spec]) -> _Spec:
    body = await request.read()
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise invalid(f"{error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"The body is not JSON: {error}.") from None


def _convert(value: str, type_: Any, param: str) -> str:
    try:
        return str(msgspec.convert(value, type_))
    except msgspec.ValidationError as error:
        raise invalid(f"`{param}`: {error}.", param=param) from None


def _json(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, headers=headers, content_type="application/json"
    )


def _token_check(token: str | None) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if token is not None and unquote(request.path).startswith("/admin"):
            given = request.headers.get(TOKEN_HEADER, "")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()):
                raise ApiError(
                    401, f"The admin API needs its token in the header {TOKEN_HEADER}.",
                    type="authentication_error", code="invalid_admin_token",
                )  # fmt: skip
        return await handler(request)

    return check


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every refusal in the one shape of the API."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(error)
    except StateUnavailable as error:
        return _refusal(unavailable(f"The fleet cannot be changed now: {error}", code="state_unavailable"))
    except WriteConflict as error:
        return _refusal(ApiError(409, f"{error} Try again.", code="conflict"))
    except web.HTTPRequestEntityTooLarge:
        return _refusal(ApiError(413, f"The body is larger than {BODY_LIMIT} bytes.", code="body_too_large"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        refusal = ApiError(405, f"{request.path} takes {allowed}, not {request.method}.", code="method_not_allowed")
        return _refusal(refusal, {"allow": allowed})
    except web.HTTPNotFound:
        return _refusal(ApiError(404, f"The admin API has no {request.path}.", code="not_found"))


def _refusal(error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    if error.retry_after is not None:
        headers = {**(headers or {}), "retry-after": str(error.retry_after)}
    body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return _json({"error": body}, status=error.status, headers=headers)
