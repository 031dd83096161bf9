"""The chart's life in a cluster, in the hands of Helm's own engine."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.api import ApiError
from tests.helm import EXAMPLES, Document, Helm, HelmError
from tests.kube.cluster import Cluster
from tests.kube.server import KubeApiServer

SMALL: Document = {"engine": "vllm", "model": "org/small", "replicas": 2}
VALUES: Document = {"backends": {"small": SMALL}}


async def paths(cluster: Cluster, manifests: list[Document]) -> set[str]:
    """Where the API server should have these objects."""
    found = set()
    resources: dict[str, dict[str, Any]] = {}
    for one in manifests:
        version, metadata = one["apiVersion"], one["metadata"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if root not in resources:
            listed = (await cluster.ask("GET", root))["resources"]
            resources[root] = {resource["kind"]: resource for resource in listed if "/" not in resource["name"]}
        resource = resources[root][one["kind"]]
        where = f"/namespaces/{metadata.get('namespace', cluster.namespace)}" if resource["namespaced"] else ""
        found.add(f"{root}{where}/{resource['name']}/{metadata['name']}")
    return found


async def there(cluster: Cluster, wanted: set[str]) -> set[str]:
    """Those of `wanted` that the API server has."""
    found = set()
    for path in wanted:
        try:
            await cluster.ask("GET", path)
        except ApiError as error:
            assert error.status == 404, error
        else:
            found.add(path)
    return found


def manifests_of(release: Document) -> list[Document]:
    return [one for one in yaml.load_all(release["manifest"], yaml.CSafeLoader) if one is not None]


async def test_a_release_is_installed_upgraded_rolled_back_and_leaves_nothing_behind(
    server: KubeApiServer, cluster: Cluster, kubeconfig: Path
) -> None:
    apps = f"/apis/apps/v1/namespaces/{cluster.namespace}/statefulsets"
    secrets = f"/api/v1/namespaces/{cluster.namespace}/secrets"

    async def password() -> str:
        data: dict[str, str] = (await cluster.ask("GET", f"{secrets}/headrace-redis"))["data"]
        return data["password"]

    with Helm() as helm:
        installed = helm.cluster("install", kubeconfig, cluster.namespace, values=VALUES)
        first = await paths(cluster, manifests_of(installed))
        assert len(first) > 10
        assert await there(cluster, first) == first
        made = await password()

        backends = {"small": {**SMALL, "replicas": 3}, "other": SMALL}
        upgraded = helm.cluster("upgrade", kubeconfig, cluster.namespace, values={"backends": backends})
        second = await paths(cluster, manifests_of(upgraded))
        assert await there(cluster, second) == second
        assert first < second
        assert (await cluster.ask("GET", f"{apps}/headrace-small"))["spec"]["replicas"] == 3
        assert await password() == made, "an upgrade changes no password"

        helm.cluster("rollback", kubeconfig, cluster.namespace, version=1)
        assert await there(cluster, second) == first
        assert (await cluster.ask("GET", f"{apps}/headrace-small"))["spec"]["replicas"] == 2
        assert await password() == made

        helm.cluster("uninstall", kubeconfig, cluster.namespace)
        assert await there(cluster, second) == set()


async def test_what_the_cluster_has_no_kind_for_is_left_out_or_named(
    server: KubeApiServer, cluster: Cluster, kubeconfig: Path
) -> None:
    scaled = {**VALUES, "gateway": {"autoscaling": {"enabled": True}}}
    routed = {**VALUES, "network": {"httpRoute": {"parents": [{"name": "public"}]}}}
    grouped = {"backends": {"big": {**SMALL, "tensorParallel": 8, "pipelineParallel": 2, "nodes": 2}}}
    with Helm() as helm:
        for values, kind in ((routed, "HTTPRoute"), (grouped, "LeaderWorkerSet")):
            with pytest.raises(HelmError, match=f'no matches for kind "{kind}"'):
                helm.cluster("install", kubeconfig, cluster.namespace, values=values)
        installed = helm.cluster("install", kubeconfig, cluster.namespace, values=scaled)
        kinds = {one["kind"] for one in manifests_of(installed)}
        assert not kinds & {"HorizontalPodAutoscaler", "PodDisruptionBudget", "ServiceMonitor", "PrometheusRule"}
        assert "autoscaling/v2" in installed["notes"]
        helm.cluster("uninstall", kubeconfig, cluster.namespace)


async def test_every_example_is_accepted_as_far_as_the_cluster_has_its_kinds(
    server: KubeApiServer, cluster: Cluster, kubeconfig: Path
) -> None:
    accepted = 0
    with Helm() as helm:
        for example in EXAMPLES:
            values = yaml.safe_load(example.read_text())
            try:
                installed = helm.cluster("install", kubeconfig, cluster.namespace, values=values)
            except HelmError as error:
                assert 'no matches for kind "LeaderWorkerSet"' in str(error), example
                continue
            wanted = await paths(cluster, manifests_of(installed))
            assert await there(cluster, wanted) == wanted, example
            helm.cluster("uninstall", kubeconfig, cluster.namespace)
            assert not await there(cluster, wanted), example
            accepted += 1
    assert accepted >= len(EXAMPLES) - 1
