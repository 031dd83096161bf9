"""Discovery as the chart's own service account, with its rights, as a real API server sees them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from headrace.local.ports import LOOPBACK, free_ports
from k8s.api import ApiError, KubernetesApi
from tests.contract.state_gateways import until
from tests.discoveries import Gateway, gateway
from tests.helm import Document, Helm
from tests.kube.cluster import Cluster
from tests.kube.server import KubeApiServer
from tests.kubernetes_objects import pod_json
from tests.valkey import ValkeyProcess

VALUES: Document = {"backends": {"small": {"model": "org/small", "replicas": 2, "port": 8080}}}
RBAC = "/apis/rbac.authorization.k8s.io/v1"
PATHS = {
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Role": (RBAC, "roles"),
    "RoleBinding": (RBAC, "rolebindings"),
    "ClusterRole": (RBAC, "clusterroles"),
    "ClusterRoleBinding": (RBAC, "clusterrolebindings"),
}
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"


def named(manifests: list[Document], kind: str, name: str) -> Document:
    (found,) = [one for one in manifests if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


@asynccontextmanager
async def applied(cluster: Cluster, manifests: list[Document]) -> AsyncIterator[str]:
    """The chart's accounts and rights are in the cluster; gives a token of discovery's account."""
    made: list[str] = []
    try:
        for one in manifests:
            if one["kind"] not in PATHS:
                continue
            group, resource = PATHS[one["kind"]]
            path = f"{group}/{resource}"
            if not one["kind"].startswith("Cluster"):
                path = f"{group}/namespaces/{one['metadata'].get('namespace', cluster.namespace)}/{resource}"
            await cluster.ask("POST", path, one)
            made.append(f"{path}/{one['metadata']['name']}")
        account = f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/headrace-discovery"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        yield (await cluster.ask("POST", f"{account}/token", request))["status"]["token"]
    finally:
        for path in made:
            await cluster.ask("DELETE", path)


async def test_with_the_charts_rights_discovery_does_its_work_and_nothing_else(
    server: KubeApiServer, cluster: Cluster, redis: ValkeyProcess, tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    with Helm() as helm:
        manifests = helm.documents(VALUES, namespace=cluster.namespace)
    files = named(manifests, "ConfigMap", "headrace-fleet")["data"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    template = named(manifests, "StatefulSet", "headrace-small")["spec"]["template"]
    (container,) = named(manifests, "Deployment", "headrace-discovery")["spec"]["template"]["spec"]["containers"]
    (port,) = free_ports(1)
    here = {"/etc/headrace/fleet": str(tmp_path), ":9091": f"{LOOPBACK}:{port}"}
    arguments = [here.get(argument, argument) for argument in container["args"]]

    node = await cluster.add_node("n1", labels={"topology.kubernetes.io/zone": "eu-1a"})
    for number in range(2):
        labels, annotations = template["metadata"]["labels"], template["metadata"]["annotations"]
        await cluster.run(
            pod_json(f"headrace-small-{number}", node=node, labels=labels, annotations=annotations,
                     ip=f"10.0.0.{number}", ports={"http": 8080})
        )  # fmt: skip
    async with applied(cluster, manifests) as token:
        config = server.kubeconfig(tmp_path / "account", cluster.namespace, token=token)
        async with gateway(redis, yaml.safe_load(files["fleet.yaml"])) as one:
            log = tmp_path / "log"
            with log.open("wb") as told:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "headrace", *arguments, "--kubeconfig", str(config)),
                    env={**os.environ, "HEADRACE_REDIS_URL": redis.url, "HEADRACE_LOG_FORMAT": "json"}, stderr=told,
                )  # fmt: skip
            try:
                await _does_its_work(cluster, one, client, f"http://{LOOPBACK}:{port}")
            finally:
                process.terminate()
                async with asyncio.timeout(20):
                    assert await process.wait() == 0
            assert b"orbidden" not in log.read_bytes()
            lease = await cluster.ask("GET", f"{LEASES.format(cluster.namespace)}/headrace-headrace")
            assert not lease["spec"].get("holderIdentity"), "given back with its own rights"
        await _may_do_nothing_else(config, cluster.namespace)


async def _does_its_work(cluster: Cluster, one: Gateway, client: aiohttp.ClientSession, status: str) -> None:
    await until(lambda: len(one.endpoints) == 2, within_s=20)
    assert {endpoint.spec.zone for endpoint in one.endpoints.values()} == {"eu-1a"}, "from its node"
    await cluster.delete("headrace-small-1")
    await until(lambda: one.phase("small/headrace-small-1") == "draining", within_s=1)
    await asyncio.sleep(3)  # the lease is renewed
    async with client.get(f"{status}/readyz") as answer:
        told = await answer.json()
    assert (told["status"], told["leader"], told["degraded"]) == ("ready", True, [])


async def _may_do_nothing_else(config: Path, namespace: str) -> None:
    pods, leases = f"/api/v1/namespaces/{namespace}/pods", LEASES.format(namespace)
    named = {"metadata": {"name": "x"}, "spec": {"holderIdentity": "x"}}
    api = await KubernetesApi.connect(config, None)
    try:
        await api.request("GET", pods, {})
        for method, path, body in (
            ("GET", f"/api/v1/namespaces/{namespace}/secrets", None),
            ("GET", f"/api/v1/namespaces/{namespace}/configmaps", None),
            ("GET", "/api/v1/pods", None),
            ("GET", "/api/v1/namespaces/kube-system/pods", None),
            ("DELETE", f"{pods}/headrace-small-0", None),
            ("POST", f"{pods}/headrace-small-0/eviction", named),
            ("POST", pods, pod_json("x", namespace=namespace)),
            ("PUT", "/api/v1/nodes/x", {"metadata": {"name": "x"}}),
            ("GET", leases, None),
            ("PUT", f"{leases}/x", named),
            ("POST", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", named),
        ):
            with pytest.raises(ApiError) as refused:
                await api.request(method, path, {}, body)
            assert refused.value.status == 403, (method, path)
    finally:
        await api.close()
