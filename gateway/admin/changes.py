"""The rules of changing a fleet by hand: which document of source `cli` a wish becomes, or why it cannot be.

Only `cli` documents are ever written here. What a file or the cluster's discovery describes cannot be removed by hand,
because its owner would publish it again; it can be drained, which is an overlay. All rules are pure functions of the
documents in force, not of the fleet compiled from them, which lacks what could not be used. Two admins who write at
once are told by the store (a document's generation), not by a lock.

Every function raises `ApiError` for what is refused.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from router.errors import ApiError, invalid
from router.merge import SINGULAR, MergedFleet, merge
from router.spec.documents import Document, Family, GivenEndpoint
from router.spec.fleet import RouteSpec, TenantSpec
from router.spec.references import Addresses, Fault, address_fault, no_pool, route_findings, tenant_findings
from router.spec.strict import path_text

WHERE_TO_CHANGE = {
    "file": "take it out of the fleet file and restart a gateway",
    "discovery": "delete its pod or workload, which discovery follows",
    "operator": "change the custom resource that describes it",
}


def add_endpoint(endpoint: GivenEndpoint, documents: list[Document]) -> Document:
    """The document that adds an endpoint."""
    merged = merge(documents)
    if endpoint.id in merged.endpoints:
        sources = merged.sources["endpoints", endpoint.id]
        raise _conflict(f"There is an endpoint {endpoint.id} already, from {' and '.join(sources)}.")
    pool = merged.pools.get(endpoint.pool)
    if pool is None:
        raise _refused(Fault("pool", no_pool(endpoint.pool, merged.pools)), code="pool_not_found")
    if fault := address_fault(endpoint, pool):
        raise _refused(fault)
    addresses = Addresses()
    for other in merged.endpoints.values():
        if other.pool in merged.pools:
            list(addresses.take(other, merged.pools[other.pool].model))
    if fault := next(addresses.take(endpoint, pool.model), None):
        raise _refused(fault)
    spec = msgspec.to_builtins(endpoint)
    del spec["id"]
    return _document("endpoints", endpoint.id, spec, documents)


def drain_endpoint(id_: str, documents: list[Document]) -> Document:
    """The document that drains an endpoint."""
    _must_be_an_endpoint(id_, merge(documents))
    return _document("endpoints", id_, {**_own_fields("endpoints", id_, documents), "drain": True}, documents)


def undrain_endpoint(id_: str, documents: list[Document]) -> Document | None:
    """The document that ends a drain; None when the overlay is to be deleted, which is then all it takes."""
    _must_be_an_endpoint(id_, merge(documents))
    fields = _own_fields("endpoints", id_, documents)
    fields.pop("drain", None)
    below = merge(d for d in documents if d.source != "cli").endpoints.get(id_)
    if below is not None and below.drain:
        fields["drain"] = False
    return _document("endpoints", id_, fields, documents) if fields else None


def check_removal(family: Family, id_: str, documents: list[Document], problems: Collection[str]) -> None:
    """Whether the `cli` document about `id_` may be deleted by a wish to remove `id_` altogether.

    A route or tenant set by hand over the file's may be: the file's applies again. A mere drain of the file's endpoint
    may not: the endpoint would not be gone but take traffic again. A document that cannot be used may always be:
    whether merging left it out, or whether it could not even be read from Redis, of which the state's `problems` tell.
    """
    own = _own(family, id_, documents)
    others = [d.source for d in documents if (d.family, d.id) == (family, id_) and d.source != "cli"]
    a_mere_drain = family == "endpoints" and _own_fields(family, id_, documents).keys() == {"drain"}
    if own is not None and not (others and a_mere_drain):
        return
    if any(problem.startswith(f"The document {f'cli/{id_}'!r} of {family} in Redis ") for problem in problems):
        return
    if not others:
        raise _unknown(family, id_, merge(documents))
    instead = {"endpoints": "; or drain it", "routes": "; or set it to other pools"}.get(family, "; or set it anew")
    raise _conflict(
        f"The {SINGULAR[family]} {id_} comes from {others[0]}, not from the command line: "
        f"{WHERE_TO_CHANGE[others[0]]}{instead}."
    )


def set_route(name: str, route: RouteSpec, documents: list[Document]) -> Document:
    """The document that sets a route, whole: nothing of a weaker source's shows through."""
    for finding in route_findings((), route, merge(documents).pools):
        where = path_text(finding.path)
        text = f"`{where}`: {finding.message}." if where else f"The route {finding.message}."
        raise invalid(text, param=where or "pool", code="invalid_route")
    spec = {field: msgspec.to_builtins(getattr(route, field)) for field in ("fallback", "queue", "bytes_per_token")}
    if route.pool:
        spec["pool"] = route.pool
    else:
        spec["pools"] = msgspec.to_builtins(route.pools)
    return _document("routes", name, spec, documents)


def set_tenant(name: str, tenant: TenantSpec, documents: list[Document]) -> Document:
    """The document that sets a tenant, whole: with every field, so that nothing of a weaker source's shows through and
    nothing is allowed by being left out when that source is gone."""
    merged = merge(documents)
    for finding in tenant_findings((), tenant, merged.routes):
        where = path_text(finding.path) or "keys"
        raise invalid(f"`{where}`: {finding.message}.", param=where, code="invalid_tenant")
    held = {key.sha256: other for other, spec in merged.tenants.items() if other != name for key in spec.keys}
    for index, key in enumerate(tenant.keys):
        if (holder := held.get(key.sha256)) is not None:
            where = f"keys[{index}].sha256"
            raise invalid(f"`{where}`: this key is tenant {holder}'s already.", param=where, code="invalid_tenant")
    spec = {field: msgspec.to_builtins(getattr(tenant, field)) for field in tenant.__struct_fields__}
    return _document("tenants", name, spec, documents)


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
    there: dict[Family, Collection[str]] = {
        "endpoints": merged.endpoints, "pools": merged.pools, "routes": merged.routes, "tenants": merged.tenants,
    }  # fmt: skip
    known = sorted(there[family])
    named = SINGULAR[family]
    listed = ", ".join(known[:20]) or "none"
    return ApiError(404, f"There is no {named} {id_[:200]!r}. There are: {listed}.", code=f"{named}_not_found")


def _refused(fault: Fault, code: str = "invalid_endpoint") -> ApiError:
    return invalid(f"{fault}.", param=fault.field, code=code)


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, code="conflict")
