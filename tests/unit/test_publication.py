"""What of the cluster is published, and what is left as it was."""

import msgspec
import pytest

from k8s.endpoints import Discovered, find_endpoints
from k8s.nodes import node_facts
from k8s.objects import InferencePool
from k8s.publication import TargetError, differ, publication, targeted
from router.fleet import FleetView, compile_view
from router.merge import merge
from router.spec.documents import Document, file_documents
from router.spec.fleet import DiscoverSpec, FleetSpec, PoolSpec
from tests.kubernetes_objects import node, pod

DISCOVER = DiscoverSpec(selector="app=engine")


def found(*pods: str, pool: str = "p", **what: bool) -> tuple[Discovered, ...]:
    made = [pod(name, **what) for name in pods]
    labels = {"nvidia.com/gpu.product": "H100", "node.kubernetes.io/instance-type": "p5"}
    return find_endpoints(pool, "openai", "m", DISCOVER, made, {"n1": node_facts(node(labels=labels))}).endpoints


def ids(documents: list[Document]) -> list[str]:
    return [one.id for one in documents]


def test_what_is_not_found_is_gone_and_what_is_not_known_stays() -> None:
    before = publication({"p": found("a", "b"), "q": found("c", pool="q")}, [])
    assert ids(before) == ["p/a", "p/b", "q/c"]
    assert ids(publication({"p": found("a"), "q": ()}, before)) == ["p/a"]
    assert ids(publication({"p": None, "q": ()}, before)) == ["p/a", "p/b"]
    assert ids(publication({"p": None}, before)) == ["p/a", "p/b"], "q discovers nothing any more"
    assert not differ(publication({"p": None, "q": None}, before), before)


def test_only_changes_are_published() -> None:
    before = publication({"p": found("a")}, [])
    assert not differ(publication({"p": found("a")}, before), before)
    assert differ(publication({"p": found("a", ready=False)}, before), before)


def test_a_gateway_sees_what_the_cluster_says_and_probes_do_not_overrule_it() -> None:
    spec = msgspec.convert({"fleet": "f", "pools": {"p": {"protocol": "openai", "model": "m"}}}, FleetSpec)
    file = file_documents(spec, content_hash="h")
    overlay = Document(family="endpoints", id="p/a", source="cli", generation=1, spec=msgspec.Raw(b'{"drain": true}'))
    expected: list[tuple[dict[str, bool], str, str]] = [
        ({}, "ready", ""),
        ({"ready": False}, "starting", "pod a is not ready"),
        ({"deleted": True}, "draining", "pod a is being deleted"),
    ]
    for what, phase, why in expected:
        documents = publication({"p": found("a", pool="p", **what)}, [])
        endpoint = compile_view(merge([*file, *documents]), FleetView()).endpoints["p/a"]
        assert (endpoint.spec.gpu, endpoint.spec.instance_type) == ("H100", "p5")
        assert endpoint.phase == "starting"
        endpoint.state.phase, endpoint.state.detail = "ready", ""
        assert (endpoint.phase, endpoint.detail) == (phase, why)
        endpoint.state.phase, endpoint.state.detail = "unhealthy", "refused"
        assert endpoint.phase == ("starting" if phase == "starting" else "unhealthy"), "what is down is down"
        drained = compile_view(merge([*file, *documents, overlay]), FleetView()).endpoints["p/a"]
        drained.state.phase = "ready"
        assert drained.phase == (phase if what else "draining")


def inference_pool(spec: object) -> InferencePool:
    return msgspec.convert({"metadata": {"name": "vllm", "namespace": "llm"}, "spec": spec}, InferencePool)


def test_an_inference_pool_stands_for_selector_and_port_of_the_api_that_is_called() -> None:
    there = inference_pool(
        {"selector": {"matchLabels": {"b": "2", "a": "1"}}, "targetPorts": [{"number": 7}, {"number": 8}]}
    )
    discover = DiscoverSpec(inference_pool="vllm")
    openai, triton = PoolSpec(protocol="openai", model="m"), PoolSpec(protocol="triton", model="m")
    exact = targeted("p", openai, discover, [there])
    assert (exact.selector, exact.http, exact.grpc) == ("a=1,b=2", 7, None)
    assert targeted("p", triton, discover, [there]).grpc == 7
    assert targeted("p", openai, DiscoverSpec(inference_pool="vllm", http=9), [there]).http == 9
    assert targeted("p", openai, DISCOVER, []) is DISCOVER
    with pytest.raises(TargetError, match="there is no InferencePool vllm"):
        targeted("p", openai, discover, [])
    with pytest.raises(TargetError, match="selects every pod"):
        targeted("p", openai, discover, [inference_pool({"selector": {}})])
