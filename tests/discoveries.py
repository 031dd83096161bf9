"""Discovery between a cluster and the gateways it tells, for tests with an API server of either kind."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from k8s.api import KubernetesApi
from k8s.discovery import Discovery
from router.fleet import Endpoint, FleetView, compile_view
from router.merge import merge
from router.spec.documents import Document
from router.state.fleet import FleetState
from tests.contract.state_gateways import documents_of, until
from tests.valkey import ValkeyProcess

ENGINE = {"app": "engine"}
FILE: dict[str, Any] = {
    "fleet": "demo",
    "pools": {
        "p": {"protocol": "openai", "model": "m", "discover": {"selector": "app=engine"}},
        "fixed": {"protocol": "openai", "model": "m", "endpoints": [{"id": "a", "http": "http://127.0.0.1:1"}]},
    },
    "routes": {"r": {"pool": "p"}},
}


class Gateway:
    """A gateway as far as discovery goes: what it would route to."""

    def __init__(self, url: str, file: dict[str, Any]) -> None:
        self.view = FleetView()
        self.state = FleetState(
            url, file["fleet"], documents_of(file, str(hash(str(file)))), str(hash(str(file))), self._apply
        )

    def _apply(self, documents: list[Document]) -> None:
        self.view = compile_view(merge(documents), self.view)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Those discovered, by id."""
        return {id_: one for id_, one in self.view.endpoints.items() if "/" in id_}

    def phase(self, id_: str) -> str:
        """How an endpoint would count whose engine answers its probes."""
        one = self.endpoints.get(id_)
        if one is None:
            return "gone"
        one.state.phase = "ready"
        return one.phase

    def seen(self) -> dict[str, tuple[str, bool]]:
        """Of each endpoint its host and whether the cluster has it ready."""
        return {
            id_: ((endpoint.spec.http or "")[7:-5], endpoint.spec.phase is None)
            for id_, endpoint in self.endpoints.items()
        }


@asynccontextmanager
async def gateway(redis: ValkeyProcess, file: dict[str, Any] = FILE) -> AsyncIterator[Gateway]:
    one = Gateway(redis.url, file)
    await one.state.start()
    try:
        yield one
    finally:
        await one.state.stop()


@asynccontextmanager
async def discovery_by(kubeconfig: Path, redis: ValkeyProcess, identity: str = "one") -> AsyncIterator[Discovery]:
    """Discovery at work in the cluster and the namespace that `kubeconfig` leads to."""
    api = await KubernetesApi.connect(kubeconfig, None)
    one = Discovery(api, api.namespace, "headrace-demo", identity, redis.url, "demo", documents_of(FILE, ""))
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()


def write_kubeconfig(
    file: Path, server: str, namespace: str, *, token: str = "t", authority: Path | None = None
) -> Path:
    """One that leads to `namespace` at `server`, whose certificate `authority` vouches for."""
    cluster = {"server": server} | ({"certificate-authority": str(authority)} if authority is not None else {})
    file.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": namespace}}],
        "clusters": [{"name": "k", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
    }))  # fmt: skip
    return file


async def within_a_second(condition: Callable[[], bool]) -> None:
    """The bar of discovery: what happens in the cluster is in force at every gateway within a second."""
    await until(condition, within_s=1.0)
