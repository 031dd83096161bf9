"""What a node says of the pods on it: what kind of capacity it is, where, and whether it is about to end.

Clouds tell of a preemption in different ways, and none of them reliably: a taint, a cordon, a kubelet that shuts down.
Each means that the endpoints there should get no new work, which is what counts; whether that is called `draining` or
`preempting` only says how much time is left, and a sign that does not tell why the node goes is taken for a preemption
on a spot node. Cordoning alone is what people do before maintenance, so it only drains.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from k8s import names
from k8s.objects import Node
from router.spec.fleet import CapacityType

NoticePhase = Literal["draining", "preempting"]


@dataclass(slots=True, frozen=True)
class Notice:
    """Why endpoints get no new work."""

    phase: NoticePhase
    why: str
    """For people, as the end of `endpoint X: `."""


@dataclass(slots=True, frozen=True)
class NodeFacts:
    """What is known of a node; of one that is not known, nothing."""

    capacity: CapacityType = "on-demand"
    zone: str | None = None
    instance_type: str | None = None
    gpu: str | None = None
    """Product name of its GPUs."""
    notice: Notice | None = None


def node_facts(node: Node) -> NodeFacts:
    """What `node` says."""
    labels = node.metadata.labels
    spot = any(labels.get(label, "").lower() == value for label, value in names.SPOT_LABELS.items())
    return NodeFacts(
        capacity="spot" if spot else "on-demand",
        zone=_first(labels, names.ZONE_LABELS),
        instance_type=_first(labels, names.INSTANCE_TYPE_LABELS),
        gpu=_first(labels, names.GPU_LABELS),
        notice=_notice(node, spot),
    )


def _first(labels: Mapping[str, str], keys: Iterable[str]) -> str | None:
    return next((labels[key] for key in keys if labels.get(key)), None)


def _notice(node: Node, spot: bool) -> Notice | None:
    name = node.metadata.name
    taints = sorted(taint.key for taint in node.spec.taints)
    disrupted: NoticePhase = "preempting" if spot else "draining"
    for keys, phase in (
        (names.PREEMPTION_TAINTS, "preempting"),
        (names.DISRUPTION_TAINTS, disrupted),
        (names.DRAIN_TAINTS, "draining"),
    ):
        for taint in taints:
            if taint in keys:
                return Notice("preempting" if phase == "preempting" else "draining", f"node {name} has taint {taint}")
    if any(condition.type == "Ready" and condition.status != "True" for condition in node.status.conditions):
        return Notice(disrupted, f"node {name} is not ready")
    if node.metadata.deletion_timestamp is not None:
        return Notice("draining", f"node {name} is being deleted")
    if node.spec.unschedulable:
        return Notice("draining", f"node {name} is cordoned")
    return None
