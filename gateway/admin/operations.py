"""Every operation of the admin API: its routes (`app`) and its OpenAPI document (`openapi`) are made of this table.

A path's `{name}` may hold slashes, escaped or not. What is under `/admin` is guarded; the rest is for machines and
open: probes and scrapes carry no token.
"""

from dataclasses import dataclass, field

from gateway.admin import CONFIGURATION, ENDPOINTS, LOG_LEVELS, OPENAPI, RELOAD, REQUESTS, ROUTES, TENANTS
from gateway.admin import answers as a
from gateway.admin.readiness import Readiness
from gateway.configuration import SettingFilter, SettingList
from gateway.live_requests import RequestFilter, RequestList
from gateway.reload import Reloaded
from router.spec.documents import GivenEndpoint
from router.spec.fleet import RouteSpec, TenantSpec

TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    name: str
    """Of its handler, and in the document."""
    summary: str
    answer: object
    """The type of its answer, which is JSON; or a media type, for text; or `dict`."""
    status: int = 200
    body: type | None = None
    query: type | None = None
    also: tuple[int, ...] = ()
    """Other statuses of the same answer."""
    refusals: tuple[int, ...] = ()
    """Statuses of `gateway.http.errors.Error`, besides those that any request may get."""
    names_what_is_made: bool = field(default=False)
    """The name in its path becomes that of something new, and has to be one."""

    @property
    def guarded(self) -> bool:
        return self.path.startswith("/admin")


_CHANGES = (409, 503)
"""What may be said to a change: it does not go with what is there, or Redis cannot be written to."""

OPERATIONS = (
    Operation("GET", "/healthz", "healthz", "Whether the process lives.", TEXT),
    Operation("GET", "/readyz", "readyz", "Whether it should get traffic, and what ails it.", Readiness, also=(503,)),
    Operation("GET", "/metrics", "metrics", "Metrics, for Prometheus.", TEXT),
    Operation("GET", OPENAPI, "openapi", "This document.", dict),
    Operation("GET", ENDPOINTS, "list_endpoints", "Every endpoint, its phase and its load.", a.EndpointList),
    Operation(
        "POST", ENDPOINTS, "add_endpoint", "Add an endpoint to a pool.", a.AddedEndpoint,
        status=201, body=GivenEndpoint, refusals=_CHANGES,
    ),
    Operation(
        "POST", ENDPOINTS + "/{name}/drain", "drain", "Send an endpoint no new requests.", a.DrainedEndpoint,
        refusals=(404, *_CHANGES),
    ),
    Operation(
        "POST", ENDPOINTS + "/{name}/undrain", "undrain", "Let a drained endpoint take requests again.",
        a.DrainedEndpoint, refusals=(404, *_CHANGES),
    ),
    Operation(
        "DELETE", ENDPOINTS + "/{name}", "remove_endpoint", "Remove an endpoint that was added here.",
        a.RemovedEndpoint, refusals=(404, *_CHANGES),
    ),
    Operation("GET", ROUTES, "list_routes", "Every route and its pools.", a.RouteList),
    Operation(
        "PUT", ROUTES + "/{name}", "set_route", "Set what a route leads to, whole.", a.Named,
        body=RouteSpec, refusals=_CHANGES, names_what_is_made=True,
    ),
    Operation(
        "DELETE", ROUTES + "/{name}", "remove_route", "Remove a route that was set here.", a.Removed,
        refusals=(404, *_CHANGES),
    ),
    Operation("GET", TENANTS, "list_tenants", "Every tenant, and its keys by their hashes.", a.TenantList),
    Operation(
        "PUT", TENANTS + "/{name}", "set_tenant", "Set a tenant and its keys, whole.", a.Named,
        body=TenantSpec, refusals=_CHANGES, names_what_is_made=True,
    ),
    Operation(
        "DELETE", TENANTS + "/{name}", "remove_tenant", "Remove a tenant that was set here.", a.Removed,
        refusals=(404, *_CHANGES),
    ),
    Operation(
        "GET", REQUESTS, "list_requests", "The open requests, oldest first.", RequestList, query=RequestFilter
    ),
    Operation(
        "DELETE", REQUESTS + "/{name}", "cancel_request", "End an open request: its engine and its client are told.",
        a.CancelledRequest, refusals=(404, 503),
    ),
    Operation("GET", LOG_LEVELS, "list_log_levels", "The loggers that have a level of their own.", a.LoggerList),
    Operation(
        "PUT", LOG_LEVELS + "/{name}", "set_log_level", "Have a logger say more or less, until the gateway ends.",
        a.Named, body=a.LevelSpec, refusals=(404, 409),
    ),
    Operation(
        "DELETE", LOG_LEVELS + "/{name}", "reset_log_level", "Have a logger say what it said at the start.", a.Named,
        refusals=(404, 409),
    ),
    Operation(
        "GET", CONFIGURATION, "list_configuration", "The configuration in force, and where each value comes from.",
        SettingList, query=SettingFilter,
    ),
    Operation("POST", RELOAD, "reload", "Read the fleet file again.", Reloaded, refusals=(409,)),
)  # fmt: skip
