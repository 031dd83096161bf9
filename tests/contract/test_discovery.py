"""Discovery over real HTTP and a real Redis. The API server is a fake (`tests.kubernetes_server`)."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio
from aiohttp import web

from headrace.local.ports import free_ports
from k8s.discovery import Discovery
from k8s.status_page import status_page
from router.state.store import DocumentStore, Mark
from tests.contract.state_gateways import documents_of, until
from tests.discoveries import ENGINE, FILE, discovery_by, gateway, within_a_second, write_kubeconfig
from tests.kubernetes_objects import group_pod_json, node_json, pod_json
from tests.kubernetes_server import INFERENCE_POOLS, LEASES, FakeApiServer
from tests.valkey import ValkeyProcess, servers_here


@pytest_asyncio.fixture
async def redis(tmp_path: Path) -> AsyncIterator[ValkeyProcess]:
    async with ValkeyProcess(servers_here()[0], tmp_path) as server:
        yield server


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as server:
        server.put("nodes", node_json())
        yield server


@asynccontextmanager
async def discovery(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path, identity: str = "one"
) -> AsyncIterator[Discovery]:
    async with discovery_by(kubeconfig(cluster, tmp_path), redis, identity) as one:
        yield one


def kubeconfig(cluster: FakeApiServer, directory: Path) -> Path:
    """A kubeconfig that leads to it."""
    return write_kubeconfig(directory / "kubeconfig", cluster.url, "llm")


async def test_pods_come_get_ready_drain_and_go(cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path) -> None:
    async with gateway(redis) as one, discovery(cluster, redis, tmp_path):
        cluster.put("pods", pod_json("other-0", labels={"app": "other"}))
        cluster.put("pods", pod_json("e-0", labels=ENGINE, ip=None, ready=False, phase="Pending"))
        await asyncio.sleep(0.3)
        cluster.put("pods", pod_json("e-0", labels=ENGINE, ready=False))
        await until(lambda: one.phase("p/e-0") == "starting")
        assert list(one.endpoints) == ["p/e-0"]
        cluster.put("pods", pod_json("e-0", labels=ENGINE))
        await within_a_second(lambda: one.phase("p/e-0") == "ready")
        assert one.endpoints["p/e-0"].spec.http == "http://10.0.0.1:8000"
        cluster.put("pods", pod_json("e-0", labels=ENGINE, ready=False))
        await within_a_second(lambda: one.phase("p/e-0") == "starting")
        assert one.endpoints["p/e-0"].detail == "pod e-0 is not ready"
        cluster.put("pods", pod_json("e-0", labels=ENGINE, deleted=True))
        await within_a_second(lambda: one.phase("p/e-0") == "draining")
        cluster.delete("pods", "e-0", "llm")
        await within_a_second(lambda: one.phase("p/e-0") == "gone")
        assert "a" in one.view.endpoints, "what the file says is the file's"


async def test_a_nodes_taint_cordon_and_capacity_reach_gateways(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    spot = {"karpenter.sh/capacity-type": "spot", "topology.kubernetes.io/zone": "eu-1a"}
    async with gateway(redis) as one, discovery(cluster, redis, tmp_path):
        cluster.put("pods", pod_json("e-0", labels=ENGINE))
        await until(lambda: one.phase("p/e-0") == "ready")
        cluster.put("nodes", node_json(cordoned=True))
        await within_a_second(lambda: one.phase("p/e-0") == "draining")
        cluster.put("nodes", node_json(labels=spot))
        await within_a_second(lambda: one.phase("p/e-0") == "ready")
        spec = one.endpoints["p/e-0"].spec
        assert (spec.capacity, spec.zone) == ("spot", "eu-1a")
        cluster.put("nodes", node_json(labels=spot, taints=["karpenter.sh/disrupted"]))
        await within_a_second(lambda: one.phase("p/e-0") == "preempting")


async def test_a_group_is_one_endpoint_and_dies_as_one(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    async with gateway(redis) as one, discovery(cluster, redis, tmp_path):
        cluster.put("pods", group_pod_json(0, labels=ENGINE))
        await until(lambda: one.phase("p/big-0") == "starting")
        cluster.put("pods", group_pod_json(1, labels=ENGINE, ip="10.0.0.2"))
        await within_a_second(lambda: one.phase("p/big-0") == "ready")
        assert list(one.endpoints) == ["p/big-0"]
        cluster.put("pods", group_pod_json(1, labels=ENGINE, ip="10.0.0.2", deleted=True))
        await within_a_second(lambda: one.phase("p/big-0") == "draining")


async def test_nothing_is_lost_by_cut_watches_compaction_and_a_server_that_is_away(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    cluster.page_items = 3
    for number in range(8):
        cluster.put("pods", pod_json(f"e-{number}", labels=ENGINE, ip=f"10.0.0.{number}"))
    async with gateway(redis) as one, discovery(cluster, redis, tmp_path):
        await until(lambda: len(one.endpoints) == 8)
        lists = cluster.requests.count("pods list")
        assert lists == 3, "in pages"
        cluster.cut()
        cluster.delete("pods", "e-0", "llm")
        await until(lambda: one.phase("p/e-0") == "gone", within_s=2)
        assert cluster.requests.count("pods list") == lists, "resumed where it was"
        cluster.forget()
        cluster.delete("pods", "e-1", "llm")
        await until(lambda: one.phase("p/e-1") == "gone", within_s=2)
        assert cluster.requests.count("pods list") > lists
        await cluster.stop()
        cluster.delete("pods", "e-2", "llm")
        cluster.put("pods", pod_json("e-9", labels=ENGINE, ip="10.0.0.9"))
        cluster.forget()
        await asyncio.sleep(0.5)
        assert len(one.endpoints) == 6, "a server that is away changes nothing"
        await cluster.start()
        await until(lambda: one.phase("p/e-9") == "ready" and one.phase("p/e-2") == "gone")
        assert set(one.endpoints) == {f"p/e-{number}" for number in (3, 4, 5, 6, 7, 9)}


async def test_a_storm_of_events_with_faults_ends_in_what_there_is(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    async with gateway(redis) as one, discovery(cluster, redis, tmp_path) as running:
        await until(lambda: running.settled)
        for number in range(2000):
            name = f"e-{number * 7 % 50}"
            cluster.put("pods", pod_json(name, labels=ENGINE, ip=f"10.0.0.{number % 250}", ready=number % 3 != 0))
            if number % 5 == 4:
                cluster.delete("pods", name, "llm")
            if number % 250 == 100:
                cluster.cut()
            if number % 400 == 200:
                cluster.forget()
            if number % 20 == 0:
                await asyncio.sleep(0.002)
        wanted = {
            f"p/{pod['metadata']['name']}": (pod["status"]["podIP"], pod["status"]["conditions"][1]["status"] == "True")
            for pod in cluster._objects["pods"].values()
        }
        await until(lambda: one.seen() == wanted)
        assert running.publications < 200, "bursts are published together"


async def test_a_discovery_that_cannot_see_the_cluster_leaves_what_was_published(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    cluster.put("pods", pod_json("e-0", labels=ENGINE))
    async with gateway(redis) as one:
        async with discovery(cluster, redis, tmp_path, "first"):
            await until(lambda: one.phase("p/e-0") == "ready")
        assert one.phase("p/e-0") == "ready", "its end takes nothing away"
        with cluster.refusing("pods"):
            async with discovery(cluster, redis, tmp_path, "second") as second:
                await until(lambda: second.election.leads and bool(second.degraded()))
                await asyncio.sleep(0.3)
                assert one.phase("p/e-0") == "ready"
                assert not second.settled
                assert "pods is forbidden" in " ".join(second.degraded())
                await until(lambda: one.state.status.discovery is not None)
                told = one.state.status.discovery
                assert told is not None
                await until(lambda: "pods is forbidden" in str(one.state.status.discovery))


async def test_without_leave_to_read_nodes_pods_are_discovered_all_the_same(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    cluster.put("pods", pod_json("e-0", labels=ENGINE))
    with cluster.refusing("nodes"):
        async with gateway(redis) as one, discovery(cluster, redis, tmp_path) as running:
            await until(lambda: one.phase("p/e-0") == "ready")
            assert "nodes is forbidden" in " ".join(running.degraded())


async def test_replicas_that_cannot_elect_a_leader_publish_nothing_and_tell_gateways_why(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    cluster.put("pods", pod_json("e-0", labels=ENGINE))
    with cluster.refusing(LEASES):
        async with gateway(redis) as one, discovery(cluster, redis, tmp_path, "one") as running:
            async with discovery(cluster, redis, tmp_path, "two"):
                await until(lambda: running.settled)
                await until(lambda: f"lease: {LEASES} is forbidden" in str(one.state.status.discovery))
                assert not one.endpoints
                assert running.publications == 0


async def test_an_inference_pool_gives_selector_and_port(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    pool = {"protocol": "openai", "model": "m", "discover": {"inference_pool": "vllm"}}

    def inference_pool(app: str) -> dict[str, Any]:
        spec = {"selector": {"matchLabels": {"app": app}}, "targetPorts": [{"number": 8200}]}
        return {"metadata": {"name": "vllm", "namespace": "llm"}, "spec": spec}

    for app in ("engine", "other"):
        cluster.put("pods", pod_json(f"{app}-0", labels={"app": app}))
    async with gateway(redis, {**FILE, "pools": {"p": pool}}) as one, discovery(cluster, redis, tmp_path) as running:
        await until(lambda: "pool p: there is no InferencePool vllm" in running.degraded())
        cluster.put(INFERENCE_POOLS, inference_pool("engine"))
        await until(lambda: list(one.endpoints) == ["p/engine-0"])
        assert one.endpoints["p/engine-0"].spec.http == "http://10.0.0.1:8200"
        cluster.put(INFERENCE_POOLS, inference_pool("other"))
        await until(lambda: list(one.endpoints) == ["p/other-0"])
        cluster.delete(INFERENCE_POOLS, "vllm", "llm")
        await asyncio.sleep(0.3)
        assert list(one.endpoints) == ["p/other-0"], "what is not known any more stays as it was"


async def test_pools_are_followed_as_the_fleet_changes(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    cluster.put("pods", pod_json("e-0", labels=ENGINE))
    cluster.put("pods", pod_json("x-0", labels={"app": "x"}))
    async with gateway(redis) as one, discovery(cluster, redis, tmp_path):
        await until(lambda: list(one.endpoints) == ["p/e-0"])
        q = {"protocol": "openai", "model": "m", "discover": {"selector": "app=x", "namespace": "*"}}
        changed = {**FILE, "pools": {"fixed": FILE["pools"]["fixed"], "q": q}, "routes": {"r": {"pool": "q"}}}
        await one.state.publish(documents_of(changed, "changed"), "changed")
        await until(lambda: list(one.endpoints) == ["q/llm/x-0"])


async def test_one_replica_publishes_and_another_takes_over_when_it_goes(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    cluster.put("pods", pod_json("e-0", labels=ENGINE))
    async with gateway(redis) as one, AsyncExitStack() as replica:
        first = await replica.enter_async_context(discovery(cluster, redis, tmp_path, "first"))
        await until(lambda: first.election.leads and one.phase("p/e-0") == "ready")
        async with discovery(cluster, redis, tmp_path, "second") as second:
            await until(lambda: second.settled)
            assert not second.election.leads
            held = cluster.object(LEASES, "headrace-demo", "llm")["spec"]
            assert (held["holderIdentity"], held["leaseTransitions"]) == ("first", 1)
            await replica.aclose()
            cluster.delete("pods", "e-0", "llm")
            await until(lambda: one.phase("p/e-0") == "gone", within_s=6)
            await until(lambda: (first.publications, second.publications) == (1, 1))
            assert cluster.object(LEASES, "headrace-demo", "llm")["spec"]["holderIdentity"] == "second"


async def test_a_deposed_leader_cannot_undo_what_its_successor_published(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    cluster.put("pods", pod_json("e-0", labels=ENGINE))
    async with gateway(redis) as one, gateway(redis) as deposed, discovery(cluster, redis, tmp_path):
        await until(lambda: one.phase("p/e-0") == "ready" and deposed.phase("p/e-0") == "ready")
        before = time.time_ns() // 1_000_000
        cluster.put("pods", pod_json("e-1", labels=ENGINE, ip="10.0.0.2"))
        await until(lambda: one.phase("p/e-1") == "ready")
        store = DocumentStore(redis.url, "demo")
        try:
            assert await store.replace_source("discovery", [], Mark(before - 1, ""), even_later=False) == ""
        finally:
            await store.close()
        assert one.phase("p/e-1") == "ready"
        assert await deposed.state.replace_discovered([])
        await until(lambda: not deposed.endpoints)
        await until(lambda: len(one.endpoints) == 2)  # and what somebody else publishes is put right


async def test_a_redis_that_lost_everything_gets_it_back(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path
) -> None:
    cluster.put("pods", pod_json("e-0", labels=ENGINE))
    async with gateway(redis) as one, discovery(cluster, redis, tmp_path) as running:
        await until(lambda: one.phase("p/e-0") == "ready")
        redis.kill()
        await until(lambda: not running.state.status.connected)
        cluster.put("pods", pod_json("e-1", labels=ENGINE, ip="10.0.0.2"))
        await asyncio.sleep(0.3)
        assert set(one.endpoints) == {"p/e-0"}
        await redis.start()
        await until(lambda: set(one.endpoints) == {"p/e-0", "p/e-1"}, within_s=8)


async def test_the_status_page_tells_leader_endpoints_and_what_is_stale(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    cluster.put("pods", pod_json("e-0", labels=ENGINE))
    async with gateway(redis), discovery(cluster, redis, tmp_path) as running:
        runner = web.AppRunner(status_page(running), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await until(lambda: running.settled and running.publications == 1)
            async with client.get(f"{url}/readyz") as answer:
                assert answer.status == 200
                told = await answer.json()
            assert told == {"status": "ready", "leader": True, "degraded": [], "endpoints": {"p ready": 1}}
            async with client.get(f"{url}/metrics") as answer:
                metrics = (await answer.text()).splitlines()
            assert 'headrace_discovery_endpoints{phase="ready",pool="p"} 1.0' in metrics
            assert "headrace_discovery_leader 1.0" in metrics
            assert 'headrace_discovery_stale_seconds{objects="pods (app=engine)"} 0.0' in metrics
            assert "headrace_discovery_publications_total 1.0" in metrics
        finally:
            await runner.cleanup()


@asynccontextmanager
async def command(file: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`headrace discovery` as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace", "discovery", "--config", str(file), *arguments,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "KUBECONFIG": str(file.parent / "none")},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_command_discovers_until_it_is_told_to_stop_and_gives_the_lease_back(
    cluster: FakeApiServer, redis: ValkeyProcess, tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    cluster.put("pods", pod_json("e-0", labels=ENGINE))
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps({**FILE, "redis": {"url": redis.url}}))
    (port,) = free_ports(1)
    options = ("--kubeconfig", str(kubeconfig(cluster, tmp_path)), "--listen", f"127.0.0.1:{port}")
    async with gateway(redis) as one, command(file, *options) as process:
        await until(lambda: one.phase("p/e-0") == "ready", within_s=20)
        async with client.get(f"http://127.0.0.1:{port}/healthz") as answer:
            assert answer.status == 200
        process.terminate()
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        assert not cluster.object(LEASES, "headrace-demo", "llm")["spec"].get("holderIdentity")
        assert one.phase("p/e-0") == "ready"


async def test_mistakes_of_the_command_are_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    for text, words in (
        (json.dumps(FILE), "no `redis`"),
        (json.dumps({**FILE, "redis": {"url": "redis://127.0.0.1:1"}}), "Cannot log in to a Kubernetes cluster"),
        ("fleet: [", "fleet.yaml"),
    ):
        file.write_text(text)
        async with command(file) as process:
            assert process.stderr is not None
            async with asyncio.timeout(20):
                told = (await process.stderr.read()).decode()
                assert await process.wait() == 1
            assert words in told
            assert "Traceback" not in told
