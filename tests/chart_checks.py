"""What holds for whatever the Helm chart makes: it is valid, safe, and a fleet that its engines' pods serve.

`CHART_KUBERNETES=all` has it held to every supported version of Kubernetes and not only to the oldest and the newest.
"""

import json
import os
from collections.abc import Iterator
from functools import lru_cache

import kubernetes_validate

from router.spec.fleet import DiscoverSpec, FleetSpec
from router.spec.strict import read_fleet
from tests.helm import NAMESPACE, Document

# It reads a file of a megabyte for each document.
kubernetes_validate.utils.schema_contents = lru_cache(maxsize=None)(kubernetes_validate.utils.schema_contents)

VERSIONS: tuple[str, ...] = ("1.29", "1.37")
if os.environ.get("CHART_KUBERNETES") == "all":
    VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))
NOT_OF_KUBERNETES = {"HTTPRoute", "LeaderWorkerSet", "PrometheusRule", "ServiceMonitor"}


def fleet_of(documents: list[Document]) -> FleetSpec:
    """The fleet that the gateways would read. The tenants of a Secret are not there."""
    (file,) = [one["data"]["fleet.yaml"] for one in documents if "fleet.yaml" in one.get("data", {})]
    reading = read_fleet(file)
    assert reading.problems == []
    assert reading.fleet is not None
    return reading.fleet


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Every pod, with a name to tell it by."""
    for one in documents:
        name = f"{one['kind']} {one['metadata']['name']}"
        match one["kind"]:
            case "Pod":
                yield name, one
            case "Deployment" | "StatefulSet":
                yield name, one["spec"]["template"]
            case "LeaderWorkerSet":
                for role in ("leaderTemplate", "workerTemplate"):
                    yield f"{name} {role}", one["spec"]["leaderWorkerTemplate"][role]


def selector_of(discover: DiscoverSpec) -> dict[str, str]:
    assert discover.selector is not None
    return dict(term.split("=") for term in discover.selector.split(","))


seen_valid: set[tuple[str, str]] = set()


def check_valid(documents: list[Document]) -> None:
    names = [
        (one["apiVersion"], one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in documents
    ]
    assert len(names) == len(set(names))
    for one in documents:
        if one["kind"] in NOT_OF_KUBERNETES:
            templates = [{"apiVersion": "v1", "kind": "PodTemplate", "template": pod} for _, pod in pods([one])]
        else:
            templates = [one]
        for document in templates:
            for version in VERSIONS:
                key = version, json.dumps(document, sort_keys=True)
                if key not in seen_valid:
                    kubernetes_validate.validate(document, version, strict=True)
                    seen_valid.add(key)


def check_selectors(documents: list[Document]) -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods(documents)]
    for one in documents:
        spec = one.get("spec", {})
        match one["kind"]:
            case "Service":
                selector = spec["selector"]
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                selector = spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                selector = spec["podSelector"]["matchLabels"]
            case "ServiceMonitor":
                wanted = spec["selector"]["matchLabels"]
                services = [other for other in documents if other["kind"] == "Service"]
                assert any(wanted.items() <= other["metadata"]["labels"].items() for other in services)
                continue
            case _:
                continue
        assert any(selector.items() <= found.items() for found in labels), (one["kind"], one["metadata"]["name"])


def check_policy(documents: list[Document]) -> None:
    """What nobody should have to look for in a chart."""
    for one in documents:
        if one["kind"] in ("Role", "ClusterRole"):
            for rule in one["rules"]:
                assert not [word for words in rule.values() for word in words if "*" in word], one["metadata"]["name"]
                writes = {*rule["verbs"]} - {"get", "list", "watch"}
                assert not writes or rule["resources"] == ["leases"], one["metadata"]["name"]
        if one["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            (subject,) = one["subjects"]
            assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", NAMESPACE)
            assert subject["name"].endswith("-discovery")
    for name, pod in pods(documents):
        spec = pod["spec"]
        # Discovery alone asks the API server for anything.
        asks = spec["containers"][0]["name"] == "discovery"
        assert spec["automountServiceAccountToken"] is asks, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        assert not [volume for volume in spec.get("volumes", []) if "hostPath" in volume], name
        (container,) = spec["containers"]
        image, _, tag = container["image"].rpartition(":")
        assert image, name
        assert tag not in ("", "latest"), name
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"] == {"drop": ["ALL"]}, name
        assert not security.get("privileged"), name
        assert security.get("readOnlyRootFilesystem") or container["name"] == "engine", name
        assert "memory" in container["resources"]["limits"], name
        if "helm.sh/hook" not in pod["metadata"].get("annotations", {}):
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys(), name


def check_fleet(documents: list[Document]) -> FleetSpec:
    """Every engine's pod is found by one pool, and every endpoint of the file is a pod that there will be, by the name
    that Kubernetes will give it."""
    fleet = fleet_of(documents)
    engines = [pod for _, pod in pods(documents) if pod["spec"]["containers"][0]["name"] == "engine"]
    if any(one["metadata"]["name"].endswith("-discovery") for one in documents if one["kind"] == "Deployment"):
        selectors = [selector_of(pool.discover) for pool in fleet.pools.values() if pool.discover is not None]
        for pod in engines:
            labels = pod["metadata"]["labels"].items()
            assert sum(selector.items() <= labels for selector in selectors) == 1
        return fleet
    replicas = {
        one["metadata"]["name"]: one["spec"]["replicas"]
        for one in documents
        if one["kind"] in ("StatefulSet", "LeaderWorkerSet")
    }
    hosts = {f"{name}-{i}.{name}.{NAMESPACE}.svc" for name, count in replicas.items() for i in range(count)}
    found = [endpoint.http or "" for pool in fleet.pools.values() for endpoint in pool.endpoints]
    own = {url.removeprefix("http://").rpartition(":")[0] for url in found if f".{NAMESPACE}.svc" in url}
    assert own == hosts
    return fleet


def check(documents: list[Document]) -> FleetSpec:
    check_valid(documents)
    check_selectors(documents)
    check_policy(documents)
    return check_fleet(documents)
