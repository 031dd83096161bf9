"""The fleet as the router sees it: an immutable view of who could serve what, plus one mutable state per endpoint.

Documents change rarely and requests come all the time, so each change of the documents is compiled once into a
`FleetView` whose lookups are plain attribute reads: durations already in seconds, references resolved. What changes
from moment to moment, an endpoint's phase, its requests in flight, what its engine turned out to support, lives in an
`EndpointState` that outlives views: a recompiled view picks up the states of the endpoints that are still where they
were, so a configuration change forgets no load and no failure.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from router.admission.limits import TenantLimits
from router.admission.queue import Bounds
from router.admission.standing import Standing
from router.errors import ApiError
from router.merge import MergedFleet
from router.outlier import Outlier
from router.spec.documents import EndpointFields
from router.spec.fleet import PoolSpec, RetentionSpec, TenantSpec
from router.spec.references import ANONYMOUS, address_fault
from router.spec.units import seconds
from router.tenants import KeyIndex, index_keys, limits_of, own_salt
from router.timeouts import Timeouts, timeout_limits

Phase = Literal["starting", "warming", "ready", "draining", "preempting", "unhealthy"]

MAX_IN_FLIGHT = 64
"""Requests at an endpoint of which nobody says how many it works on at a time."""


@dataclass(slots=True)
class EndpointState:
    """What is known of an endpoint right now. Written by dispatch and by the prober, read by plans."""

    phase: Phase = "starting"
    detail: str = "not probed yet"
    """Why the endpoint is in its phase, for people."""
    in_flight: int = 0
    """Those on their way to it included."""
    max_in_flight: float = MAX_IN_FLIGHT
    """Beyond it, requests wait while they may; infinity for no limit."""
    slots: int | None = None
    """How many requests the engine says it works on at a time."""
    capabilities: frozenset[str] | None = None
    """Request parameters the engine can honour, beyond those every engine can; None means all of them."""
    kv_block_tokens: int | None = None
    """Tokens in one KV block, as the engine's metrics say."""
    failed_probes: int = 0
    """Probes in a row that did not come back in time."""
    downs: int = 0
    """How often it turned out that there is nothing at the endpoint's address."""
    outlier: Outlier = field(default_factory=Outlier)
    """What requests have shown of it, whatever probes say."""

    def limit(self, spec: PoolSpec, processes: int) -> None:
        """Set `max_in_flight` to what an endpoint of such a pool may have, for one of so many processes that share
        it."""
        asked = spec.max_in_flight
        if asked == "off":
            self.max_in_flight = math.inf
        else:
            self.max_in_flight = math.ceil((asked or self.slots or MAX_IN_FLIGHT) / processes)


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One serving replica. `key` is its id as bytes, what rendezvous hashing mixes with a conversation's key."""

    id: str
    pool: str
    spec: EndpointFields
    state: EndpointState
    key: bytes

    @property
    def phase(self) -> Phase:
        """The phase that counts: what its cluster says goes before an operator's drain, and both before what probes
        say, unless the endpoint is down, and so does an ejection. What the cluster has not seen ready is starting,
        whatever it answers."""
        state, spec = self.state, self.spec
        if state.phase in ("ready", "warming"):
            if spec.phase is not None:
                return spec.phase
            if spec.drain:
                return "draining"
            if state.outlier.shut:
                return "unhealthy"
        elif spec.phase == "starting":
            return "starting"
        return state.phase

    @property
    def detail(self) -> str:
        """Why the endpoint is in its phase, for people."""
        if self.spec.phase is not None and self.phase == self.spec.phase:
            return self.spec.why
        return self.state.outlier.detail or self.state.detail


@dataclass(slots=True, frozen=True)
class Pool:
    """Interchangeable endpoints that serve `model`, in the order of their ids."""

    name: str
    spec: PoolSpec
    timeouts: Timeouts
    timeout_limits: Timeouts
    """How far a request may go that asks for other timeouts."""
    ping: float
    """Seconds of silence after which a streaming client gets a sign of life; infinity where off."""
    endpoints: tuple[Endpoint, ...]
    key: bytes

    @classmethod
    def of(cls, name: str, spec: PoolSpec, endpoints: Iterable[Endpoint]) -> "Pool":
        """What `spec` comes to."""
        timeouts = Timeouts.of(spec.timeouts)
        limits = timeout_limits(spec, timeouts)
        return cls(name, spec, timeouts, limits, seconds(spec.ping), tuple(endpoints), name.encode())


@dataclass(slots=True, frozen=True)
class Route:
    """A public model name: a split over `pools` by weight, then `fallback` in order."""

    name: str
    pools: tuple[tuple[Pool, float], ...]
    fallback: tuple[Pool, ...]
    retention: RetentionSpec | None = None
    queue: Bounds = field(default_factory=Bounds)
    bytes_per_token: float = 4.0
    """About how many bytes of a prompt make a token."""

    @property
    def all_pools(self) -> tuple[Pool, ...]:
        return (*(pool for pool, _ in self.pools), *self.fallback)


@dataclass(slots=True, frozen=True)
class FleetView:
    """A compiled fleet."""

    pools: dict[str, Pool] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What in the documents could not be used, and why."""
    tenant: str = ""
    """Whose view it is: only with the routes that this tenant may call. Empty for the whole fleet."""
    salt: str = ""
    """What the `cache_salt` of its tenant's requests begins with, so that they share no cached prefix with those of
    others; empty if they may."""
    limits: TenantLimits | None = None
    """Those of its tenant; None if there are none."""
    standing: Standing = field(default_factory=Standing)
    """How its tenant's requests stand among those that wait."""
    any_key: bool = True
    """Where nobody needs a key, any is taken: there is no tenant whose it could be."""
    keys: KeyIndex = field(default_factory=KeyIndex)
    tenants: Mapping[str, "FleetView"] = field(default_factory=dict)
    """The fleet as each tenant sees it."""

    def route(self, model: str) -> Route:
        """The route named by a request's `model`. Raises a 404 `ApiError` that names the routes there are."""
        route = self.routes.get(model)
        if route is None:
            known = ", ".join(sorted(self.routes)[:20]) or "none yet"
            raise ApiError(
                404, f"The model {model[:200]!r} does not exist here. Routes: {known}.",
                param="model", code="model_not_found",
            )  # fmt: skip
        return route


def compile_view(merged: MergedFleet, previous: FleetView) -> FleetView:
    """The view of merged documents; endpoints whose address and pool are as before keep their state."""
    problems = list(merged.problems)
    by_pool: dict[str, list[Endpoint]] = {name: [] for name in merged.pools}
    for id_, fields in sorted(merged.endpoints.items()):
        if fields.pool not in by_pool:
            problems.append(f"endpoint {id_}: there is no pool {fields.pool!r}")
            continue
        if fault := address_fault(fields, merged.pools[fields.pool]):
            problems.append(f"endpoint {id_}: {fault}")
            continue
        before = previous.endpoints.get(id_)
        same = before is not None and _same_server(before.spec, fields) and _same_engine(before, merged, previous)
        state = before.state if before is not None and same else EndpointState()
        by_pool[fields.pool].append(Endpoint(id_, fields.pool, fields, state, id_.encode()))
    pools = {name: Pool.of(name, spec, by_pool[name]) for name, spec in merged.pools.items()}
    routes: dict[str, Route] = {}
    for name, spec in merged.routes.items():
        split = [(p.pool, p.weight) for p in spec.pools] or ([(spec.pool, 1.0)] if spec.pool else [])
        missing = [pool for pool in (*(p for p, _ in split), *spec.fallback) if pool not in pools]
        problems += [f"route {name}: there is no pool {pool!r}" for pool in missing]
        known = tuple((pools[pool], weight) for pool, weight in split if pool in pools)
        fallback = tuple(pools[pool] for pool in spec.fallback if pool in pools)
        if known or fallback:
            routes[name] = Route(name, known, fallback, spec.retention, Bounds.of(spec.queue), spec.bytes_per_token)
    endpoints = {endpoint.id: endpoint for members in by_pool.values() for endpoint in members}
    keys, key_problems = index_keys(merged.tenants)
    problems += key_problems
    problems += [
        f"tenant {name}: there is no route {route!r}"
        for name, tenant in merged.tenants.items()
        for route in tenant.routes
        if route not in routes
    ]
    tenants = {
        name: FleetView(
            pools, _allowed(routes, tenant), endpoints, tenant=name, limits=limits_of(name, tenant),
            salt=own_salt(name) if tenant.isolated else "", standing=Standing(name, tenant.weight, tenant.priority),
        )
        for name, tenant in merged.tenants.items()
    }  # fmt: skip
    any_key = merged.tenants.keys() <= {ANONYMOUS}
    return FleetView(pools, routes, endpoints, tuple(problems), any_key=any_key, keys=keys, tenants=tenants)


def _allowed(routes: dict[str, Route], tenant: TenantSpec) -> dict[str, Route]:
    if not tenant.routes:
        return routes
    return {name: route for name, route in routes.items() if name in tenant.routes}


def _same_server(before: EndpointFields, after: EndpointFields) -> bool:
    return (before.http, before.grpc, before.metrics, before.pool) == (
        after.http,
        after.grpc,
        after.metrics,
        after.pool,
    )


def _same_engine(before: Endpoint, merged: MergedFleet, previous: FleetView) -> bool:
    old, new = previous.pools[before.pool].spec, merged.pools[before.pool]
    return (old.protocol, old.model) == (new.protocol, new.model)
