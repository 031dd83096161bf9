"""The cluster that the tests are about, if there is one.

`HEADRACE_TEST_KUBE` is the folder that `build.sh` tells: a server is started from it, which tests may kill.
`HEADRACE_TEST_KUBECONFIG` leads to a cluster that is there already; what would harm it is skipped.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from k8s.api import KubernetesApi
from tests.kube.cluster import Cluster
from tests.kube.server import KubeApiServer
from tests.valkey import ValkeyProcess, servers_here


@pytest_asyncio.fixture(scope="session")
async def own_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KubeApiServer | None]:
    """None if the cluster is another's."""
    if os.environ.get("HEADRACE_TEST_KUBECONFIG"):
        yield None
    elif binaries := os.environ.get("HEADRACE_TEST_KUBE"):
        async with KubeApiServer(Path(binaries), tmp_path_factory.mktemp("kube")) as server:
            yield server
    else:
        pytest.skip("no Kubernetes API server here: `make test-kube` builds one, or takes HEADRACE_TEST_KUBECONFIG")


@pytest.fixture
def server(own_server: KubeApiServer | None) -> KubeApiServer:
    """For tests that do to it what should not be done to another's."""
    if own_server is None:
        pytest.skip("not on a cluster that others use")
    return own_server


@pytest_asyncio.fixture
async def cluster(own_server: KubeApiServer | None, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A namespace for one test."""
    if own_server is not None:
        file = own_server.kubeconfig(tmp_path / "admin", "default")
    else:
        file = Path(os.environ["HEADRACE_TEST_KUBECONFIG"])
    api = await KubernetesApi.connect(file, None)
    one = Cluster(api)
    try:
        await one.prepare()
        yield one
        await one.clear()
    finally:
        await api.close()


@pytest.fixture
def kubeconfig(own_server: KubeApiServer | None, cluster: Cluster, tmp_path: Path) -> Path:
    """The administrator's, for the test's namespace."""
    file = tmp_path / "kubeconfig"
    if own_server is not None:
        return own_server.kubeconfig(file, cluster.namespace)
    config = yaml.safe_load(Path(os.environ["HEADRACE_TEST_KUBECONFIG"]).read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = cluster.namespace
    file.write_text(yaml.safe_dump(config))
    return file


@pytest_asyncio.fixture
async def redis(tmp_path: Path) -> AsyncIterator[ValkeyProcess]:
    async with ValkeyProcess(servers_here()[0], tmp_path) as server:
        yield server
