"""What endpoints discovery makes of pods and nodes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8s import names
from k8s.endpoints import Discovered, Found, find_endpoints
from k8s.nodes import node_facts
from k8s.objects import Node, Pod
from router.spec.documents import EndpointFields
from router.spec.fleet import DiscoverSpec, PoolSpec, Protocol
from router.spec.references import address_fault
from tests.kubernetes_objects import group_pod, group_pod_json, node, pod, pod_json

ROOT = Path(__file__).parents[2]
SIZE = "leaderworkerset.sigs.k8s.io/size"


def find(pods: Iterable[Pod], nodes: Iterable[Node] = (), protocol: Protocol = "triton", **discover: Any) -> Found:
    facts = {one.metadata.name: node_facts(one) for one in nodes}
    return find_endpoints("llama", protocol, "ensemble", DiscoverSpec(selector="a=b", **discover), pods, facts)


def only(pods: Iterable[Pod], nodes: Iterable[Node] = (), protocol: Protocol = "triton", **discover: Any) -> Discovered:
    found = find(pods, nodes, protocol, **discover)
    assert not found.problems
    (one,) = found.endpoints
    return one


def test_a_ready_pod_is_an_endpoint_at_its_address() -> None:
    one = only([pod("a-0")])
    assert one.standing.phase == "ready"
    assert (one.spec.id, one.spec.node) == ("llama/a-0", "n1")
    assert (one.spec.http, one.spec.grpc) == ("http://10.0.0.1:8000", "10.0.0.1:8001")
    assert one.spec.metrics == "http://10.0.0.1:8002/metrics"
    assert only([pod(ip="fd00::1")], protocol="openai").spec.http == "http://[fd00::1]:8000"


def test_ports_come_from_the_pod_then_the_pool_then_names_then_habit() -> None:
    named = {"http": 9000, "grpc": 9001, "front": 9009}
    assert only([pod(ports=named)]).spec.grpc == "10.0.0.1:9001"
    assert only([pod(ports=named)], grpc=7001).spec.grpc == "10.0.0.1:7001"
    assert only([pod(ports=named, annotations={names.GRPC_PORT: "6001"})], grpc=7001).spec.grpc == "10.0.0.1:6001"
    assert only([pod(ports=named, labels={names.HTTP_PORT: "front"})]).spec.http == "http://10.0.0.1:9009"
    openai = only([pod()], protocol="openai").spec
    assert (openai.http, openai.grpc, openai.metrics) == ("http://10.0.0.1:8000", None, None)


@pytest.mark.parametrize(
    "annotations",
    [
        {names.HTTP_PORT: "front"}, {names.GRPC_PORT: "0"}, {names.METRICS_PORT: "65536"}, {names.MODEL: "other"},
        {names.PROTOCOL: "openai"}, {names.ROLE: "chief"}, {names.TENSOR_PARALLEL: "0"}, {names.PIPELINE_PARALLEL: "²"},
    ],
)  # fmt: skip
def test_a_pod_that_says_what_cannot_be_is_left_out_and_named(annotations: dict[str, str]) -> None:
    found = find([pod("bad-0", annotations=annotations), pod("good-0")])
    assert [one.spec.id for one in found.endpoints] == ["llama/good-0"]
    (problem,) = found.problems
    assert "pod bad-0" in problem
    assert next(iter(annotations)) in problem


def test_role_and_parallelism_come_from_the_pod_or_the_pool() -> None:
    one = only([pod(labels={names.LLM_D_ROLE: "decode"}, annotations={names.TENSOR_PARALLEL: "4"})], tp=8, pp=2).spec
    assert (one.role, one.tp, one.pp) == ("decode", 4, 2)
    assert only([pod(labels={names.LLM_D_ROLE: "decode", names.ROLE: "prefill"})]).spec.role == "prefill"
    assert only([pod(labels={names.MODEL: "ensemble", names.PROTOCOL: "triton"})]).spec.role == "both"


@pytest.mark.parametrize("what", [{"phase": "Failed"}, {"phase": "Succeeded"}, {"ip": None}])
def test_a_pod_that_ended_or_has_no_address_is_no_endpoint(what: dict[str, Any]) -> None:
    assert find([pod(**what)]) == Found((), ())


def test_a_pod_that_is_not_ready_is_starting_and_says_what_holds_it_up() -> None:
    one = only([pod("a-0", ready=False, waiting="CrashLoopBackOff", restarts=3)])
    assert one.standing.phase == "starting"
    assert one.standing.why == "pod a-0 is not ready: CrashLoopBackOff, restarted 3 times"
    assert only([pod(ready=None)]).standing.phase == "starting"


def test_a_pod_that_is_deleted_or_evicted_drains_and_one_without_the_time_for_it_is_preempted() -> None:
    assert only([pod("a-0", deleted=True)]).standing.why == "pod a-0 is being deleted"
    assert only([pod(deleted=True, ready=False)]).standing.phase == "draining"
    assert only([pod(disruption="EvictionByEvictionAPI")]).standing.phase == "draining"
    assert only([pod(disruption="TerminationByKubelet", ready=False)]).standing.phase == "preempting"
    assert only([pod(disruption="PreemptionByScheduler", deleted=True)]).standing.phase == "preempting"


@pytest.mark.parametrize("label", names.SPOT_LABELS)
def test_every_clouds_spot_label_makes_its_endpoints_spot(label: str) -> None:
    value = names.SPOT_LABELS[label]
    assert only([pod()], [node(labels={label: value.upper()})]).spec.capacity == "spot"
    assert only([pod()], [node(labels={label: "on-demand"})]).spec.capacity == "on-demand"


def test_zone_instance_type_and_gpu_come_from_the_node() -> None:
    labels = {
        "topology.kubernetes.io/zone": "eu-1a",
        "failure-domain.beta.kubernetes.io/zone": "old",
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    }
    one = only([pod()], [node(labels=labels)])
    assert (one.spec.zone, one.instance_type, one.gpu) == ("eu-1a", "p5.48xlarge", "NVIDIA-H100-80GB-HBM3")
    unknown = only([pod(node=None)], [node(labels=labels)])
    assert (unknown.spec.zone, unknown.spec.node, unknown.spec.capacity) == (None, None, "on-demand")


SPOT = {"karpenter.sh/capacity-type": "spot"}


@pytest.mark.parametrize("taint", sorted(names.PREEMPTION_TAINTS | names.DISRUPTION_TAINTS | names.DRAIN_TAINTS))
def test_every_taint_that_ends_a_node_keeps_new_requests_away(taint: str) -> None:
    on_demand = only([pod()], [node(taints=["nvidia.com/gpu", taint])]).standing
    assert on_demand.phase == ("preempting" if taint in names.PREEMPTION_TAINTS else "draining")
    assert on_demand.why == f"node n1 has taint {taint}"
    spot = only([pod()], [node(taints=[taint], labels=SPOT)]).standing
    assert spot.phase == ("draining" if taint in names.DRAIN_TAINTS else "preempting")


def test_a_cordoned_a_deleted_and_a_failed_node_keep_new_requests_away() -> None:
    assert only([pod()], [node(cordoned=True)]).standing.why == "node n1 is cordoned"
    assert only([pod()], [node(cordoned=True, labels=SPOT)]).standing.phase == "draining"
    assert only([pod()], [node(deleted=True)]).standing.phase == "draining"
    for ready in ("False", "Unknown"):
        assert only([pod()], [node(ready=ready)]).standing.phase == "draining"
        assert only([pod()], [node(ready=ready, labels=SPOT)]).standing.phase == "preempting"
    assert only([pod()], [node(taints=["nvidia.com/gpu", "cloud.google.com/gke-spot"])]).standing.phase == "ready"


def test_a_group_is_one_endpoint_its_leader() -> None:
    one = only([group_pod(0, ip="10.0.0.1"), group_pod(1, ip="10.0.0.2", node="n2")], tp=8, pp=2)
    assert one.standing.phase == "ready"
    assert (one.spec.id, one.spec.http, one.spec.nodes) == ("llama/big-0", "http://10.0.0.1:8000", 2)
    two = find([*(group_pod(i, ip=f"10.0.0.{i}") for i in (0, 1)), *(group_pod(i, group=1) for i in (0, 1))])
    assert [one.spec.id for one in two.endpoints] == ["llama/big-0", "llama/big-1"]


def test_a_group_fails_as_one() -> None:
    def group(**worker: Any) -> tuple[str, str]:
        one = only([group_pod(0), group_pod(1, node="n2", **worker)], [node("n1"), node("n2", labels=SPOT)])
        assert one.spec.capacity == "spot"
        return one.standing.phase, one.standing.why

    assert group(deleted=True) == ("draining", "pod big-0-1 is being deleted")
    assert group(disruption="TerminationByKubelet")[0] == "preempting"
    assert group(phase="Failed") == ("starting", "pod big-0-1 has ended: Failed")
    assert group(ready=False)[0] == "starting"
    gone = only([group_pod(0), group_pod(1, node="n2")], [node("n1"), node("n2", ready="Unknown", labels=SPOT)])
    assert gone.standing.phase == "preempting"
    assert find([group_pod(0, phase="Failed"), group_pod(1)]) == Found((), ())
    assert find([group_pod(1)]) == Found((), ())


def test_a_group_that_is_not_complete_is_starting_and_says_what_is_missing() -> None:
    assert only([group_pod(0, size=3), group_pod(1, size=3)]).standing.why == "2 of its group's 3 pods are there"
    alone = only([group_pod(0)]).standing
    assert (alone.phase, alone.why) == (
        "starting", "1 of its group's 2 pods are there; the pool's selector must find workers too",
    )  # fmt: skip
    assert only([group_pod(0, size=None), group_pod(1, size=None)]).standing.phase == "ready"


def test_pods_of_several_namespaces_are_told_apart() -> None:
    found = find([pod("a-0", namespace="x"), pod("a-0", namespace="y")], namespace="*")
    assert [one.spec.id for one in found.endpoints] == ["llama/x/a-0", "llama/y/a-0"]


def test_ids_that_are_too_long_are_cut_and_stay_apart() -> None:
    found = find([pod(f"{'long' * 40}-{n}") for n in range(2)])
    ids = {one.spec.id for one in found.endpoints}
    assert len(ids) == 2
    assert {len(id_) for id_ in ids} == {128}


def test_every_name_that_discovery_reads_is_in_the_manual() -> None:
    manual = (ROOT / "docs" / "kubernetes.md").read_text()
    known = {*names.OF_PODS, *names.OF_GROUPS, *names.SPOT_LABELS, *names.ZONE_LABELS, *names.INSTANCE_TYPE_LABELS}
    known |= {*names.GPU_LABELS, *names.PREEMPTION_TAINTS, *names.DISRUPTION_TAINTS, *names.DRAIN_TAINTS}
    known |= names.PREEMPTION_REASONS
    assert {name for name in known if f"`{name}" not in manual} == set()


texts = st.text("aZ0-./ ²", max_size=4) | st.sampled_from(
    ["0", "1", "8", "decode", "ensemble", "triton", "http", "65535"]
)
said = st.dictionaries(st.sampled_from([*names.OF_PODS, SIZE, "app"]), texts, max_size=4)
pods = st.fixed_dictionaries(
    {},
    optional={
        "ip": st.none() | st.ip_addresses().map(str) | st.just(""),
        "node": st.none() | st.sampled_from(["n1", "n2"]),
        "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        "ready": st.none() | st.booleans(),
        "deleted": st.booleans(),
        "disruption": st.none() | st.sampled_from(["TerminationByKubelet", "EvictionByEvictionAPI"]),
        "annotations": said,
        "ports": st.dictionaries(st.sampled_from(["http", "grpc", "metrics", "x"]), st.integers(1, 65535), max_size=3),
        "waiting": st.none() | texts,
        "restarts": st.integers(0, 9),
    },
)
nodes = st.fixed_dictionaries(
    {},
    optional={
        "labels": st.dictionaries(st.sampled_from([*names.SPOT_LABELS, *names.ZONE_LABELS]), texts, max_size=3),
        "taints": st.lists(st.sampled_from(sorted(names.DISRUPTION_TAINTS | names.DRAIN_TAINTS)), max_size=2),
        "cordoned": st.booleans(),
        "ready": st.sampled_from(["True", "False", "Unknown"]),
    },
)
places = st.tuples(st.none() | st.integers(0, 1), st.integers(0, 2))
"""The group, if it is in one, and the index."""


@given(
    st.dictionaries(places, pods, max_size=6), st.lists(nodes, max_size=2), st.sampled_from(["openai", "triton"]),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_whatever_there_is_what_comes_out_could_be_published(
    there: dict[tuple[int | None, int], dict[str, Any]], on: list[dict[str, Any]], protocol: Protocol, random: Any
) -> None:
    made = [
        pod_json(f"p{index}", **what) if group is None else group_pod_json(index, group=group, size=None, **what)
        for (group, index), what in there.items()
    ]
    decoded = [msgspec.json.decode(msgspec.json.encode(one), type=Pod) for one in made]
    known = [node(f"n{number}", **what) for number, what in enumerate(on, 1)]
    found = find(decoded, known, protocol)
    pool = PoolSpec(protocol=protocol, model="ensemble")
    ids = [one.spec.id for one in found.endpoints]
    assert ids == sorted(set(ids))
    leaders = {f"llama/big-{group}" for group, index in there if group is not None and index == 0}
    assert {id_ for id_ in ids if id_.startswith("llama/big")} <= leaders
    for one in found.endpoints:
        fields = {name: getattr(one.spec, name) for name in one.spec.__struct_fields__}
        published = msgspec.json.encode(EndpointFields(**fields, pool="llama"))
        assert address_fault(msgspec.json.decode(published, type=EndpointFields), pool) is None
        assert one.standing.phase != "gone"
        assert bool(one.standing.why) == (one.standing.phase != "ready")
        name = one.spec.id.removeprefix("llama/")
        members = [p for p in decoded if p.metadata.name == name or p.metadata.name.startswith(f"{name}-")]
        if one.standing.phase == "ready":
            assert all(any(c.type == "Ready" and c.status == "True" for c in m.status.conditions) for m in members)
            assert all(m.metadata.deletion_timestamp is None for m in members)
    shuffled = list(decoded)
    random.shuffle(shuffled)
    assert find(shuffled, known, protocol) == found, "the order in which they were heard of does not count"


def test_of_two_reasons_the_same_one_is_told_however_pods_were_heard_of() -> None:
    members = [
        msgspec.json.decode(msgspec.json.encode(group_pod_json(index, group=0, size=None, node=on)), type=Pod)
        for index, on in enumerate(("n1", "n2"))
    ]
    known = [node("n1", taints=["ToBeDeletedByClusterAutoscaler"]), node("n2", cordoned=True)]
    assert find(members, known, "openai") == find(members[::-1], known, "openai")
