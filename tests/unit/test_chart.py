"""The Helm chart, rendered by Helm's own engine: what it makes is valid, safe, and a fleet that a gateway can serve.

`CHART_VALUE_SETS` says how many generated sets of values are tried.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.chart_schema import schema_text
from router.spec.units import seconds
from tests.chart_checks import check, check_fleet, fleet_of, pods
from tests.helm import CHART, EXAMPLES, NAMESPACE, Document, Helm, HelmError

EVERYTHING: Document = {
    "files": {"template.jinja": 'a: "b"\n'},
    "gateway": {
        "workers": 4,
        "adminTokenSecret": "admin",
        "tlsSecret": "tls",
        "autoscaling": {"enabled": True, "cpuPercent": 70},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "env": [{"name": "A", "value": "b"}],
        "volumes": [{"name": "more", "emptyDir": {}}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
    "image": {"pullSecrets": [{"name": "pull"}]},
    "redis": {"url": "rediss://redis:6379", "tlsSecret": "redis-tls"},
    "tenantsSecret": "tenants",
    "network": {
        "admin": [{"namespaceSelector": {}}],
        "clients": [{"namespaceSelector": {}}],
        "httpRoute": {"parents": [{"name": "public"}], "hostnames": ["llm.example.com"]},
        "ingress": {"host": "llm.example.com", "className": "nginx", "tlsSecret": "public"},
    },
    "monitoring": {"serviceMonitor": "always", "rules": "always", "dashboard": True, "labels": {"release": "p"}},
    "spot": {"provider": "gke"},
    "backends": {
        "group": {
            "model": "m",
            "nodes": 2,
            "tensorParallel": 8,
            "pipelineParallel": 2,
            "tuning": {
                "maxBatchSize": 8,
                "maxNumTokens": 8192,
                "maxSequenceLength": 4096,
                "chunkedContext": False,
                "kvReuse": False,
                "kvFraction": 0.8,
                "kvDtype": "fp8",
                "quantization": "fp8",
                "speculative": {"method": "ngram", "num_speculative_tokens": 3},
            },
        },
        "served": {"engine": "trtllm-serve", "model": "m", "spotReplicas": 2, "tuning": {"options": {"x": 1}}},
        "other": {
            "engine": "openai",
            "image": "a:1",
            "model": "m",
            "command": ["run"],
            "gpuResource": "",
            "replicas": 2,
        },
    },
}


@pytest.fixture(scope="module")
def helm() -> Iterator[Helm]:
    with Helm() as helm:
        yield helm


def values_of(example: Path) -> Document:
    values: Document = yaml.safe_load(example.read_text())
    return values


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_an_example_is_valid_safe_and_a_fleet_that_serves_its_models(helm: Helm, example: Path) -> None:
    values = values_of(example)
    assert helm.lint(values) == []
    fleet = check(helm.documents(values))
    assert set(values["backends"]) == set(fleet.pools)
    used = {name for route in fleet.routes.values() for name in (route.pool, *route.fallback)}
    assert used == set(fleet.pools)


def test_everything_at_once_is_valid_and_safe(helm: Helm) -> None:
    documents = helm.documents(EVERYTHING)
    check(documents)
    kinds = {one["kind"] for one in documents}
    assert {"HorizontalPodAutoscaler", "HTTPRoute", "Ingress", "LeaderWorkerSet", "ServiceMonitor"} <= kinds
    assert "Secret" not in kinds, "with a Redis of one's own there is none to bundle"


def test_the_default_is_short_and_lets_nobody_in(helm: Helm) -> None:
    files = helm.files({})
    lines = [line for name, text in files.items() if name != "NOTES.txt" for line in text.splitlines() if line.strip()]
    assert len(lines) < 600
    documents = helm.documents({})
    check(documents)
    fleet = fleet_of(documents)
    assert (fleet.gateway.auth.anonymous, fleet.tenants) == ("deny", {})
    assert "NOBODY may call yet" in files["NOTES.txt"]
    (test,) = [one for one in documents if one["kind"] == "Pod"]
    assert "wanted = 401" in test["spec"]["containers"][0]["args"][0]


def test_the_notes_and_the_test_say_so_where_anybody_may_call(helm: Helm) -> None:
    files = helm.files({"fleet": {"gateway": {"auth": {"anonymous": "allow"}}}})
    assert "ANYBODY who reaches the gateways may call" in files["NOTES.txt"]
    assert "wanted = 200" in files["tests/serves.yaml"]


def test_a_common_case_takes_less_than_twenty_lines_of_values() -> None:
    common = [example for example in EXAMPLES if "405b" not in example.name]
    assert len(common) == 4
    for example in common:
        assert len([line for line in example.read_text().splitlines() if not line.startswith("#")]) < 20, example.name


@pytest.mark.parametrize(
    ("drain", "wanted"),
    [({}, 320), ({"settle": "0s", "grace": "10m"}, 615), ({"settle": "1500ms", "grace": "1.5h"}, 5417)],
)
def test_a_gateway_has_the_time_that_its_streams_may_take(helm: Helm, drain: Document, wanted: int) -> None:
    documents = helm.documents({"fleet": {"gateway": {"drain": drain}}})
    (gateway,) = [one for one in documents if (one["kind"], one["metadata"]["name"]) == ("Deployment", "headrace")]
    grace = gateway["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    told = fleet_of(documents).gateway.drain
    assert grace == wanted
    assert grace > seconds(told.settle) + seconds(told.grace)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"gatway": {}}, "additional properties 'gatway' not allowed"),
        ({"gateway": {"replicas": "two"}}, "/gateway/replicas"),
        ({"fleet": {"pools": {"x": {"protocol": "opnai", "model": "m"}}}}, "/fleet/pools/x/protocol"),
        ({"fleet": {"gateway": {"drain": {"grace": 300}}}}, "/fleet/gateway/drain/grace"),
        ({"fleet": {"gateway": {"http": ":80"}}}, "'http' not allowed"),
        ({"fleet": {"redis": {}}}, "'redis' not allowed"),
        ({"backends": {"a": {"engine": "vlm"}}}, "/backends/a/engine"),
        ({"backends": {"a": {"pool": {"timeouts": {"idle": "5"}}}}}, "/backends/a/pool/timeouts/idle"),
        ({"backends": {"A_b": {"model": "m"}}}, "A_b"),
        ({"redis": {"url": "redis://:secret@host"}}, "/redis/url"),
        ({"backends": {"a": {}}}, "backends.a.model is missing"),
        ({"backends": {"a": {"model": "m", "tensorParallel": 3, "nodes": 2}}}, "backends.a: tensorParallel"),
        ({"backends": {"a": {"model": "m", "engine": "trtllm-serve", "nodes": 2, "tensorParallel": 2}}}, "backends.a:"),
        ({"backends": {"a": {"model": "m", "engine": "openai"}}}, "backends.a.image is missing"),
        ({"backends": {"a": {"model": "m", "engine": "triton"}}}, "backends.a.triton.repository is missing"),
        ({"backends": {"a": {"model": "m", "spotReplicas": 1}}}, "spot.provider is missing"),
        (
            {"backends": {"a": {"model": "m"}}, "fleet": {"pools": {"a": {"protocol": "openai", "model": "m"}}}},
            "fleet.pools.a: backends.a makes the pool of that name",
        ),
        ({"tenantsSecret": "t", "fleet": {"tenants": {"a": {}}}}, "keep one"),
        ({"files": {"more.yaml": ""}}, "files.more.yaml"),
    ],
)
def test_a_mistake_in_the_values_is_told_with_its_path(helm: Helm, values: Document, told: str) -> None:
    with pytest.raises(HelmError, match=re.escape(told)):
        helm.documents(values)


def test_the_schema_is_that_of_the_types_and_the_values() -> None:
    made = schema_text((CHART / "values.yaml").read_text())
    assert (CHART / "values.schema.json").read_text() == made, "run `make schema`"
    assert "(?" not in made, "Go knows no look-ahead"


def branches(value: object, path: str) -> Iterator[tuple[str, object]]:
    if path:
        yield path, value
    if isinstance(value, dict):
        for name, one in value.items():
            yield from branches(one, f"{path}.{name}")


def test_every_value_is_used() -> None:
    """A template names a value by its whole path, or below a `with` of what is around it; `b` and `$t` are a backend
    and its tuning."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    around = {path for path, value in branches(values, "") if isinstance(value, dict) and value}
    uses: set[str] = set()
    for template in (path.read_text() for path in (CHART / "templates").rglob("*.*")):
        template = re.sub(r"(?<!\w)\.?\$?\bb\.(?=[a-z])", ".Values.backendDefaults.", template)
        template = re.sub(r"\$t\.(?=[a-z])", ".Values.backendDefaults.tuning.", template)
        uses |= set(re.findall(r"\.Values((?:\.\w+)+)", template))
        for parent in re.findall(r"\bwith \$?\.Values((?:\.\w+)+)", template):
            uses |= {f"{parent}{name}" for name in re.findall(r"(?<![\w$])(\.[a-z]\w*)", template)}
    for path, value in branches(values, ""):
        if not (isinstance(value, dict) and value):
            steps = path.split(".")[1:]
            wholes = {"." + ".".join(steps[:length]) for length in range(1, len(steps) + 1)} - around
            wholes |= {one for one in around if path.startswith(f"{one}.") and one.endswith(("resources", "engines"))}
            assert wholes & uses, f"{path[1:]} is in values.yaml and in no template"


def test_what_the_cluster_does_not_know_is_not_sent_unless_it_is_asked_for(helm: Helm) -> None:
    kinds = {one["kind"] for one in helm.documents({})}
    assert not kinds & {"ServiceMonitor", "PrometheusRule", "LeaderWorkerSet", "HTTPRoute"}
    never = {"monitoring": {"serviceMonitor": "never", "rules": "never"}}
    assert {one["kind"] for one in helm.documents(never)} == kinds
    always = {"monitoring": {"serviceMonitor": "always", "rules": "always"}}
    assert {one["kind"] for one in helm.documents(always)} - kinds == {"ServiceMonitor", "PrometheusRule"}


NAMED: Document = {"discovery": {"enabled": False}}
"""Engines stand in the fleet file by their names."""


def test_spot_and_on_demand_replicas_are_one_pool_on_different_nodes(helm: Helm) -> None:
    values = values_of(next(example for example in EXAMPLES if example.stem == "mixed-spot"))
    documents = helm.documents({**values, **NAMED})
    pool = fleet_of(documents).pools["qwen-32b"]
    assert [endpoint.capacity for endpoint in pool.endpoints] == ["on-demand"] * 2 + ["spot"] * 4
    operators = {}
    for name, pod in pods(documents):
        for term in pod["spec"].get("affinity", {}).get("nodeAffinity", {}).values():
            (match,) = term["nodeSelectorTerms"][0]["matchExpressions"]
            operators[name.removeprefix("StatefulSet headrace-")] = match["operator"], match["values"]
    assert operators == {
        "qwen-32b": ("NotIn", ["spot"]),
        "qwen-32b-spot": ("In", ["spot"]),
        "qwen-8b": ("NotIn", ["spot"]),
    }


def test_a_group_of_nodes_is_one_endpoint_its_leader(helm: Helm) -> None:
    values = values_of(next(example for example in EXAMPLES if "405b" in example.stem))
    documents = helm.documents({**values, **NAMED})
    check_fleet(documents)
    (endpoint,) = fleet_of(documents).pools["llama-405b"].endpoints
    assert (endpoint.tp, endpoint.pp, endpoint.nodes) == (8, 2, 2)
    assert endpoint.grpc == "headrace-llama-405b-0.headrace-llama-405b.ai.svc:8001"
    (group,) = [one for one in documents if one["kind"] == "LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    leader, worker = (template[role]["spec"]["containers"][0] for role in ("leaderTemplate", "workerTemplate"))
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == worker["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert leader["command"][-1] == "serve"
    assert worker["command"][-1] == "worker"
    assert [port["name"] for port in worker["ports"]] == ["ssh"]


def test_what_is_tuned_reaches_the_engine(helm: Helm) -> None:
    tuning = {
        "maxBatchSize": 64, "chunkedContext": True, "kvReuse": False, "kvFraction": 0.8, "kvDtype": "fp8",
        "speculative": {"method": "ngram", "num_speculative_tokens": 3},
    }  # fmt: skip
    for engine, wanted in {
        "vllm": [
            "--max-num-seqs=64",
            "--enable-chunked-prefill",
            "--no-enable-prefix-caching",
            "--gpu-memory-utilization=0.8",
            "--kv-cache-dtype=fp8",
            '--speculative-config={"method":"ngram","num_speculative_tokens":3}',
        ],
        "trtllm-serve": ["--max_batch_size=64"],
    }.items():
        documents = helm.documents({"backends": {"a": {"engine": engine, "model": "m", "tuning": tuning}}})
        (pod,) = [pod for name, pod in pods(documents) if name == "StatefulSet headrace-a"]
        assert set(wanted) <= set(pod["spec"]["containers"][0]["args"])
    (files,) = [one["data"] for one in documents if one["metadata"]["name"] == "headrace-a" and "data" in one]
    assert yaml.safe_load(files["options.yaml"]) == {
        "return_perf_metrics": True,
        "enable_chunked_prefill": True,
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.8, "dtype": "fp8"},
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }


def test_a_redis_of_ones_own_takes_the_place_of_the_bundled_one(helm: Helm) -> None:
    def environment(redis: Document) -> Any:
        documents = helm.documents({"redis": redis})
        (gateway,) = [pod for name, pod in pods(documents) if name == "Deployment headrace"]
        bundled = any(one["metadata"]["name"] == "headrace-redis" for one in documents)
        variables = {one.pop("name"): one for one in gateway["spec"]["containers"][0]["env"]}
        return bundled, variables.get("HEADRACE_REDIS_URL")

    assert environment({}) == (True, {"value": "redis://:$(REDIS_PASSWORD)@headrace-redis:6379"})
    assert environment({"url": "redis://r:6379"}) == (False, {"value": "redis://r:6379"})
    secret = {"valueFrom": {"secretKeyRef": {"name": "s", "key": "url"}}}
    assert environment({"urlSecret": "s"}) == (False, secret)
    assert environment({"bundled": False}) == (False, None)


def test_a_changed_fleet_rolls_the_gateways_and_nothing_else_does(helm: Helm) -> None:
    def mark(values: Document) -> str:
        (gateway,) = [pod for name, pod in pods(helm.documents(values)) if name == "Deployment headrace"]
        found: str = gateway["metadata"]["annotations"]["checksum/fleet"]
        return found

    assert mark({}) == mark({"monitoring": {"dashboard": True}})
    assert mark({}) != mark({"fleet": {"gateway": {"drain": {"grace": "60s"}}}})
    assert mark({"files": {"a": "1"}}) != mark({"files": {"a": "2"}})


def test_discovery_may_read_what_the_pools_are_to_be_found_in_and_nothing_else(helm: Helm) -> None:
    def rights(values: Document) -> set[tuple[str, str, str]]:
        """Kind, namespace and resources of each role."""
        return {
            (one["kind"], one["metadata"].get("namespace", NAMESPACE), ",".join(rule["resources"]))
            for one in helm.documents(values)
            if one["kind"] in ("Role", "ClusterRole")
            for rule in one["rules"]
        }

    backends = {"a": {"model": "m"}}
    nodes = ("ClusterRole", NAMESPACE, "nodes")
    leases = ("Role", NAMESPACE, "leases")
    assert rights({}) == set()
    assert rights({"backends": backends}) == {("Role", NAMESPACE, "pods"), leases, nodes}
    assert rights({"backends": backends, "discovery": {"nodes": False}}) == {("Role", NAMESPACE, "pods"), leases}
    assert rights({"backends": backends, **NAMED}) == set()
    assert rights({"backends": backends, "redis": {"bundled": False}}) == set()
    elsewhere = {"protocol": "openai", "model": "m", "discover": {"inference_pool": "x", "namespace": "other"}}
    assert rights({"fleet": {"pools": {"x": elsewhere}}}) == {
        ("Role", "other", "pods"), ("Role", "other", "inferencepools"), leases, nodes,
    }  # fmt: skip
    everywhere = {"protocol": "openai", "model": "m", "discover": {"selector": "a=b", "namespace": "*"}}
    assert rights({"fleet": {"pools": {"x": everywhere}}}) == {("ClusterRole", NAMESPACE, "pods"), leases, nodes}


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Document]:
    return st.fixed_dictionaries({}, optional=fields)


small, flag = st.integers(1, 8), st.booleans()
tuning_sets = maybe(
    maxBatchSize=small,
    maxNumTokens=st.integers(1, 2**20),
    chunkedContext=flag,
    kvReuse=flag,
    kvFraction=st.floats(0.1, 1).map(lambda value: round(value, 2)),
    kvDtype=st.sampled_from(["", "fp8"]),
    speculative=st.just({"decoding_mode": "medusa"}),
)
parallel = st.sampled_from([(1, 1, 1), (2, 1, 1), (8, 1, 1), (8, 2, 2), (4, 2, 1), (8, 4, 4)])


@st.composite
def backend_sets(draw: st.DrawFn) -> Document:
    engine = draw(st.sampled_from(["vllm", "trtllm-serve", "triton", "openai"]))
    tp, pp, nodes = draw(parallel)
    if engine not in ("vllm", "triton"):
        nodes = 1
    backend: Document = {"engine": engine, "model": "org/model-1.5", "tensorParallel": tp, "pipelineParallel": pp}
    backend |= {"nodes": nodes, "tuning": draw(tuning_sets)}
    backend |= draw(maybe(replicas=st.integers(0, 3), spotReplicas=st.integers(0, 3), port=st.integers(1024, 7000)))
    backend |= draw(
        maybe(
            volume=st.just({"persistentVolumeClaim": {"claimName": "models"}}),
            resources=st.just({"requests": {"cpu": "8"}, "limits": {"cpu": "16"}}),
            tolerations=st.just([{"operator": "Exists"}]),
            nodeSelector=st.just({"a": "b"}),
            env=st.just([{"name": "A", "value": "b"}]),
            pool=st.just({"price": {"usd_per_gpu_hour": 2.5}, "max_in_flight": 8}),
        )
    )
    if engine == "openai":
        backend["image"] = "server:1"
    if engine == "triton":
        backend["triton"] = {"repository": "/models/repository", "sshSecret": "ssh"}
    return backend


value_sets = st.fixed_dictionaries(
    {"spot": st.sampled_from(["gke", "eks", "karpenter", "aks"]).map(lambda name: {"provider": name})},
    optional={
        "backends": st.dictionaries(st.from_regex(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", fullmatch=True).filter(
            lambda name: not name.endswith("-spot")), backend_sets(), max_size=3),
        "gateway": maybe(
            replicas=small, workers=small, autoscaling=maybe(enabled=flag, streams=st.none() | small, cpuPercent=small),
            maxUnavailable=st.sampled_from([1, "25%"]), tlsSecret=st.just("tls"), adminTokenSecret=st.just("admin"),
        ),
        "discovery": maybe(enabled=flag, nodes=flag),
        "redis": maybe(bundled=flag, url=st.just("rediss://r:6379"), urlSecret=st.just("s"), tlsSecret=st.just("t")),
        "network": maybe(policies=flag, ingress=maybe(host=st.just("a.example.com"), tlsSecret=st.just("t")),
                         httpRoute=maybe(parents=st.just([{"name": "g"}]))),
        "monitoring": maybe(serviceMonitor=st.sampled_from(["auto", "always", "never"]), dashboard=flag),
        "tenantsSecret": st.just("tenants"),
        "fleet": maybe(
            gateway=maybe(drain=maybe(settle=st.just("0s"), grace=st.just("10m")), access_log=st.just("stdout")),
            pools=st.just({"outside": {"protocol": "openai", "model": "m",
                                       "endpoints": [{"id": "out", "http": "http://10.0.0.1:8000"}]}}),
            routes=st.just({"outside": {"pool": "outside"}}),
        ).filter(lambda fleet: "routes" not in fleet or "pools" in fleet),
    },
)  # fmt: skip


@settings(
    max_examples=int(os.environ.get("CHART_VALUE_SETS", "30")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(values=value_sets, release=st.sampled_from(["headrace", "a", "a-very-long-name-of-a-release-that-is-cut-off"]))
def test_whatever_the_values_what_comes_of_them_is_valid_safe_and_a_fleet(
    helm: Helm, values: Document, release: str
) -> None:
    check(helm.documents(values, release))
