"""What the admin API needs of the gateway it belongs to, and what it shows of it.

The seam keeps the admin API free of the gateway's wiring: whatever offers these few attributes can be administered.
"""

from typing import Literal, Protocol

from msgspec import Struct
from prometheus_client import CollectorRegistry

from gateway.configuration import Origins
from gateway.live_requests import RequestFilter, RequestList
from gateway.log_levels import LogLevel, LogLevels
from gateway.reload import Reloaded
from router.fleet import Endpoint, FleetView, Phase, Pool, Route
from router.merge import SINGULAR, MergedFleet, merge
from router.spec.documents import Document, Family, Source
from router.spec.fleet import CapacityType, FleetSpec, KeySpec, LimitSpec, Priority, Role
from router.spec.fleet import Protocol as EngineProtocol
from router.state.follower import FleetStatus

Lifecycle = Literal["starting", "serving", "draining"]


class Workers(Struct, frozen=True):
    """How many processes a gateway has."""

    configured: int
    serving: int
    draining: int = 0
    """Those of former generations, which finish their streams."""


class StateView(Protocol):
    """The shared fleet documents; `router.state.fleet.FleetState` is one."""

    @property
    def documents(self) -> list[Document]: ...
    @property
    def status(self) -> FleetStatus: ...
    async def put(self, document: Document) -> None: ...
    async def delete(self, family: Family, id_: str, source: Source) -> None: ...


class AdminView(Protocol):
    """A gateway, as its admin API sees it."""

    @property
    def lifecycle(self) -> Lifecycle: ...
    @property
    def fleet(self) -> FleetView:
        """The fleet in force."""

    @property
    def merged(self) -> MergedFleet:
        """What `fleet` was compiled from."""

    @property
    def state(self) -> StateView: ...
    @property
    def registry(self) -> CollectorRegistry:
        """Whose metrics `/metrics` shows."""

    @property
    def workers(self) -> Workers | None:
        """None for a gateway of one process."""

    @property
    def anonymous(self) -> bool:
        """Whether it answers those who have no key."""

    def degraded(self) -> list[str]:
        """What is not as it should be, besides what its fleet and its state show."""

    async def reload(self) -> Reloaded:
        """Read the fleet file again and take over what can be. Raises ReloadError."""

    def drained(self, endpoint: Endpoint) -> bool:
        """Whether an endpoint that is to drain has no requests of this gateway left, and will get none."""

    async def list_requests(self, wanted: RequestFilter) -> RequestList:
        """The open requests, of all its processes."""

    def configuration(self) -> tuple[FleetSpec, Origins]:
        """What it was started with, or has read again; the fleet in force is in `merged`."""

    @property
    def log_levels(self) -> LogLevels:
        """Those of the process that serves the admin API; what is changed there is changed in all."""

    def set_log_level(self, name: str, level: LogLevel | None) -> None:
        """As `LogLevels.set_or_reset`, of a logger that was checked, in all its processes."""

    async def cancel_request(self, id_: str) -> bool:
        """As `gateway.live_requests.cancel_request`, in whichever process it is. Raises a 503 ApiError if one that may
        have it does not answer."""


class EndpointRow(Struct, frozen=True, kw_only=True):
    """One endpoint, as listed; of one that is not in the fleet little is known."""

    id: str
    pool: str | None = None
    protocol: EngineProtocol | None = None
    phase: Phase | Literal["unusable"]
    """`unusable`: there are documents about it, but they make no endpoint of this fleet."""
    drain: Literal["draining", "drained"] | None = None
    """Whatever the phase: it gets no new requests; `drained` when this gateway has none in flight there."""
    detail: str
    in_flight: int = 0
    sources: tuple[Source, ...]
    role: Role | None = None
    capacity: CapacityType | None = None
    zone: str | None = None
    url: str | None = None
    """Where requests go: an http:// URL, or HOST:PORT of gRPC."""


class PoolShare(Struct, frozen=True):
    """One pool of a route's split."""

    pool: str
    weight: float


class RouteRow(Struct, frozen=True, kw_only=True):
    """One route, as listed."""

    name: str
    pools: tuple[PoolShare, ...] = ()
    fallback: tuple[str, ...] = ()
    ready_endpoints: int = 0
    sources: tuple[Source, ...]
    problem: str | None = None
    """Why it is not in the fleet, although there are documents about it."""


class TenantRow(Struct, frozen=True, kw_only=True):
    """One tenant, as listed."""

    name: str
    keys: tuple[KeySpec, ...] = ()
    """Known by their hashes, as everywhere."""
    routes: tuple[str, ...] = ()
    """Empty for all."""
    isolated: bool = True
    limits: LimitSpec = LimitSpec()
    route_limits: dict[str, LimitSpec] = {}
    priority: Priority = "standard"
    weight: float = 1.0
    sources: tuple[Source, ...]
    problem: str | None = None
    """What is wrong with it, or with the documents about it."""


def endpoint_rows(gateway: AdminView) -> list[EndpointRow]:
    """Every endpoint that documents speak of, by id."""
    fleet, described = gateway.fleet, merge(gateway.state.documents)
    rows: list[EndpointRow] = []
    for id_, sources in _ids(described, "endpoints"):
        endpoint = fleet.endpoints.get(id_)
        if endpoint is None:
            why = _why_unusable("endpoints", id_, id_ in described.endpoints, known_problems(gateway))
            rows.append(EndpointRow(id=id_, phase="unusable", detail=why, sources=sources))
        else:
            rows.append(_endpoint_row(endpoint, fleet.pools[endpoint.pool], sources, gateway.drained(endpoint)))
    return rows


def route_rows(gateway: AdminView) -> list[RouteRow]:
    """Every route that documents speak of, by name."""
    fleet, described = gateway.fleet, merge(gateway.state.documents)
    rows: list[RouteRow] = []
    for name, sources in _ids(described, "routes"):
        route = fleet.routes.get(name)
        if route is None:
            why = _why_unusable("routes", name, name in described.routes, known_problems(gateway))
            rows.append(RouteRow(name=name, sources=sources, problem=why))
        else:
            rows.append(
                RouteRow(
                    name=name,
                    pools=tuple(PoolShare(pool.name, weight) for pool, weight in route.pools),
                    fallback=tuple(pool.name for pool in route.fallback),
                    ready_endpoints=ready_endpoints(route),
                    sources=sources,
                )
            )
    return rows


def tenant_rows(gateway: AdminView) -> list[TenantRow]:
    """Every tenant that documents speak of, by name."""
    described, problems = merge(gateway.state.documents), known_problems(gateway)
    rows: list[TenantRow] = []
    for name, sources in _ids(described, "tenants"):
        spec = described.tenants.get(name)
        if spec is None:
            rows.append(TenantRow(name=name, sources=sources, problem=_why_unusable("tenants", name, False, problems)))
        else:
            rows.append(
                TenantRow(
                    name=name,
                    keys=tuple(spec.keys),
                    routes=tuple(spec.routes),
                    isolated=spec.isolated,
                    limits=spec.limits,
                    route_limits=spec.route_limits,
                    priority=spec.priority,
                    weight=spec.weight,
                    sources=sources,
                    problem=_said_of(f"tenant {name}", problems),
                )
            )
    return rows


def known_problems(gateway: AdminView) -> list[str]:
    """What is wrong with the documents, each once: with reading, merging and compiling them."""
    problems = (*gateway.state.status.problems, *merge(gateway.state.documents).problems, *gateway.fleet.problems)
    return list(dict.fromkeys(problems))


def ready_endpoints(route: Route) -> int:
    """How many endpoints could take a request for this route now."""
    ready = {endpoint.id for pool in route.all_pools for endpoint in pool.endpoints if endpoint.phase == "ready"}
    return len(ready)


def no_requests_left(endpoint: Endpoint) -> bool:
    """Whether an endpoint that is to drain has none of the requests counted in its state left."""
    return endpoint.spec.drain and not endpoint.state.in_flight


def _endpoint_row(endpoint: Endpoint, pool: Pool, sources: tuple[Source, ...], drained: bool) -> EndpointRow:
    spec, state = endpoint.spec, endpoint.state
    details = ["drained, safe to stop once every gateway says so" if drained else "", endpoint.detail]
    return EndpointRow(
        id=endpoint.id,
        pool=pool.name,
        protocol=pool.spec.protocol,
        phase=endpoint.phase,
        drain=("drained" if drained else "draining") if spec.drain else None,
        detail="; ".join(filter(None, details)),
        in_flight=state.in_flight,
        sources=sources,
        role=spec.role,
        capacity=spec.capacity,
        zone=spec.zone,
        url=getattr(spec, pool.spec.needed_address),
    )


def _ids(described: MergedFleet, family: Family) -> list[tuple[str, tuple[Source, ...]]]:
    return sorted((id_, sources) for (one, id_), sources in described.sources.items() if one == family)


def _why_unusable(family: Family, id_: str, converts: bool, problems: list[str]) -> str:
    if said := _said_of(f"{SINGULAR[family]} {id_}", problems):
        return said
    if converts:
        return "this gateway could not take it over; its log says why"
    return "what described it is gone, only what was laid over it is left; `remove` clears that"


def _said_of(name: str, problems: list[str]) -> str | None:
    """The first problem with `name`: they begin with what they are about."""
    for problem in problems:
        if problem.startswith((f"{name}:", f"{name} ")):
            return problem.removeprefix(name).lstrip(": ")
    return None
