"""What happens to pods and nodes of a real cluster is in force at every gateway within a second."""

from pathlib import Path

from tests.contract.state_gateways import until
from tests.discoveries import ENGINE, discovery_by, gateway, within_a_second
from tests.kube.cluster import Cluster, engine
from tests.kubernetes_objects import group_pod_json, pod_json
from tests.valkey import ValkeyProcess

SPOT = {"karpenter.sh/capacity-type": "spot", "topology.kubernetes.io/zone": "eu-1a"}


async def test_a_pod_is_followed_from_its_creation_to_its_end(
    cluster: Cluster, kubeconfig: Path, redis: ValkeyProcess
) -> None:
    node = await cluster.add_node("n1")
    async with gateway(redis) as one, discovery_by(kubeconfig, redis) as running:
        await until(lambda: running.settled and running.election.leads)
        await cluster.run(pod_json("other-0", labels={"app": "other"}, node=node))
        await cluster.create(engine("e-0", node))
        await cluster.report(engine("e-0", node, ready=False))
        await within_a_second(lambda: one.phase("p/e-0") == "starting")
        assert list(one.endpoints) == ["p/e-0"]
        await cluster.report(engine("e-0", node))
        await within_a_second(lambda: one.phase("p/e-0") == "ready")
        assert one.endpoints["p/e-0"].spec.http == "http://10.0.0.1:8000"
        await cluster.report(engine("e-0", node, ready=False))
        await within_a_second(lambda: one.phase("p/e-0") == "starting")
        await cluster.report(engine("e-0", node))
        await within_a_second(lambda: one.phase("p/e-0") == "ready")
        await cluster.delete("e-0")
        await within_a_second(lambda: one.phase("p/e-0") == "draining")
        await cluster.remove("e-0")
        await within_a_second(lambda: one.phase("p/e-0") == "gone")
        assert running.degraded() == []


async def test_an_evicted_pod_drains_and_one_that_its_kubelet_evicted_is_gone(
    cluster: Cluster, kubeconfig: Path, redis: ValkeyProcess
) -> None:
    node = await cluster.add_node("n1")
    for number in (1, 2):
        await cluster.run(engine(f"e-{number}", node, number))
    async with gateway(redis) as one, discovery_by(kubeconfig, redis):
        await until(lambda: one.phase("p/e-1") == one.phase("p/e-2") == "ready")
        await cluster.evict("e-1")
        await within_a_second(lambda: one.phase("p/e-1") == "draining")
        await cluster.remove("e-1")
        await within_a_second(lambda: one.phase("p/e-1") == "gone")
        await cluster.report(engine("e-2", node, 2, phase="Failed", ready=False))
        await within_a_second(lambda: one.phase("p/e-2") == "gone")


async def test_a_nodes_taint_cordon_and_drain_reach_its_pods(
    cluster: Cluster, kubeconfig: Path, redis: ValkeyProcess
) -> None:
    spot, other = await cluster.add_node("spot", labels=SPOT), await cluster.add_node("other")
    for number, node in enumerate((spot, spot, other)):
        await cluster.run(engine(f"e-{number}", node, number))
    async with gateway(redis) as one, discovery_by(kubeconfig, redis):
        await until(lambda: [one.phase(f"p/e-{number}") for number in range(3)] == ["ready"] * 3)
        spec = one.endpoints["p/e-0"].spec
        assert (spec.capacity, spec.zone, one.endpoints["p/e-2"].spec.capacity) == ("spot", "eu-1a", "on-demand")
        await cluster.change_node(spot, labels=SPOT, taints=["karpenter.sh/disrupted"])
        await within_a_second(lambda: one.phase("p/e-0") == one.phase("p/e-1") == "preempting")
        await cluster.change_node(spot, labels=SPOT)
        await within_a_second(lambda: one.phase("p/e-0") == one.phase("p/e-1") == "ready")
        await cluster.change_node(spot, labels=SPOT, cordoned=True)
        await within_a_second(lambda: one.phase("p/e-0") == one.phase("p/e-1") == "draining")
        for name in ("e-0", "e-1"):
            await cluster.evict(name)
        for name in ("e-0", "e-1"):
            await cluster.remove(name)
        await within_a_second(lambda: list(one.endpoints) == ["p/e-2"])
        assert one.phase("p/e-2") == "ready"


async def test_a_group_is_one_endpoint_and_dies_as_one(
    cluster: Cluster, kubeconfig: Path, redis: ValkeyProcess
) -> None:
    nodes = [await cluster.add_node("n1"), await cluster.add_node("n2")]
    async with gateway(redis) as one, discovery_by(kubeconfig, redis) as running:
        await until(lambda: running.settled and running.election.leads)
        leader, worker = (
            group_pod_json(index, labels=ENGINE, node=nodes[index], ip=f"10.0.0.{index + 1}") for index in range(2)
        )
        await cluster.run(leader)
        await within_a_second(lambda: one.phase("p/big-0") == "starting")
        await cluster.run(worker)
        await within_a_second(lambda: one.phase("p/big-0") == "ready")
        assert list(one.endpoints) == ["p/big-0"]
        await cluster.change_node(nodes[1], cordoned=True)
        await within_a_second(lambda: one.phase("p/big-0") == "draining")
        await cluster.change_node(nodes[1])
        await within_a_second(lambda: one.phase("p/big-0") == "ready")
        await cluster.delete("big-0-1")
        await within_a_second(lambda: one.phase("p/big-0") == "draining")
        await cluster.remove("big-0-1")
        await within_a_second(lambda: one.phase("p/big-0") == "starting")
        await cluster.delete("big-0")
        await cluster.remove("big-0")
        await within_a_second(lambda: not one.endpoints)
