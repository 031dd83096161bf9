"""The rules of changing a fleet by hand: which document of source `cli` a wish becomes, or why it cannot be.

Only `cli` documents are ever written here. What a file or the cluster's discovery describes cannot be removed by hand,
because its owner would publish it again; it can be drained, which is an overlay. All rules are pure functions of the
documents in force, so two admins who write at once are told by the store (a document's generation), not by a lock.

Every function raises `ApiError` for what is refused.
"""

from typing import Any

import msgspec
from msgspec import field

from router.errors import ApiError, invalid
from router.merge import SINGULAR, MergedFleet, merge
from router.spec.documents import Document, EndpointFields, Family
from router.spec.fleet import RouteSpec, WeightedPool
from router.spec.references import address_fault

WHERE_TO_CHANGE = {
    "file": "take it out of the fleet file and restart a gateway",
    "discovery": "delete its pod or workload, which discovery follows",
    "operator": "change the custom resource that describes it",
}


class NewEndpoint(EndpointFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An endpoint as a person writes it: strict, where the published document is tolerant."""


class NewShare(WeightedPool, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool of a split as a person writes it."""


class NewRoute(RouteSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A route as a person writes it."""

    pools: list[NewShare] = field(default_factory=list)  # type: ignore[assignment]  # nobody appends to it


def add_endpoint(endpoint: NewEndpoint, documents: list[Document], merged: MergedFleet) -> Document:
    """The document that adds an endpoint."""
    there = merged.sources.get(("endpoints", endpoint.id))
    if endpoint.id in merged.endpoints and there:
        raise _conflict(f"There is an endpoint {endpoint.id} already, from {' and '.join(there)}.")
    pool = merged.pools.get(endpoint.pool)
    if pool is None:
        raise _no_pool(endpoint.pool, merged, "pool")
    if fault := address_fault(endpoint, pool.protocol):
        raise invalid(f"Endpoint {endpoint.id} cannot be in pool {endpoint.pool}: {fault}.", param=fault.field)
    spec = msgspec.to_builtins(endpoint)
    del spec["id"]
    return _document("endpoints", endpoint.id, spec, documents)


def drain_endpoint(id_: str, documents: list[Document], merged: MergedFleet) -> Document:
    """The document that drains an endpoint."""
    _must_be_an_endpoint(id_, merged)
    return _document("endpoints", id_, {**_own_fields("endpoints", id_, documents), "drain": True}, documents)


def undrain_endpoint(id_: str, documents: list[Document], merged: MergedFleet) -> Document | None:
    """The document that ends a drain; None when the overlay is to be deleted, which is then all it takes."""
    _must_be_an_endpoint(id_, merged)
    fields = _own_fields("endpoints", id_, documents)
    fields.pop("drain", None)
    below = merge(d for d in documents if d.source != "cli").endpoints.get(id_)
    if below is not None and below.drain:
        fields["drain"] = False
    return _document("endpoints", id_, fields, documents) if fields else None


def check_removal(family: Family, id_: str, documents: list[Document], merged: MergedFleet) -> None:
    """Whether the `cli` document about `id_` may be deleted by a wish to remove `id_` altogether.

    A route set by hand over the file's may be: the file's applies again. A mere drain of the file's endpoint may not:
    the endpoint would not be gone but take traffic again.
    """
    sources = merged.sources.get((family, id_), ())
    own = _own_fields(family, id_, documents)
    others = [source for source in sources if source != "cli"]
    base = bool(own) if family == "routes" else "pool" in own
    if others and not base:
        instead = "; or drain it" if family == "endpoints" else "; or set it to other pools"
        raise _conflict(
            f"The {SINGULAR[family]} {id_} comes from {others[0]}, not from the command line: "
            f"{WHERE_TO_CHANGE[others[0]]}{instead}."
        )
    if "cli" not in sources:
        raise _unknown(family, id_, merged)


def set_route(name: str, route: NewRoute, documents: list[Document], merged: MergedFleet) -> Document:
    """The document that sets a route, whole: nothing of a weaker source's shows through."""
    if (route.pool is None) == (not route.pools):
        raise invalid("A route needs exactly one of `pool` and `pools`.", param="pool")
    for pool in (*([route.pool] if route.pool else []), *(share.pool for share in route.pools), *route.fallback):
        if pool not in merged.pools:
            raise _no_pool(pool, merged, "fallback" if pool in route.fallback else "pool")
    spec: dict[str, Any] = {"fallback": route.fallback}
    if route.pool:
        spec["pool"] = route.pool
    else:
        spec["pools"] = msgspec.to_builtins(route.pools)
    return _document("routes", name, spec, documents)


def _document(family: Family, id_: str, spec: dict[str, Any], documents: list[Document]) -> Document:
    own = _own(family, id_, documents)
    return Document(
        family=family,
        id=id_,
        source="cli",
        generation=own.generation + 1 if own else 1,
        spec=msgspec.Raw(msgspec.json.encode(spec)),
    )


def _own(family: Family, id_: str, documents: list[Document]) -> Document | None:
    return next((d for d in documents if (d.family, d.id, d.source) == (family, id_, "cli")), None)


def _own_fields(family: Family, id_: str, documents: list[Document]) -> dict[str, Any]:
    own = _own(family, id_, documents)
    if own is None:
        return {}
    try:
        return msgspec.json.decode(own.spec, type=dict[str, Any])
    except msgspec.DecodeError:  # written by something else; what is written now replaces it
        return {}


def _must_be_an_endpoint(id_: str, merged: MergedFleet) -> None:
    if id_ not in merged.endpoints:
        raise _unknown("endpoints", id_, merged)


def _unknown(family: Family, id_: str, merged: MergedFleet) -> ApiError:
    known = sorted(merged.endpoints if family == "endpoints" else merged.routes)
    named = SINGULAR[family]
    listed = ", ".join(known[:20]) or "none"
    return ApiError(404, f"There is no {named} {id_[:200]!r}. There are: {listed}.", code=f"{named}_not_found")


def _no_pool(pool: str, merged: MergedFleet, param: str) -> ApiError:
    known = ", ".join(sorted(merged.pools)[:20]) or "none"
    return invalid(f"There is no pool {pool[:200]!r}. There are: {known}.", param=param, code="pool_not_found")


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, code="conflict")
