"""An API server that restarts, ends watches and forgets, and a leader that goes, lose nothing and leave no gap."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from k8s.discovery import Discovery
from tests.contract.state_gateways import until
from tests.discoveries import discovery_by, gateway
from tests.kube.cluster import Cluster, engine
from tests.kube.server import Cable, KubeApiServer
from tests.valkey import ValkeyProcess

EVENTS = 2000
PODS = 40
FAILOVER_S = 25.0
"""A lease lasts 15 s, and those who wait for it look every two."""


def lists_of_pods(running: Discovery) -> Counter[str]:
    """Counts discovery's lists of pods from now on."""
    counted: Counter[str] = Counter()
    asked = running._api.request

    async def request(method: str, path: str, query: Mapping[str, str], body: object = None) -> bytes:
        counted["lists"] += path.endswith("/pods")
        return await asked(method, path, query, body)

    running._api.request = request  # type: ignore[method-assign]
    return counted


def listed(pods: list[dict[str, Any]]) -> dict[str, tuple[str, bool]]:
    """What gateways should see of pods that are all ready or not, and not more than that."""
    return {
        f"p/{pod['metadata']['name']}": (
            pod["status"]["podIP"],
            any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"]["conditions"]),
        )
        for pod in pods
    }


@asynccontextmanager
async def cabled(server: KubeApiServer, cluster: Cluster, directory: Path) -> AsyncIterator[tuple[Cable, Path]]:
    async with Cable(server.port) as cable:
        yield cable, server.kubeconfig(directory / f"cable-{cable.port}", cluster.namespace, port=cable.port)


async def test_a_storm_of_events_with_cut_watches_restarts_and_compactions_ends_in_what_there_is(
    server: KubeApiServer, cluster: Cluster, redis: ValkeyProcess, tmp_path: Path
) -> None:
    node = await cluster.add_node("n1")
    async with AsyncExitStack() as stack:
        cable, through = await stack.enter_async_context(cabled(server, cluster, tmp_path))
        one = await stack.enter_async_context(gateway(redis))
        running = await stack.enter_async_context(discovery_by(through, redis))
        await until(lambda: running.settled and running.election.leads)
        counted = lists_of_pods(running)

        events = 0
        there: set[str] = set()
        while events < EVENTS:
            step = events
            names = [f"e-{(step + offset) % PODS}" for offset in range(8)]
            await asyncio.gather(*(_change(cluster, name, node, step + at, there) for at, name in enumerate(names)))
            events += len(names)
            if _passes(step, events, 150):
                cable.cut()
            if step < 600 <= events:  # a watch that was away for so long that nobody knows any more where it was
                cable.pull()
            if step < 900 <= events:
                await server.forget()
                server.kill()
                await server.start()
                counted.clear()
                await cable.plug()
                await until(lambda: counted["lists"] > 0, within_s=20)
            if step < 1400 <= events:  # and a restart that everybody sees
                server.kill()
                await server.start()
        wanted = listed(await cluster.pods())
        assert len(wanted) > PODS / 2
        await until(lambda: one.seen() == wanted, within_s=20)
        assert await _gone_as_it_should(cluster, min(there), one.seen)


async def test_a_server_that_is_away_changes_nothing_and_is_followed_again_within_seconds(
    server: KubeApiServer, cluster: Cluster, redis: ValkeyProcess, kubeconfig: Path
) -> None:
    node = await cluster.add_node("n1")
    for number in range(3):
        await cluster.run(engine(f"e-{number}", node, number))
    async with gateway(redis) as one, discovery_by(kubeconfig, redis) as running:
        await until(lambda: len(one.endpoints) == 3)
        counted = lists_of_pods(running)
        server.kill()
        await until(lambda: "cannot be reached" in " ".join(running.degraded()), within_s=10)
        assert [one.phase(f"p/e-{number}") for number in range(3)] == ["ready"] * 3
        await server.start()
        await cluster.report(engine("e-0", node, 0, ready=False))
        await until(lambda: one.phase("p/e-0") == "starting", within_s=12)
        assert len(one.endpoints) == 3
        assert counted["lists"] <= 1, "resumed, or listed once where the server did not know any more"


async def test_a_leader_that_ends_or_is_cut_off_is_followed_by_another_without_a_gap(
    server: KubeApiServer, cluster: Cluster, redis: ValkeyProcess, kubeconfig: Path, tmp_path: Path
) -> None:
    node = await cluster.add_node("n1")
    await cluster.run(engine("e-0", node))
    gaps: list[str] = []

    async def look(one: Any) -> None:
        while True:
            gaps.extend([phase] if (phase := one.phase("p/e-0")) != "ready" else [])
            await asyncio.sleep(0.005)

    async with AsyncExitStack() as replicas, AsyncExitStack() as stack:
        cable, through = await stack.enter_async_context(cabled(server, cluster, tmp_path))
        one = await stack.enter_async_context(gateway(redis))
        first = await replicas.enter_async_context(discovery_by(kubeconfig, redis, "first"))
        await until(lambda: first.election.leads and one.phase("p/e-0") == "ready")
        looking = asyncio.create_task(look(one))
        try:
            second = await stack.enter_async_context(discovery_by(through, redis, "second"))
            await until(lambda: second.settled)
            await replicas.aclose()
            await until(lambda: second.election.leads, within_s=6)
            await cluster.run(engine("e-1", node, 2))
            await until(lambda: one.phase("p/e-1") == "ready", within_s=2)
            third = await stack.enter_async_context(discovery_by(kubeconfig, redis, "third"))
            await until(lambda: third.settled)
            cable.pull()
            await cluster.run(engine("e-2", node, 3))
            await until(lambda: third.election.leads, within_s=FAILOVER_S)
            assert not second.election.leads, "two never lead"
            await until(lambda: one.phase("p/e-2") == "ready", within_s=2)
        finally:
            looking.cancel()
    assert gaps == []


def _passes(before: int, after: int, every: int) -> bool:
    return before // every != after // every


async def _change(cluster: Cluster, name: str, node: str, number: int, there: set[str]) -> None:
    """One event or two of the pod `name`."""
    pod = engine(name, node, number, ready=number % 3 != 0)
    if name not in there:
        await cluster.run(pod)
        there.add(name)
    elif number % 5 == 4:
        await cluster.remove(name)
        there.remove(name)
    else:
        await cluster.report(pod)


async def _gone_as_it_should(cluster: Cluster, name: str, seen: Any) -> bool:
    """And it follows on."""
    await cluster.remove(name)
    await until(lambda: f"p/{name}" not in seen(), within_s=1)
    return True
