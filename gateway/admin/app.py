"""The admin API as an aiohttp application, on a port of its own: the handlers of `operations`.

`/healthz`, `/readyz` and `/metrics` are for machines and need no token. Everything else changes or shows the fleet and
needs one, if one is set, in the header `TOKEN_HEADER`; and a client certificate, where the port knows whose. Where
other machines can reach the port and neither is asked for, nobody may use it; and without a token, no web page may.

Names may hold slashes (`org/model`). They may be escaped or not: routes take all of the path up to a verb at its end.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from gateway.admin import MISSING_TOKEN, TOKEN_HEADER, TOKEN_NOT_SET, WRONG_TOKEN, answers
from gateway.admin.changes import add_endpoint, check_removal, drain_endpoint, set_route, set_tenant, undrain_endpoint
from gateway.admin.openapi import document_text
from gateway.admin.operations import OPERATIONS
from gateway.admin.readiness import readiness
from gateway.admin.view import AdminView, endpoint_rows, known_problems, route_rows, tenant_rows
from gateway.configuration import InForce, SettingFilter, list_settings
from gateway.http.errors import error_body
from gateway.live_requests import RequestFilter
from gateway.log_levels import AUDIT, check_logger
from gateway.reload import ReloadError
from router.errors import ApiError, invalid, unavailable
from router.spec.documents import Family, GivenEndpoint
from router.spec.fleet import RouteSpec, TenantSpec
from router.spec.strict import Problem, read_part
from router.spec.units import Name
from router.spec.wording import pattern_of, text_fault
from router.state.errors import StateUnavailable, WriteConflict

BODY_LIMIT = 1024 * 1024
_PATH_CHARACTERS = 400
"""What the log tells of a path: the longest name, escaped, fits."""

_OPEN = frozenset(one.path for one in OPERATIONS if not one.guarded)
_READING = frozenset({"GET", "HEAD", "OPTIONS"})

logger = logging.getLogger(AUDIT)
logger.setLevel(logging.INFO)  # whatever the others may say: who changed what is told

_Spec = TypeVar("_Spec")
_Query = TypeVar("_Query", bound=msgspec.Struct)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def admin_app(
    gateway: AdminView, token: str | None, *, client_certificates: bool = False, exposed: bool = False
) -> web.Application:
    """The admin API of `gateway`; with a `token`, `/admin` is for those only who send it, and with
    `client_certificates` for those only who have shown one that the connection has found good. Without either, and
    `exposed` to other machines, it is for nobody."""
    handlers = _Handlers(gateway)
    checks = [_certificate_check] if client_certificates else []
    if token is not None:
        checks.append(_token_check(token))
    else:
        checks.append(_closed if exposed and not client_certificates else _no_page)
    app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_changes, _errors, *checks])
    for one in OPERATIONS:
        path = one.path.replace("{name}", r"{name:[\s\S]+}")
        handler = getattr(handlers, one.name)
        if one.method == "GET":
            app.router.add_get(path, handler)  # takes HEAD, too
        else:
            app.router.add_route(one.method, path, handler)
    return app


class _Handlers:
    def __init__(self, gateway: AdminView) -> None:
        self._gateway = gateway

    async def healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def readyz(self, _: web.Request) -> web.Response:
        gateway = self._gateway
        state = readiness(
            gateway.lifecycle,
            gateway.fleet,
            gateway.state.status,
            gateway.workers,
            anonymous=gateway.anonymous,
            besides=gateway.degraded(),
        )
        return _json(state, status=200 if state.status == "ready" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encode(self._gateway.registry), headers={"content-type": content_type})

    async def openapi(self, _: web.Request) -> web.Response:
        text = await asyncio.to_thread(document_text)  # which takes a moment the first time
        return web.Response(body=text, content_type="application/json")

    async def list_endpoints(self, _: web.Request) -> web.Response:
        return _json(answers.EndpointList(endpoint_rows(self._gateway), known_problems(self._gateway)))

    async def add_endpoint(self, request: web.Request) -> web.Response:
        endpoint = await _body(request, GivenEndpoint)
        await self._gateway.state.put(add_endpoint(endpoint, self._gateway.state.documents))
        _in_force(endpoint.id in self._gateway.merged.endpoints)
        return _json(answers.AddedEndpoint(endpoint.id, endpoint.pool), status=201)

    async def drain(self, request: web.Request) -> web.Response:
        id_ = request.match_info["name"]
        await self._gateway.state.put(drain_endpoint(id_, self._gateway.state.documents))
        _in_force(self._drains(id_))
        return _json(answers.DrainedEndpoint(id_, drain=True))

    async def undrain(self, request: web.Request) -> web.Response:
        id_ = request.match_info["name"]
        document = undrain_endpoint(id_, self._gateway.state.documents)
        if document is None:
            await self._gateway.state.delete("endpoints", id_, "cli")
        else:
            await self._gateway.state.put(document)
        _in_force(not self._drains(id_))
        return _json(answers.DrainedEndpoint(id_, drain=False))

    async def remove_endpoint(self, request: web.Request) -> web.Response:
        id_ = request.match_info["name"]
        await self._remove("endpoints", id_)
        return _json(answers.RemovedEndpoint(id_, removed=True))

    async def list_routes(self, _: web.Request) -> web.Response:
        return _json(answers.RouteList(route_rows(self._gateway), known_problems(self._gateway)))

    async def set_route(self, request: web.Request) -> web.Response:
        name = _name(request)
        route = await _body(request, RouteSpec)
        document = set_route(name, route, self._gateway.state.documents)
        await self._gateway.state.put(document)
        _in_force(self._gateway.merged.routes.get(name) == route)
        return _json({"name": name})

    async def remove_route(self, request: web.Request) -> web.Response:
        return await self._remove_named("routes", request)

    async def list_tenants(self, _: web.Request) -> web.Response:
        return _json(answers.TenantList(tenant_rows(self._gateway), known_problems(self._gateway)))

    async def set_tenant(self, request: web.Request) -> web.Response:
        name = _name(request)
        tenant = await _body(request, TenantSpec)
        await self._gateway.state.put(set_tenant(name, tenant, self._gateway.state.documents))
        _in_force(self._gateway.merged.tenants.get(name) == tenant)
        return _json({"name": name})

    async def remove_tenant(self, request: web.Request) -> web.Response:
        return await self._remove_named("tenants", request)

    async def list_requests(self, request: web.Request) -> web.Response:
        return _json(await self._gateway.list_requests(_query(request, RequestFilter)))

    async def cancel_request(self, request: web.Request) -> web.Response:
        id_ = request.match_info["name"]
        if not await self._gateway.cancel_request(id_):
            message = f"No open request has the id {id_[:200]!r}; it may have ended."
            raise ApiError(404, message, code="request_not_found")
        return _json(answers.CancelledRequest(id_, cancelled=True))

    async def list_configuration(self, request: web.Request) -> web.Response:
        gateway, wanted = self._gateway, _query(request, SettingFilter)
        spec, origins = gateway.configuration()
        documents, levels = list(gateway.state.documents), dict(gateway.log_levels.changed)
        in_force = InForce(spec, origins, gateway.merged, documents, levels)
        # In a thread: of a fleet of thousands of endpoints it takes longer than requests are to wait.
        return _json(await asyncio.to_thread(list_settings, in_force, wanted, known_problems(gateway)))

    async def list_log_levels(self, _: web.Request) -> web.Response:
        return _json(answers.LoggerList(self._gateway.log_levels.rows(), []))

    async def set_log_level(self, request: web.Request) -> web.Response:
        name, wanted = request.match_info["name"], await _body(request, answers.LevelSpec)
        check_logger(name)
        self._gateway.set_log_level(name, wanted.level)
        logger.info("logger %s is set to %s", name, wanted.level)
        return _json(answers.Named(name))

    async def reset_log_level(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        check_logger(name)
        self._gateway.set_log_level(name, None)
        return _json(answers.Named(name))

    async def reload(self, _: web.Request) -> web.Response:
        try:
            return _json(await self._gateway.reload())
        except ReloadError as error:
            logger.error("not reloaded: %s", error)
            raise ApiError(409, str(error), code="not_reloaded") from None

    async def _remove_named(self, family: Family, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self._remove(family, name)
        return _json(answers.Removed(name, True, self._gateway.merged.sources.get((family, name), ())))

    def _drains(self, id_: str) -> bool:
        endpoint = self._gateway.merged.endpoints.get(id_)
        return endpoint is not None and endpoint.drain

    async def _remove(self, family: Family, id_: str) -> None:
        state = self._gateway.state
        check_removal(family, id_, state.documents, state.status.problems)
        await state.delete(family, id_, "cli")
        _in_force("cli" not in self._gateway.merged.sources.get((family, id_), ()))


def _name(request: web.Request) -> str:
    """The name in the path, of what is to be made."""
    name = request.match_info["name"]
    if fault := text_fault(name, pattern_of(Name)):
        raise invalid(f"`name`: {fault}.", param="name")
    return name


def _in_force(holds: bool) -> None:
    """Raise unless a change that Redis has is in force in this gateway too, whose state waits for it for a moment."""
    if not holds:
        raise unavailable(
            "The change is stored, but not in force in this gateway yet: list what you changed again in a moment, and "
            "look at `/readyz` if it stays away.",
            code="not_in_force_yet",
        )


async def _body(request: web.Request, type_: type[_Spec]) -> _Spec:
    body = await request.read()
    try:
        part, problems = read_part(msgspec.json.decode(body), type_)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"The body is not JSON: {error}.") from None
    if part is None:
        raise invalid(" ".join(map(_sentence, problems)), param=problems[0].path or None, code="invalid_value")
    return part


def _query(request: web.Request, type_: type[_Query]) -> _Query:
    """The query of a request, whose names are all known and given once."""
    given: dict[str, str] = {}
    for name, value in request.query.items():
        if name in given or name not in type_.__struct_fields__:
            what = (
                "is given twice" if name in given else f"is not known; known are {', '.join(type_.__struct_fields__)}"
            )
            raise invalid(f"`{name[:100]}` {what}.", param=name[:100], code="invalid_value")
        given[name] = value
    try:
        return msgspec.convert(given, type_, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        raise invalid(f"`{name}`: {what}.", param=name or None, code="invalid_value") from None


def _sentence(problem: Problem) -> str:
    where = f"`{problem.path}`" if problem.path else "The body"
    return f"{where}: {problem.message}" + ("" if problem.message.endswith("?") else ".")


def _json(content: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _token_check(token: str) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if _is_guarded(request):
            given = request.headers.get(TOKEN_HEADER, "")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()):
                message = "The admin token is not the one this gateway was started with."
                if not given:
                    message = f"The admin API needs its token in the header {TOKEN_HEADER}."
                code = WRONG_TOKEN if given else MISSING_TOKEN
                raise ApiError(401, message, type="authentication_error", code=code)
        return await handler(request)

    return check


@web.middleware
async def _closed(request: web.Request, handler: _Handler) -> web.StreamResponse:
    if _is_guarded(request):
        message = (
            "The admin API can be reached from other machines and this gateway has no token to ask for: start it with "
            "HEADRACE_ADMIN_TOKEN, or have `gateway.admin` listen on 127.0.0.1."
        )
        raise ApiError(403, message, type="authentication_error", code=TOKEN_NOT_SET)
    return await handler(request)


@web.middleware
async def _no_page(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuse what a web page asks for, whose browser tells of it: without a token every page that is open on this
    machine, or where the client certificate is, could change the fleet."""
    if _is_guarded(request) and "origin" in request.headers:
        message = "Web pages may use the admin API with its token only: start the gateway with HEADRACE_ADMIN_TOKEN."
        raise ApiError(403, message, type="authentication_error", code=TOKEN_NOT_SET)
    return await handler(request)


@web.middleware
async def _certificate_check(request: web.Request, handler: _Handler) -> web.StreamResponse:
    if _is_guarded(request) and not request.get_extra_info("peercert"):
        message = "The admin API needs a client certificate (HEADRACE_ADMIN_CERT)."
        raise ApiError(401, message, type="authentication_error", code="missing_client_certificate")
    return await handler(request)


def _is_guarded(request: web.Request) -> bool:
    return unquote(request.path) not in _OPEN


@web.middleware
async def _changes(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Have the log tell who asked for what change, and what came of it."""
    response = await handler(request)
    if request.method not in _READING:
        what = request.method, request.rel_url.raw_path[:_PATH_CHARACTERS], request.remote, response.status
        logger.info("%s %s, asked for by %s: %d", *what)
    return response


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
    return web.Response(body=error_body(error), status=error.status, headers=headers, content_type="application/json")
