"""Fleet documents: the pieces of a fleet that sources publish and gateways merge.

A fleet is kept as small documents of four families: endpoints, pools, routes, tenants. Every document names the
**source** that wrote it; a source replaces only its own documents. Where several sources describe the same id, the
fields they set are laid over one another in the order file < discovery < operator < cli, so an operator's `drain` on an
endpoint is one small document that survives every rewrite of the file underneath.
"""

from typing import Literal

import msgspec
from msgspec import field

from router.spec.base import Spec
from router.spec.fleet import EndpointSpec, FleetSpec

ClusterPhase = Literal["starting", "draining", "preempting"]
"""What a cluster says of an endpoint that should get no new requests."""

Family = Literal["endpoints", "pools", "routes", "tenants"]
Source = Literal["file", "discovery", "operator", "cli"]

FAMILIES: tuple[Family, ...] = ("endpoints", "pools", "routes", "tenants")
SOURCES: tuple[Source, ...] = ("file", "discovery", "operator", "cli")
"""From weakest to strongest."""

SCHEMA_VERSION = 1


class GivenEndpoint(EndpointSpec, frozen=True, kw_only=True):
    """An endpoint as people give it: with its pool, and whether it is being drained."""

    pool: str
    drain: bool = False


class EndpointFields(GivenEndpoint, frozen=True, kw_only=True):
    """What an endpoint document holds once merged: the endpoint as it was given, and what its cluster says of it."""

    phase: ClusterPhase | None = None
    why: str = ""
    """Why it is in that phase, for people."""
    instance_type: str | None = None
    gpu: str | None = None
    """Product name of its GPUs."""


class Document(Spec, frozen=True, kw_only=True):
    """One source's words about one id. `spec` is a JSON object, whole or only the fields laid over another's."""

    family: Family
    id: str
    source: Source
    generation: int
    """Orders the writes of one document by one source: a write that is not newer than what is stored is refused.
    Sources that publish all their documents as a whole leave it at 1; what orders those is the publication's mark."""
    spec: msgspec.Raw
    schema: int = SCHEMA_VERSION
    content_hash: str | None = None
    """On `file` documents: the hash of the file they came from."""


class DiscoveryReport(Spec, frozen=True, kw_only=True):
    """What whoever publishes discovered endpoints says of itself every few seconds; without it nobody does."""

    by: str
    """Which replica it is."""
    degraded: list[str] = field(default_factory=list)
    """What is not as it should be, one sentence each: above all, that it no longer hears from the cluster."""


def file_documents(fleet: FleetSpec, *, content_hash: str) -> list[Document]:
    """The documents of a fleet file, as the source `file` publishes them."""

    def document(family: Family, id_: str, spec: object) -> Document:
        raw = msgspec.Raw(msgspec.json.encode(spec))
        return Document(family=family, id=id_, source="file", generation=1, spec=raw, content_hash=content_hash)

    documents = [document("routes", name, route) for name, route in fleet.routes.items()]
    # A tenant's document says which keys it has, be it none: else it would be taken for a mere overlay on another's.
    tenants = {name: {"keys": [], **msgspec.to_builtins(tenant)} for name, tenant in fleet.tenants.items()}
    documents += [document("tenants", name, tenant) for name, tenant in tenants.items()]
    for name, pool in fleet.pools.items():
        documents.append(document("pools", name, msgspec.structs.replace(pool, endpoints=[])))
        for endpoint in pool.endpoints:
            fields = {field: getattr(endpoint, field) for field in endpoint.__struct_fields__}
            documents.append(document("endpoints", endpoint.id, EndpointFields(**fields, pool=name)))
    return documents
