"""Objects as a Kubernetes API server gives them, in JSON, with only what a test says of them."""

from typing import Any

import msgspec

from k8s.objects import Node, Pod

LWS = "leaderworkerset.sigs.k8s.io"


def pod_json(
    name: str = "engine-0",
    *,
    namespace: str = "llm",
    ip: str | None = "10.0.0.1",
    node: str | None = "n1",
    phase: str = "Running",
    ready: bool | None = True,
    deleted: bool = False,
    disruption: str | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    ports: dict[str, int] | None = None,
    waiting: str | None = None,
    restarts: int = 0,
    resource_version: str = "1",
) -> dict[str, Any]:
    """A pod."""
    conditions: list[dict[str, Any]] = [{"type": "PodScheduled", "status": "True", "lastProbeTime": None}]
    if ready is not None:
        conditions.append({"type": "Ready", "status": "True" if ready else "False"})
    if disruption is not None:
        conditions.append({"type": "DisruptionTarget", "status": "True", "reason": disruption})
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "uid": f"uid of {name}"}
    metadata |= {"resourceVersion": resource_version, "creationTimestamp": "2026-11-30T20:00:00Z"}
    if labels:
        metadata["labels"] = labels
    if annotations:
        metadata["annotations"] = annotations
    if deleted:
        metadata |= {"deletionTimestamp": "2026-11-30T21:00:00Z", "deletionGracePeriodSeconds": 300}
    container: dict[str, Any] = {
        "name": "engine",
        "image": "engine:1",
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    if ports:
        container["ports"] = [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in ports.items()]
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {"startedAt": "2026-11-30T20:00:01Z"}}
    status: dict[str, Any] = {
        "phase": phase,
        "conditions": conditions,
        "containerStatuses": [{"name": "engine", "restartCount": restarts, "state": state, "ready": bool(ready)}],
    }
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    spec: dict[str, Any] = {"containers": [container]}
    if node is not None:
        spec["nodeName"] = node
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def group_pod_json(
    index: int, *, group: int = 0, size: int | None = 2, lws: str = "big", **rest: Any
) -> dict[str, Any]:
    """A pod of a LeaderWorkerSet's group; index 0 is the leader."""
    name = f"{lws}-{group}" if index == 0 else f"{lws}-{group}-{index}"
    labels = {f"{LWS}/name": lws, f"{LWS}/group-index": str(group), f"{LWS}/worker-index": str(index)}
    annotations = {f"{LWS}/size": str(size)} if size is not None else {}
    rest["annotations"] = {**annotations, **rest.get("annotations", {})}
    return pod_json(name, labels={**labels, **rest.pop("labels", {})}, **rest)


def node_json(
    name: str = "n1",
    *,
    labels: dict[str, str] | None = None,
    taints: list[str] | None = None,
    cordoned: bool = False,
    ready: str = "True",
    deleted: bool = False,
    resource_version: str = "1",
) -> dict[str, Any]:
    """A node."""
    metadata: dict[str, Any] = {"name": name, "labels": labels or {}, "resourceVersion": resource_version}
    if deleted:
        metadata["deletionTimestamp"] = "2026-11-30T21:00:00Z"
    spec: dict[str, Any] = {"providerID": f"cloud:///{name}"}
    if taints:
        spec["taints"] = [{"key": key, "effect": "NoSchedule", "value": "1"} for key in taints]
    if cordoned:
        spec["unschedulable"] = True
    status = {"conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec, "status": status}


def pod(name: str = "engine-0", **what: Any) -> Pod:
    """A pod as discovery reads it."""
    return msgspec.json.decode(msgspec.json.encode(pod_json(name, **what)), type=Pod)


def group_pod(index: int, **what: Any) -> Pod:
    """One of a group as discovery reads it."""
    return msgspec.json.decode(msgspec.json.encode(group_pod_json(index, **what)), type=Pod)


def node(name: str = "n1", **what: Any) -> Node:
    """A node as discovery reads it."""
    return msgspec.json.decode(msgspec.json.encode(node_json(name, **what)), type=Node)
