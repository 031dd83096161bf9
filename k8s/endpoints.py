"""From pods and nodes to a pool's endpoints. Pure, so that what is published follows from what is there, and from
nothing else: whoever discovers, whenever, finds the same.

A pod is an endpoint. The pods of a LeaderWorkerSet's group are *one* endpoint, its leader: only the leader listens, and
tensor and pipeline parallelism need every pod. So what is true of one is true of the group: a worker that is being
deleted drains it, one on a node that is preempted preempts it, and while one is missing or not ready the group is
starting. That needs a selector that finds the workers too; one that finds leaders only leaves every group `starting`,
and its reason says so, which is better than to call a half of an engine ready.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash
from msgspec import structs

from k8s import names
from k8s.nodes import NodeFacts
from k8s.objects import Pod
from k8s.pods import BADNESS, PodError, Standing, endpoint_spec, said, standing, worst
from router.spec.fleet import DiscoverSpec, EndpointSpec, Protocol

_LONGEST_ID = 128
_UNKNOWN = NodeFacts()


@dataclass(slots=True, frozen=True)
class Discovered:
    """One endpoint as the cluster has it. Its standing is never `gone`: what is gone is not there."""

    spec: EndpointSpec
    standing: Standing
    instance_type: str | None
    gpu: str | None


@dataclass(slots=True, frozen=True)
class Found:
    """What pods come to, in the order of the ids, and why some come to nothing although they should."""

    endpoints: tuple[Discovered, ...]
    problems: tuple[str, ...]


def find_endpoints(
    pool: str,
    protocol: Protocol,
    model: str,
    discover: DiscoverSpec,
    pods: Iterable[Pod],
    nodes: Mapping[str, NodeFacts],
) -> Found:
    """The endpoints of `pool` among `pods`, which are those its selector finds; `nodes` by name."""
    alone: list[list[Pod]] = []
    groups: dict[tuple[str, str, str], list[Pod]] = {}
    for pod in pods:
        labels = pod.metadata.labels
        if names.LWS_WORKER in labels:
            key = pod.metadata.namespace, labels.get(names.LWS_NAME, ""), labels.get(names.LWS_GROUP, "")
            groups.setdefault(key, []).append(pod)
        else:
            alone.append([pod])
    endpoints: list[Discovered] = []
    problems: list[str] = []
    for members in (*alone, *groups.values()):
        members.sort(key=lambda one: one.metadata.name)  # of two reasons the same one is told, however they came
        leader = _leader(members)
        if leader is None:
            continue  # a group whose leader is not there yet, or has ended
        together = worst([
            standing(leader),
            *(_of_worker(one) for one in members if one is not leader),
            *(_of_node(one, nodes) for one in members),
            *_missing(leader, members),
        ])  # fmt: skip
        if together.phase == "gone" or leader.status.pod_ip is None:
            continue
        try:
            spec = endpoint_spec(leader, endpoint_id(pool, leader, discover), protocol, model, discover)
        except PodError as error:
            problems.append(f"pool {pool}: {error}")
            continue
        on = [nodes.get(one.spec.node_name or "", _UNKNOWN) for one in members]
        facts = nodes.get(leader.spec.node_name or "", _UNKNOWN)
        spec = structs.replace(
            spec,
            nodes=max(_size(leader) or len(members), 1),
            capacity="spot" if any(one.capacity == "spot" for one in on) else "on-demand",
            zone=facts.zone,
        )
        endpoints.append(Discovered(spec, together, facts.instance_type, facts.gpu))
    endpoints.sort(key=lambda one: one.spec.id)
    return Found(tuple(endpoints), tuple(sorted(problems)))


def endpoint_id(pool: str, pod: Pod, discover: DiscoverSpec) -> str:
    """`POOL/POD`, or `POOL/NAMESPACE/POD` where the pool's pods may be in several namespaces.

    The pool is part of it, since a server with two models is an endpoint of two pools.
    """
    where = f"{pod.metadata.namespace}/" if discover.namespace == "*" else ""
    id_ = f"{pool}/{where}{pod.metadata.name}"
    if len(id_) <= _LONGEST_ID:
        return id_
    digest = xxhash.xxh3_64_hexdigest(id_.encode())
    return f"{id_[: _LONGEST_ID - len(digest) - 1]}-{digest}"


def _leader(members: list[Pod]) -> Pod | None:
    """The pod that listens. Of two, as while one takes the other's place, the one that is better off."""
    leaders = [one for one in members if one.metadata.labels.get(names.LWS_WORKER, "0") == "0"]
    return min(leaders, key=lambda one: (BADNESS[standing(one).phase], one.metadata.name), default=None)


def _of_worker(pod: Pod) -> Standing:
    """What a worker's standing is to its group: one that has ended will be there again, or the group will go."""
    own = standing(pod)
    return Standing("starting", own.why) if own.phase == "gone" else own


def _of_node(pod: Pod, nodes: Mapping[str, NodeFacts]) -> Standing:
    notice = nodes.get(pod.spec.node_name or "", _UNKNOWN).notice
    return Standing(notice.phase, notice.why) if notice is not None else Standing("ready")


def _missing(leader: Pod, members: list[Pod]) -> list[Standing]:
    size = _size(leader)
    if size is None or len(members) >= size:
        return []
    also = "; the pool's selector must find workers too" if len(members) == 1 else ""
    return [Standing("starting", f"{len(members)} of its group's {size} pods are there{also}")]


def _size(leader: Pod) -> int | None:
    size = said(leader, names.LWS_SIZE) or ""
    return int(size) if size.isascii() and size.isdigit() and len(size) < 6 else None
