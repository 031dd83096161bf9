"""Discovery at work: follows the fleet's pools in Redis and their pods in the cluster, and publishes what they come to.

Everything is level-triggered. Whatever happens, a pod, a pool of the fleet, a lost Redis that is back, somebody else's
publication, only wakes one loop, which compares what should be published with what is, and publishes if they differ. So
nothing can be missed that is not put right at the next look, and a burst of a thousand events is a few publications.

Every replica follows everything, and only the leader publishes: the next one is warm when it takes over. Pods are
followed by one watch for each different selector, nodes and InferencePools by one each. Where nodes may not be read,
endpoints are published without what nodes say.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from k8s.api import Api
from k8s.election import Election
from k8s.endpoints import Discovered, find_endpoints
from k8s.nodes import NodeFacts, node_facts
from k8s.objects import InferencePool, Node, Pod
from k8s.publication import TargetError, differ, publication, targeted
from k8s.reflector import Collection, Reflector
from router.merge import merge
from router.spec.documents import DiscoveryReport, Document
from router.spec.fleet import DiscoverSpec, PoolSpec
from router.state.errors import StateUnavailable
from router.state.fleet import FleetState

REPORT_EVERY_S = 5.0
_GATHER_S = 0.05
"""What happens within it is one publication."""
_RETRY_S = 0.5
_MOST_PROBLEMS = 20

logger = logging.getLogger(__name__)


class Discovery:
    """Discovers for the fleet `fleet`, in the Redis at `redis_url`; `namespace` is where pools that do not say look.
    `documents` are the fleet file's, which count until Redis has others."""

    def __init__(
        self, api: Api, namespace: str, lease: str, identity: str, redis_url: str, fleet: str, documents: list[Document]
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._identity = identity
        self._wake = asyncio.Event()
        self._pools: dict[str, tuple[PoolSpec, DiscoverSpec]] = {}
        self._tasks: dict[Collection, asyncio.Task[None]] = {}
        self._pods: dict[Collection, Reflector[Pod]] = {}
        self._targets: dict[Collection, Reflector[InferencePool]] = {}
        self._nodes = Reflector(api, Collection("/api/v1/nodes"), Node, self._wake.set)
        self._facts: tuple[int, dict[str, NodeFacts]] = (-1, {})
        self._problems: list[str] = []
        self._refused: str | None = None
        """Why the shared state did not take the last publication or report."""
        self._reported_at = float("-inf")
        self._reported: list[str] = []
        self.state = FleetState(redis_url, fleet, documents, "", self._take_over, publishes=False)
        self.election = Election(api, namespace, lease, identity, self._wake.set)
        self.found: dict[str, tuple[Discovered, ...] | None] = {}
        """By pool; None while nothing is known of it."""
        self.publications = 0

    async def run(self) -> None:
        """Discovers until it is cancelled; gives leadership back then."""
        electing = asyncio.create_task(self.election.run(), name="election")
        try:
            await self.state.start()
            while True:
                pause = REPORT_EVERY_S if self._refused is None else _RETRY_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                await asyncio.sleep(_GATHER_S)
                self._wake.clear()
                try:
                    await self._reconcile()
                except Exception:  # the next look may do better; gateways see that it does not
                    logger.exception("publishing what was discovered failed; trying again")
                    self._refused = "an unexpected failure; the log has it"
        finally:
            await _cancelled([electing, *self._tasks.values()])
            await self.election.resign()
            await self.state.stop()

    @property
    def settled(self) -> bool:
        """What there is to discover is known."""
        return all(endpoints is not None for endpoints in self.found.values()) and bool(self.state.documents)

    @property
    def reflectors(self) -> Iterable[Reflector[Any]]:
        """What it follows of the cluster."""
        return [self._nodes, *self._targets.values(), *self._pods.values()] if self._pools else []

    def degraded(self) -> list[str]:
        """What is not as it should be, one sentence each."""
        found = [text for one in self.reflectors if (text := one.degraded()) is not None]
        found += self._problems[:_MOST_PROBLEMS]
        if self.election.error is not None:
            found.append(f"lease: {self.election.error}")
        if not self.state.status.connected:
            found.append(f"redis: {self.state.status.error or 'no answer yet.'}")
        elif self._refused is not None:
            found.append(f"redis: {self._refused}")
        return found

    def phases(self) -> Counter[tuple[str, str]]:
        """How many endpoints there are, by pool and phase."""
        return Counter((pool, one.standing.phase) for pool, found in self.found.items() for one in found or ())

    def _take_over(self, documents: list[Document]) -> None:
        pools = merge(one for one in documents if one.family == "pools").pools
        self._pools = {name: (pool, pool.discover) for name, pool in pools.items() if pool.discover is not None}
        self.found = {name: self.found.get(name) for name in self._pools}
        self._wake.set()

    async def _reconcile(self) -> None:
        self._discover()
        try:
            if self.election.leads:
                await self._publish()
            if self.election.leads or self._nobody_else_reports():
                await self._report()
            self._refused = None
        except StateUnavailable as error:
            if self._refused is None:
                logger.warning("what was discovered cannot be published now: %s", error)
            self._refused = str(error)

    async def _publish(self) -> None:
        published = [one for one in self.state.documents if one.source == "discovery"]
        wanted = publication(self.found, published)
        if not differ(wanted, published):
            return
        if await self.state.replace_discovered(wanted):
            self.publications += 1
        else:
            logger.warning("another replica has published in the meantime; looking again")
            self._wake.set()

    def _nobody_else_reports(self) -> bool:
        """Without a leader, as when the API server is away, gateways should still be told why nothing is published."""
        report = self.state.status.discovery
        return self.state.status.connected and (report is None or report.by == self._identity)

    async def _report(self) -> None:
        now, degraded = asyncio.get_running_loop().time(), self.degraded()
        if now < self._reported_at + REPORT_EVERY_S and degraded == self._reported:
            return
        await self.state.report(DiscoveryReport(by=self._identity, degraded=degraded))
        self._reported_at, self._reported = now, degraded

    def _discover(self) -> None:
        """Find every pool's endpoints, and follow what that takes and nothing else."""
        problems: list[str] = []
        needed: set[Collection] = set()
        found: dict[str, tuple[Discovered, ...] | None] = {}
        if self._pools:
            self._start(self._nodes)
            needed.add(self._nodes.collection)
        nodes = self._node_facts()
        for name, (pool, discover) in self._pools.items():
            found[name] = None
            where = discover.namespace or self._namespace
            inference_pools: Iterable[InferencePool] = ()
            if discover.inference_pool is not None:
                wanted = _inference_pool(where, discover.inference_pool)
                needed.add(wanted)
                target = self._targets.get(wanted)
                if target is None:
                    target = self._targets[wanted] = Reflector(self._api, wanted, InferencePool, self._wake.set)
                    self._start(target)
                if not target.mirror.synced:
                    continue
                inference_pools = target.mirror.objects.values()
            try:
                exact = targeted(name, pool, discover, inference_pools)
            except TargetError as error:
                problems.append(str(error))
                continue
            collection = _pods(where, exact.selector or "")
            needed.add(collection)
            pods = self._pods.get(collection)
            if pods is None:
                pods = self._pods[collection] = Reflector(self._api, collection, Pod, self._wake.set)
                self._start(pods)
            if not (pods.mirror.synced and self._nodes.settled):
                continue
            result = find_endpoints(name, pool.protocol, pool.model, exact, pods.mirror.objects.values(), nodes)
            found[name] = result.endpoints
            problems += result.problems
        for problem in problems:
            if problem not in self._problems:
                logger.warning("%s", problem)
        self._problems, self.found = problems, found
        for collection in self._tasks.keys() - needed:
            self._tasks.pop(collection).cancel()
            self._pods.pop(collection, None)
            self._targets.pop(collection, None)

    def _node_facts(self) -> dict[str, NodeFacts]:
        revision = self._nodes.mirror.revision
        if self._facts[0] != revision:
            objects = self._nodes.mirror.objects.values()
            self._facts = revision, {node.metadata.name: node_facts(node) for node in objects}
        return self._facts[1]

    def _start(self, reflector: Reflector[Any]) -> None:
        if reflector.collection not in self._tasks:
            task = asyncio.create_task(reflector.run(), name=f"follow {reflector.collection}")
            self._tasks[reflector.collection] = task


def _pods(namespace: str, selector: str) -> Collection:
    path = "/api/v1/pods" if namespace == "*" else f"/api/v1/namespaces/{namespace}/pods"
    return Collection(path, label_selector=selector)


def _inference_pool(namespace: str, name: str) -> Collection:
    path = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"
    return Collection(path, field_selector=f"metadata.name={name}")


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
