"""The chart's discovery finds the chart's engines, with the rights that the chart gives it and no others.

Rendered by Helm's own engine and run as the process that it is, with a real Redis; the API server is a fake
(`tests.kubernetes_server`), and so are the pods, which are made of the chart's own templates.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from aiohttp import web

from headrace.local.ports import LOOPBACK, free_ports
from router.fleet import FleetView, compile_view
from router.merge import merge
from router.spec.documents import Document
from router.state.fleet import FleetState
from tests.contract.state_gateways import documents_of, until
from tests.discoveries import write_kubeconfig
from tests.helm import NAMESPACE, Helm
from tests.helm import Document as Manifest
from tests.kubernetes_objects import group_pod_json, node_json, pod_json
from tests.kubernetes_server import FakeApiServer
from tests.valkey import ValkeyProcess, servers_here

VALUES: Manifest = {
    "spot": {"provider": "gke"},
    "backends": {
        "small": {"model": "org/small", "replicas": 2, "spotReplicas": 1, "tensorParallel": 2, "port": 8080},
        "big": {
            "engine": "triton",
            "model": "ensemble",
            "tensorParallel": 8,
            "pipelineParallel": 2,
            "nodes": 2,
            "triton": {"repository": "/models/repository", "sshSecret": "ssh"},
        },
    },
}


class Asked(NamedTuple):
    """What somebody wanted of the API server, in the words of its roles."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str


class Cluster(FakeApiServer):
    """It keeps what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[Asked] = set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        group, rest = (parts[1], parts[3:]) if parts[0] == "apis" else ("", parts[2:])
        namespace = ""
        if rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        name = rest[1] if len(rest) > 1 else ""
        reading = "get" if name else "watch" if request.query.get("watch") else "list"
        verb = {"GET": reading, "POST": "create", "PUT": "update"}[request.method]
        self.asked.add(Asked(verb, group, rest[0], namespace, name))
        return await super()._answer(request)


def may(asked: Asked, manifests: list[Manifest]) -> bool:
    """Whether the chart's roles, bound as they are, allow it."""
    roles = {(one["kind"], one["metadata"]["name"]): one for one in manifests if one["kind"].endswith("Role")}
    for binding in manifests:
        if not binding["kind"].endswith("RoleBinding"):
            continue
        role = roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]
        where = binding["metadata"].get("namespace", NAMESPACE)
        if binding["kind"] == "RoleBinding" and where != asked.namespace:
            continue
        for rule in role["rules"]:
            if (
                asked.group in rule["apiGroups"]
                and asked.resource in rule["resources"]
                and asked.verb in rule["verbs"]
                and asked.name in ("", *rule.get("resourceNames", [asked.name]))
            ):
                return True
    return False


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """What the controllers of Kubernetes and of LeaderWorkerSet would make of the engines."""
    address = 0
    for one in manifests:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        templates: list[Manifest] = []
        match one["kind"]:
            case "StatefulSet":
                templates = [spec["template"]]
            case "LeaderWorkerSet":
                group = spec["leaderWorkerTemplate"]
                templates = [group["leaderTemplate"]] + [group["workerTemplate"]] * (group["size"] - 1)
        for replica in range(spec.get("replicas", 0)):
            for index, template in enumerate(templates):
                address += 1
                (container,) = template["spec"]["containers"]
                made: dict[str, Any] = {
                    "namespace": NAMESPACE,
                    "ip": f"10.0.0.{address}",
                    "node": "spot" if name.endswith("-spot") else "n1",
                    "labels": template["metadata"]["labels"],
                    "annotations": template["metadata"]["annotations"],
                    "ports": {port["name"]: port["containerPort"] for port in container["ports"]},
                }
                if one["kind"] == "StatefulSet":
                    yield pod_json(f"{name}-{replica}", **made)
                else:
                    yield group_pod_json(index, group=replica, size=len(templates), lws=name, **made)


async def test_discovery_finds_the_charts_engines_with_the_rights_that_the_chart_gives_it(tmp_path: Path) -> None:
    with Helm() as helm:
        manifests = helm.documents(VALUES)
    (files,) = [one["data"] for one in manifests if one["metadata"]["name"] == "headrace-fleet"]
    (spec,) = [
        one["spec"]["template"]["spec"]
        for one in manifests
        if (one["kind"], one["metadata"]["name"]) == ("Deployment", "headrace-discovery")
    ]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    fleet = yaml.safe_load(files["fleet.yaml"])

    view = FleetView()

    def apply(documents: list[Document]) -> None:
        nonlocal view
        view = compile_view(merge(documents), view)

    cluster = Cluster()
    async with cluster, ValkeyProcess(servers_here()[0], tmp_path) as redis:
        cluster.put("nodes", node_json("n1"))
        cluster.put("nodes", node_json("spot", labels={"cloud.google.com/gke-spot": "true"}))
        for pod in pods(manifests):
            cluster.put("pods", pod)
        config = write_kubeconfig(tmp_path / "kubeconfig", cluster.url, NAMESPACE)
        (port,) = free_ports(1)
        here = {"/etc/headrace/fleet": str(tmp_path), ":9091": f"{LOOPBACK}:{port}"}
        (container,) = spec["containers"]
        arguments = [here.get(argument, argument) for argument in container["args"]]
        gateway = FleetState(redis.url, fleet["fleet"], documents_of(fleet, "one"), "one", apply)
        await gateway.start()
        discovery = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", *arguments, "--kubeconfig", str(config)),
            env={**os.environ, "HEADRACE_REDIS_URL": redis.url, "HEADRACE_LOG_FORMAT": "json"},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await until(lambda: len(view.endpoints) == 4, within_s=20)
            found = {id_: one.spec for id_, one in view.endpoints.items()}
            await until(lambda: any(one.verb == "update" for one in cluster.asked), within_s=10)
        finally:
            discovery.terminate()
            async with asyncio.timeout(20):
                assert await discovery.wait() == 0
            await gateway.stop()

    assert [*sorted(found)] == [
        "big/headrace-big-0", "small/headrace-small-0", "small/headrace-small-1", "small/headrace-small-spot-0",
    ]  # fmt: skip
    big, small, _, spot = (found[name] for name in sorted(found))
    assert small.http is not None
    assert small.http.endswith(":8080")
    assert small.metrics == f"{small.http}/metrics"
    assert (small.tp, small.capacity, spot.capacity) == (2, "on-demand", "spot")
    assert (big.tp, big.pp, big.nodes) == (8, 2, 2)
    assert big.grpc is not None
    assert big.grpc.endswith(":8001")
    assert {one.resource for one in cluster.asked} == {"pods", "nodes", "leases"}
    assert [one for one in cluster.asked if not may(one, manifests)] == []
