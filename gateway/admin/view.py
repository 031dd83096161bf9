"""What the admin API needs of the gateway it belongs to, and what it shows of it.

The seam keeps the admin API free of the gateway's wiring: whatever offers these few attributes can be administered.
"""

from typing import Literal, Protocol

from msgspec import Struct
from prometheus_client import CollectorRegistry

from router.fleet import Endpoint, FleetView, Phase, Pool, Route
from router.merge import MergedFleet
from router.spec.documents import Document, Family, Source
from router.spec.fleet import ADDRESS_OF, CapacityType, Role
from router.spec.fleet import Protocol as EngineProtocol
from router.state.follower import FleetStatus

Lifecycle = Literal["starting", "serving", "draining"]


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


class EndpointRow(Struct, frozen=True):
    """One endpoint, as listed."""

    id: str
    pool: str
    protocol: EngineProtocol
    phase: Phase
    detail: str
    in_flight: int
    sources: tuple[Source, ...]
    role: Role
    capacity: CapacityType
    zone: str | None
    url: str | None
    """Where requests go: an http:// URL, or HOST:PORT of gRPC."""

    @classmethod
    def of(cls, endpoint: Endpoint, pool: Pool, sources: tuple[Source, ...]) -> "EndpointRow":
        spec, state = endpoint.spec, endpoint.state
        url: str | None = getattr(spec, ADDRESS_OF[pool.spec.protocol])
        return cls(
            endpoint.id, pool.name, pool.spec.protocol, endpoint.phase, state.detail, state.in_flight, sources,
            spec.role, spec.capacity, spec.zone, url,
        )  # fmt: skip


class PoolShare(Struct, frozen=True):
    """One pool of a route's split."""

    pool: str
    weight: float


class RouteRow(Struct, frozen=True):
    """One route, as listed."""

    name: str
    pools: tuple[PoolShare, ...]
    fallback: tuple[str, ...]
    ready_endpoints: int
    sources: tuple[Source, ...]

    @classmethod
    def of(cls, route: Route, sources: tuple[Source, ...]) -> "RouteRow":
        shares = tuple(PoolShare(pool.name, weight) for pool, weight in route.pools)
        return cls(route.name, shares, tuple(pool.name for pool in route.fallback), ready_endpoints(route), sources)


def ready_endpoints(route: Route) -> int:
    """How many endpoints could take a request for this route now."""
    ready = {endpoint.id for pool in route.all_pools for endpoint in pool.endpoints if endpoint.phase == "ready"}
    return len(ready)
