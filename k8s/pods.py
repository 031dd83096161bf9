"""What a pod says of itself: how far it is, and where its engine listens.

A pod that ended (`Failed`, as after an eviction, or `Succeeded`) is gone although its object is still there, and one
without an address never was an endpoint. One that is being deleted finishes its streams and gets no new ones. Else
Kubernetes' own word counts: the condition `Ready`, which holds readiness probes and gates together.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from k8s import names
from k8s.objects import Pod
from router.spec.fleet import DiscoverSpec, EndpointSpec, Protocol, Role

Phase = Literal["ready", "starting", "draining", "preempting", "gone"]
"""From best to worst."""
BADNESS: dict[Phase, int] = {phase: rank for rank, phase in enumerate(get_args(Phase))}

_PORTS: dict[Protocol, dict[str, int]] = {
    "openai": {"http": 8000},
    "triton": {"http": 8000, "grpc": 8001, "metrics": 8002},
}
"""Where engines listen if nobody says anything else."""
_PORT_NAMES = {"http": names.HTTP_PORT, "grpc": names.GRPC_PORT, "metrics": names.METRICS_PORT}


class PodError(Exception):
    """Why a pod cannot be an endpoint of its pool; one sentence for people."""


@dataclass(slots=True, frozen=True)
class Standing:
    """How far a pod, or what it is part of, is."""

    phase: Phase
    why: str = ""
    """For people; empty if it is ready."""


def worst(standings: Iterable[Standing]) -> Standing:
    """The one that counts for all of them together."""
    return max(standings, key=lambda standing: BADNESS[standing.phase], default=Standing("ready"))


def standing(pod: Pod) -> Standing:
    """How far `pod` is, by itself."""
    status, name = pod.status, pod.metadata.name
    conditions = {condition.type: condition for condition in status.conditions}
    if status.phase in ("Failed", "Succeeded"):
        return Standing("gone", f"pod {name} has ended: {status.reason or status.phase}")
    target = conditions.get("DisruptionTarget")
    if target is not None and target.status == "True":
        phase: Phase = "preempting" if target.reason in names.PREEMPTION_REASONS else "draining"
        return Standing(phase, f"pod {name} is to be taken away: {target.reason or target.message or 'no reason told'}")
    if pod.metadata.deletion_timestamp is not None:
        return Standing("draining", f"pod {name} is being deleted")
    ready = conditions.get("Ready")
    if ready is not None and ready.status == "True":
        return Standing("ready")
    return Standing("starting", f"pod {name} is not ready{_held_up(pod)}")


def address(pod: Pod) -> str | None:
    """Its host as URLs have it; None before it has one, or if what it has is none."""
    try:
        ip = ipaddress.ip_address(pod.status.pod_ip or "")
    except ValueError:
        return None
    return f"[{ip}]" if ip.version == 6 else str(ip)


def said(pod: Pod, name: str) -> str | None:
    """What the pod says under `name`, which may be an annotation or a label."""
    return pod.metadata.annotations.get(name) or pod.metadata.labels.get(name) or None


def endpoint_spec(pod: Pod, id_: str, protocol: Protocol, model: str, discover: DiscoverSpec) -> EndpointSpec:
    """The endpoint that `pod` is, without what its node or its group say. Raises `PodError`."""
    host = address(pod)
    if host is None:
        raise PodError(f"pod {pod.metadata.name} has no address yet")
    for label, mine, pools in ((names.PROTOCOL, said(pod, names.PROTOCOL), protocol),
                               (names.MODEL, said(pod, names.MODEL), model)):  # fmt: skip
        if mine is not None and mine != pools:
            raise PodError(f"pod {pod.metadata.name} says {label}: {mine}, but its pool's is {pools}")
    ports = {api: _port(pod, api, protocol, discover) for api in _PORT_NAMES}
    http, grpc, metrics = ports["http"], ports["grpc"], ports["metrics"]
    return EndpointSpec(
        id=id_,
        http=f"http://{host}:{http}" if http is not None else None,
        grpc=f"{host}:{grpc}" if grpc is not None else None,
        metrics=f"http://{host}:{metrics}/metrics" if metrics is not None else None,
        role=_role(pod),
        tp=_size(pod, names.TENSOR_PARALLEL) or discover.tp,
        pp=_size(pod, names.PIPELINE_PARALLEL) or discover.pp,
        node=pod.spec.node_name,
    )


def _held_up(pod: Pod) -> str:
    """What keeps it from being ready, as far as its containers say."""
    for container in pod.status.container_statuses:
        again = f", restarted {container.restart_count} times" if container.restart_count else ""
        if container.state.waiting is not None and container.state.waiting.reason:
            return f": {container.state.waiting.reason}{again}"
        if container.state.terminated is not None:
            return f": {container.name or 'a container'} ended with {container.state.terminated.exit_code}{again}"
        if again:
            return again
    return ""


def _port(pod: Pod, api: str, protocol: Protocol, discover: DiscoverSpec) -> int | None:
    """The pod's own word, the pool's, a container's port of that name, the engine's habit; in this order."""
    declared = {port.name: port.container_port for container in pod.spec.containers for port in container.ports}
    if (own := said(pod, _PORT_NAMES[api])) is not None:
        number = int(own) if own.isascii() and own.isdigit() else declared.get(own)
        if number is None or not 0 < number < 65536:
            raise PodError(f"pod {pod.metadata.name} says {_PORT_NAMES[api]}: {own}, which is no port of it")
        return number
    of_pool: int | None = getattr(discover, api)
    return of_pool or declared.get(api) or _PORTS[protocol].get(api)


def _role(pod: Pod) -> Role:
    for name in (names.ROLE, names.LLM_D_ROLE):
        if (own := said(pod, name)) is not None:
            for role in get_args(Role):
                if own == role:
                    found: Role = role
                    return found
            raise PodError(f"pod {pod.metadata.name} says {name}: {own}; it may be {', '.join(get_args(Role))}")
    return "both"


def _size(pod: Pod, name: str) -> int | None:
    own = said(pod, name)
    if own is None:
        return None
    if not (own.isascii() and own.isdigit() and 0 < int(own) < 2**31):
        raise PodError(f"pod {pod.metadata.name} says {name}: {own}; it may be a number from 1")
    return int(own)
