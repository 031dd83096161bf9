"""What a cluster's people, controllers and kubelets do, as far as discovery can see it, done by the tests.

Everything is in a namespace of the test's own, so a cluster that others use is left as it was.
"""

import json
import secrets
from typing import Any

from k8s.api import ApiError, KubernetesApi
from tests.kubernetes_objects import node_json, pod_json

Json = dict[str, Any]
_THERE_ALREADY = 409
_SET_BY_THE_SERVER = ("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")


class Cluster:
    """A namespace and nodes in the cluster that `api` leads to, all of which `clear` takes away."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self.namespace = f"headrace-test-{secrets.token_hex(4)}"
        self._nodes: list[str] = []

    async def ask(self, method: str, path: str, body: object = None) -> Json:
        """Of the API server, as its administrator. Raises ApiError."""
        answer: Json = json.loads(await self._api.request(method, path, {}, body))
        return answer

    async def prepare(self) -> None:
        """The namespace with its default service account, which a controller makes where there is one."""
        await self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        account = {"metadata": {"name": "default"}, "automountServiceAccountToken": False}
        try:
            await self.ask("POST", f"/api/v1/namespaces/{self.namespace}/serviceaccounts", account)
        except ApiError as error:
            if error.status != _THERE_ALREADY:
                raise

    async def clear(self) -> None:
        for pod in await self.pods():
            await self.remove(pod["metadata"]["name"])
        for name in self._nodes:
            await self.ask("DELETE", f"/api/v1/nodes/{name}")
        await self.ask("DELETE", f"/api/v1/namespaces/{self.namespace}")

    # What a controller and the scheduler do.

    async def create(self, pod: Json) -> None:
        """A pod that nothing has been heard of from its kubelet."""
        await self.ask("POST", self._pod(), _sent(pod, self.namespace))

    # What a kubelet does.

    async def report(self, pod: Json) -> None:
        """How `pod` is by now."""
        await self.ask("PUT", f"{self._pod(pod['metadata']['name'])}/status", _sent(pod, self.namespace))

    async def run(self, pod: Json) -> None:
        """Create it and report it."""
        await self.create(pod)
        await self.report(pod)

    async def remove(self, name: str) -> None:
        """It has ended after its deletion, or its node is gone: now it is no more."""
        await self.ask(
            "DELETE", self._pod(name), {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        )

    # What people do.

    async def delete(self, name: str) -> None:
        """As `kubectl delete` does: it is over when its kubelet says so."""
        await self.ask("DELETE", self._pod(name))

    async def evict(self, name: str) -> None:
        """As `kubectl drain` does, by the newest policy API that there is."""
        versions = (await self.ask("GET", "/apis/policy"))["versions"]
        kind = {"kind": "Eviction", "apiVersion": versions[0]["groupVersion"]}
        await self.ask("POST", f"{self._pod(name)}/eviction", {**kind, "metadata": {"name": name}})

    async def add_node(self, name: str, **what: Any) -> str:
        """A node that is ready, without the taint of those that are not yet."""
        node = _sent(node_json(f"{self.namespace}-{name}", **what))
        name = node["metadata"]["name"]
        await self.ask("POST", "/api/v1/nodes", node)
        self._nodes.append(name)
        await self.ask("PUT", f"/api/v1/nodes/{name}/status", node)
        await self.change_node(name, **what)
        return name

    async def change_node(self, name: str, **what: Any) -> None:
        """It has these labels, taints and cordon now, and no others."""
        while True:
            there = await self.ask("GET", f"/api/v1/nodes/{name}")
            wanted = node_json(name, **what)
            there["metadata"]["labels"] = wanted["metadata"]["labels"]
            there["spec"] = {**wanted["spec"]}
            try:
                await self.ask("PUT", f"/api/v1/nodes/{name}", there)
                return
            except ApiError as error:
                if error.status != _THERE_ALREADY:
                    raise

    async def pods(self) -> list[Json]:
        """Every pod that there is."""
        items: list[Json] = (await self.ask("GET", self._pod()))["items"]
        return items

    def _pod(self, name: str | None = None) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods" + (f"/{name}" if name else "")


def engine(name: str, node: str, number: int = 1, *, ready: bool | None = True, **what: Any) -> Json:
    """A pod that the pool's selector finds, with an address of its own for each `number`."""
    ip = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    return pod_json(name, node=node, ip=ip, ready=ready, **{"labels": {"app": "engine"}, **what})


def _sent(one: Json, namespace: str | None = None) -> Json:
    """As a client may send it."""
    metadata = {name: value for name, value in one["metadata"].items() if name not in _SET_BY_THE_SERVER}
    if namespace is not None:
        metadata["namespace"] = namespace
    return {**one, "metadata": metadata}
