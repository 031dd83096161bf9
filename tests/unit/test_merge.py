"""Merging the documents of several sources, for any set of documents."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.merge import MergedFleet, merge
from router.spec.documents import SOURCES, Document, Family, Source, file_documents
from router.spec.fleet import FleetSpec


def document(family: Family, id_: str, source: Source, spec: Any, generation: int = 1) -> Document:
    raw = msgspec.Raw(json.dumps(spec).encode())
    return Document(family=family, id=id_, source=source, generation=generation, spec=raw)


pool_fields: dict[str, st.SearchStrategy[Any]] = {
    "protocol": st.sampled_from(["openai", "triton", "carrier pigeon"]),
    "model": st.sampled_from(["m", "n", 7]),
    "kv_block_tokens": st.sampled_from([16, 32]),
}
endpoint_fields: dict[str, st.SearchStrategy[Any]] = {
    "pool": st.sampled_from(["p", "q"]),
    "http": st.sampled_from(["http://127.0.0.1:1", "ftp://x"]),
    "zone": st.sampled_from(["a", "b", None]),
    "drain": st.booleans(),
    "from_a_newer_headrace": st.integers(),
}
route_fields: dict[str, st.SearchStrategy[Any]] = {
    "pool": st.sampled_from(["p", "q"]),
    "pools": st.just([{"pool": "p", "weight": 2}]),
    "fallback": st.sampled_from([[], ["q"]]),
}


def documents_of(family: Family, fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Document]:
    specs: st.SearchStrategy[Any] = st.fixed_dictionaries({}, optional=fields) | st.sampled_from([[], 3, None])
    return st.builds(
        document, st.just(family), st.sampled_from(["x", "org/y"]), st.sampled_from(SOURCES), specs, st.integers(1, 3)
    )


any_documents = st.lists(
    documents_of("pools", pool_fields)
    | documents_of("endpoints", endpoint_fields)
    | documents_of("routes", route_fields),
    max_size=12,
)


@given(any_documents, st.randoms(use_true_random=False))
def test_the_order_of_documents_does_not_matter(documents: list[Document], random: Any) -> None:
    shuffled = list(documents)
    random.shuffle(shuffled)
    assert merge(shuffled) == merge(documents)


@given(any_documents)
def test_saying_everything_twice_changes_nothing(documents: list[Document]) -> None:
    assert merge([*documents, *documents]) == merge(documents)


@given(any_documents)
def test_every_id_is_in_the_fleet_or_a_problem_or_an_overlay_without_a_base(documents: list[Document]) -> None:
    fleet = merge(documents)
    assert set(fleet.sources) == {(d.family, d.id) for d in documents}
    for family, id_ in fleet.sources:
        part: dict[str, Any] = getattr(fleet, family)
        named = any(f"{family[:-1]} {id_} " in problem for problem in fleet.problems)
        required = {"endpoints": {"pool"}, "pools": {"protocol", "model"}, "routes": {"pool", "pools", "fallback"}}
        words = [json.loads(bytes(d.spec)) for d in documents if (d.family, d.id) == (family, id_)]
        said = {key for spec in words if isinstance(spec, dict) for key in spec}
        assert id_ in part or named or not (said & required[family]) or superseded(documents, family, id_)


def superseded(documents: list[Document], family: Family, id_: str) -> bool:
    """Several generations of one source's document: what the older ones said does not count."""
    sources = [d.source for d in documents if (d.family, d.id) == (family, id_)]
    return len(sources) != len(set(sources))


@given(st.dictionaries(st.sampled_from(SOURCES), st.fixed_dictionaries({}, optional={
    "zone": st.sampled_from(["a", "b", "c"]), "drain": st.booleans(), "node": st.sampled_from(["m", "n"]),
})))  # fmt: skip
def test_a_stronger_source_wins_field_by_field(layers: dict[Source, dict[str, Any]]) -> None:
    base = {"pool": "p", "http": "http://127.0.0.1:1"}
    layers = {**layers, "file": {**layers.get("file", {}), **base}}
    endpoint = merge(document("endpoints", "x", source, spec) for source, spec in layers.items()).endpoints["x"]
    for name, default in (("zone", None), ("drain", False), ("node", None)):
        said = [layers[source][name] for source in SOURCES if name in layers.get(source, {})]
        assert getattr(endpoint, name) == (said[-1] if said else default)
    assert merge([document("endpoints", "x", "file", layers["file"])]).sources["endpoints", "x"] == ("file",)


def test_an_overlay_waits_silently_for_its_base() -> None:
    overlay = document("endpoints", "x", "cli", {"drain": True})
    alone = merge([overlay])
    assert alone.endpoints == {}
    assert alone.problems == ()
    assert alone.sources == {("endpoints", "x"): ("cli",)}
    assert merge([overlay, document("endpoints", "x", "file", {"pool": "p"})]).endpoints["x"].drain


def test_what_does_not_convert_is_named_with_its_sources_and_takes_nothing_else_away() -> None:
    fleet = merge(
        [
            document("endpoints", "bad", "file", {"pool": "p"}),
            document("endpoints", "bad", "cli", {"tp": "two"}),
            document("endpoints", "good", "file", {"pool": "p"}),
        ]
    )
    assert set(fleet.endpoints) == {"good"}
    (problem,) = fleet.problems
    assert "endpoint bad" in problem
    assert "file, cli" in problem
    assert "`tp`: expected a whole number, found a string" in problem


def test_a_route_set_to_one_pool_is_not_split_as_the_file_says() -> None:
    split = document("routes", "r", "file", {"pools": [{"pool": "p"}, {"pool": "q"}], "fallback": ["z"]})
    route = merge([split, document("routes", "r", "cli", {"pool": "x"})]).routes["r"]
    assert (route.pool, route.pools, route.fallback) == ("x", [], ["z"])


def test_a_newer_document_of_the_same_source_counts() -> None:
    old = document("pools", "p", "file", {"protocol": "openai", "model": "old"}, generation=1)
    new = document("pools", "p", "file", {"protocol": "openai", "model": "new"}, generation=2)
    assert merge([new, old]).pools["p"].model == "new"


def test_a_fleet_file_survives_the_way_through_its_documents() -> None:
    fleet = msgspec.convert(
        {
            "fleet": "demo",
            "pools": {"p": {"protocol": "triton", "model": "ensemble", "endpoints": [
                {"id": "a", "grpc": "127.0.0.1:1", "zone": "b", "capacity": "spot"}]}},
            "routes": {"org/r": {"pools": [{"pool": "p", "weight": 2}], "fallback": ["p"]}},
        },
        FleetSpec,
    )  # fmt: skip
    merged: MergedFleet = merge(file_documents(fleet, content_hash="h"))
    assert merged.problems == ()
    assert merged.routes == fleet.routes
    assert merged.pools["p"] == msgspec.structs.replace(fleet.pools["p"], endpoints=[])
    endpoint = merged.endpoints["a"]
    assert (endpoint.pool, endpoint.grpc, endpoint.zone, endpoint.capacity) == ("p", "127.0.0.1:1", "b", "spot")


@pytest.mark.parametrize("spec", [b"[" * 100_000, b'{"zone":"\xff"}', b'{"a":' * 5000 + b"1" + b"}" * 5000])
def test_a_spec_that_no_reader_can_read_is_a_problem_and_no_more(spec: bytes) -> None:
    unreadable = Document(family="endpoints", id="e", source="cli", generation=1, spec=msgspec.Raw(spec))
    assert len(merge([unreadable]).problems) == 1
