"""What of a cluster goes into the fleet's shared state. Pure.

Every pool's endpoints are published together, as all that discovery says, so what it does not find is gone. That makes
one distinction vital: a pool of which nothing is *known*, because its pods have not been listed yet or its
InferencePool cannot be found, keeps what was published of it. A discovery that has just started, or that the API server
does not answer, takes no endpoint away.
"""

from collections.abc import Iterable, Mapping

import msgspec

from k8s.endpoints import Discovered
from k8s.objects import InferencePool
from router.spec.documents import ClusterPhase, Document, EndpointFields
from router.spec.fleet import DiscoverSpec, PoolSpec


class _Pool(msgspec.Struct, frozen=True):
    """Of an endpoint's document, whose it is."""

    pool: str = ""


class TargetError(Exception):
    """Why it is not known which pods a pool has; one sentence for people."""


def publication(found: Mapping[str, Iterable[Discovered] | None], published: Iterable[Document]) -> list[Document]:
    """The documents to publish: what was `found` of each pool, and of those with None what is `published`."""
    documents: dict[str, Document] = {}
    for pool, endpoints in sorted(found.items()):
        for one in endpoints or ():
            documents.setdefault(one.spec.id, _document(pool, one))
    for document in published:
        pool = _pool_of(document)
        if pool in found and found[pool] is None:
            documents.setdefault(document.id, document)
    return [documents[id_] for id_ in sorted(documents)]


def differ(wanted: Iterable[Document], published: Iterable[Document]) -> bool:
    """Whether there is anything to publish."""
    return {one.id: bytes(one.spec) for one in wanted} != {one.id: bytes(one.spec) for one in published}


def targeted(name: str, pool: PoolSpec, discover: DiscoverSpec, there: Iterable[InferencePool]) -> DiscoverSpec:
    """What to discover for pool `name`, with the selector and port of its InferencePool, which is the one `there`. The
    first target port is that of the API that gateways call. Raises `TargetError`."""
    if discover.inference_pool is None:
        return discover
    target = next(iter(there), None)
    if target is None:
        raise TargetError(f"pool {name}: there is no InferencePool {discover.inference_pool}")
    labels = target.spec.selector.match_labels
    if not labels:
        raise TargetError(f"pool {name}: InferencePool {discover.inference_pool} selects every pod; it needs labels")
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    ports = {}
    if target.spec.target_ports and getattr(discover, pool.needed_address) is None:
        ports = {pool.needed_address: target.spec.target_ports[0].number}
    return msgspec.structs.replace(discover, selector=selector, **ports)


def _document(pool: str, one: Discovered) -> Document:
    phase: ClusterPhase | None = None
    if one.standing.phase in ("starting", "draining", "preempting"):
        phase = one.standing.phase
    fields = {name: getattr(one.spec, name) for name in one.spec.__struct_fields__}
    told = EndpointFields(
        **fields, pool=pool, phase=phase, why=one.standing.why, instance_type=one.instance_type, gpu=one.gpu
    )
    raw = msgspec.Raw(msgspec.json.encode(told))
    return Document(family="endpoints", id=one.spec.id, source="discovery", generation=1, spec=raw)


def _pool_of(document: Document) -> str:
    try:
        return msgspec.json.decode(document.spec, type=_Pool).pool
    except msgspec.DecodeError:
        return ""
