"""The few fields of Kubernetes' objects that discovery looks at.

A pod in JSON has some ten kilobytes, and the official package's models take over two milliseconds to make one. msgspec
decodes just these fields in microseconds and leaves the rest unread; what is kept of a thousand pods is a megabyte.
Names and meaning are those of the Kubernetes API (core/v1; inference.networking.k8s.io/v1 for InferencePool).
"""

from typing import Literal

from msgspec import Raw, Struct, field


class _Part(Struct, frozen=True, rename="camel"):
    """Base of all of them: absent is empty, unknown is ignored."""


class Meta(_Part, frozen=True):
    """`metadata`, without the resourceVersion: objects that differ in nothing that counts are equal, so that a node's
    heartbeat is no news."""

    name: str
    namespace: str = ""
    """Empty on objects of the cluster, like nodes."""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


class Object(_Part, frozen=True):
    """What every object has."""

    metadata: Meta


class Condition(_Part, frozen=True):
    """One of an object's conditions."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class ContainerPort(_Part, frozen=True):
    container_port: int
    name: str = ""


class Container(_Part, frozen=True):
    ports: list[ContainerPort] = field(default_factory=list)


class PodSpec(_Part, frozen=True):
    node_name: str | None = None
    containers: list[Container] = field(default_factory=list)


class Waiting(_Part, frozen=True):
    reason: str = ""


class Terminated(_Part, frozen=True):
    reason: str = ""
    exit_code: int = 0


class ContainerState(_Part, frozen=True):
    """Exactly one is set."""

    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Part, frozen=True):
    name: str = ""
    restart_count: int = 0
    state: ContainerState = field(default_factory=ContainerState)


class PodStatus(_Part, frozen=True):
    phase: str = ""
    reason: str = ""
    pod_ip: str | None = field(default=None, name="podIP")
    conditions: list[Condition] = field(default_factory=list)
    container_statuses: list[ContainerStatus] = field(default_factory=list)


class Pod(Object, frozen=True):
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)


class Taint(_Part, frozen=True):
    key: str
    effect: str = ""


class NodeSpec(_Part, frozen=True):
    unschedulable: bool = False
    """Cordoned."""
    taints: list[Taint] = field(default_factory=list)


class NodeStatus(_Part, frozen=True):
    conditions: list[Condition] = field(default_factory=list)


class Node(Object, frozen=True):
    spec: NodeSpec = field(default_factory=NodeSpec)
    status: NodeStatus = field(default_factory=NodeStatus)


class LabelSelector(_Part, frozen=True):
    match_labels: dict[str, str] = field(default_factory=dict)


class TargetPort(_Part, frozen=True):
    number: int


class InferencePoolSpec(_Part, frozen=True):
    selector: LabelSelector = field(default_factory=LabelSelector)
    target_ports: list[TargetPort] = field(default_factory=list)


class InferencePool(Object, frozen=True):
    spec: InferencePoolSpec = field(default_factory=InferencePoolSpec)


class ListMeta(_Part, frozen=True):
    resource_version: str = ""
    continue_: str | None = field(default=None, name="continue")


class Page(_Part, frozen=True):
    """One page of a list; its items are decoded one by one, so that one that is not as it should be harms no other."""

    metadata: ListMeta = field(default_factory=ListMeta)
    items: list[Raw] | None = None


class Event(_Part, frozen=True):
    """One line of a watch. The object of an ERROR is a Status, else it is what happened to, or a bookmark's mere
    resourceVersion."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: Raw


class Status(_Part, frozen=True):
    """What the API server answers in place of what was asked for."""

    code: int = 0
    reason: str = ""
    message: str = ""


class BookmarkMeta(_Part, frozen=True):
    resource_version: str = ""


class Bookmark(_Part, frozen=True):
    """An object without anything but the version up to which a watch has told everything."""

    metadata: BookmarkMeta = field(default_factory=BookmarkMeta)
