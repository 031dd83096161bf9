"""What the admin API answers with, as types: of these its OpenAPI document is made (`openapi`)."""

from msgspec import Struct

from gateway.admin.view import EndpointRow, RouteRow, TenantRow
from gateway.log_levels import Logger, LogLevel
from router.spec.documents import Source


class EndpointList(Struct, frozen=True):
    endpoints: list[EndpointRow]
    problems: list[str]
    """What is wrong with the documents that describe the fleet."""


class RouteList(Struct, frozen=True):
    routes: list[RouteRow]
    problems: list[str]
    """What is wrong with the documents that describe the fleet."""


class TenantList(Struct, frozen=True):
    tenants: list[TenantRow]
    problems: list[str]
    """What is wrong with the documents that describe the fleet."""


class AddedEndpoint(Struct, frozen=True):
    id: str
    pool: str


class DrainedEndpoint(Struct, frozen=True):
    id: str
    drain: bool
    """Whether it is to get no new requests."""


class RemovedEndpoint(Struct, frozen=True):
    id: str
    removed: bool


class Named(Struct, frozen=True):
    """What was set."""

    name: str


class Removed(Struct, frozen=True):
    name: str
    removed: bool
    still_from: tuple[Source, ...]
    """Who describes it still: it is again as the last of them says. Empty if it is gone."""


class CancelledRequest(Struct, frozen=True):
    id: str
    cancelled: bool


class LoggerList(Struct, frozen=True):
    loggers: list[Logger]
    problems: list[str]


class LevelSpec(Struct, frozen=True):
    """What a logger is to say: what is of this level and above."""

    level: LogLevel
