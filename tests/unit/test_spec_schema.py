"""The strict reader, the types and the JSON Schema agree about what a fleet file may hold."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from headrace.cli.schema import schema_text
from router.spec import fleet, gateway, strict
from router.spec.fleet import FleetSpec
from router.spec.schema import fleet_schema
from router.spec.strict import read_fleet
from router.spec.wording import only_type
from tests.any_fleet import fleets

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(fleet_schema())

Path_ = tuple[str | int, ...]


def plain(spec: FleetSpec) -> dict[str, Any]:
    return dict(msgspec.to_builtins(spec))


class Writer(yaml.SafeDumper):
    """Quotes what is a number in YAML 1.2 only, like `08`: PyYAML follows YAML 1.1."""


Writer.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+.0-9eE]+$"), list("-+.0123456789"))


def written(value: object, flow: bool) -> str:
    # A narrow page, so that values move to lines of their own.
    return str(yaml.dump(value, Dumper=Writer, default_flow_style=flow, allow_unicode=True, sort_keys=False, width=40))


def slots(value: object, type_: inspect.Type, path: Path_ = ()) -> Iterator[tuple[Path_, inspect.Type, object]]:
    """Every value in a plain fleet with its path and type."""
    type_ = only_type(type_, mapping=isinstance(value, dict), number=isinstance(value, int))
    yield path, type_, value
    if isinstance(type_, inspect.StructType) and isinstance(value, dict):
        for field in type_.fields:
            if field.encode_name in value:
                yield from slots(value[field.encode_name], field.type, (*path, field.encode_name))
    elif isinstance(type_, inspect.DictType) and isinstance(value, dict):
        for key, item in value.items():
            yield from slots(item, type_.value_type, (*path, key))
    elif isinstance(type_, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from slots(item, type_.item_type, (*path, index))


def at(value: Any, path: Path_) -> Any:
    for step in path:
        value = value[step]
    return value


@given(fleets(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_fleet_survives_yaml_and_strict_reading_and_fits_the_schema(spec: FleetSpec, flow: bool) -> None:
    reading = read_fleet(written(plain(spec), flow))
    assert reading.problems == []
    assert reading.fleet == spec
    VALIDATOR.validate(plain(spec))


@given(fleets(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_renamed_key_is_refused_by_reader_and_schema_on_its_line(spec: FleetSpec, data: st.DataObject) -> None:
    mutated = copy.deepcopy(plain(spec))
    structs = [
        path
        for path, type_, value in slots(mutated, inspect.type_info(FleetSpec))
        if isinstance(type_, inspect.StructType) and value
    ]
    path = data.draw(st.sampled_from(structs))
    parent = at(mutated, path)
    key = data.draw(st.sampled_from(sorted(parent)))
    parent["renamed_key"] = parent.pop(key)

    text = written(mutated, flow=False)
    found = {problem.path: problem for problem in read_fleet(text).problems}
    problem = found[strict.path_text((*path, "renamed_key"))]
    assert problem.message.startswith("unknown key")
    assert problem.line is not None and problem.column is not None
    assert text.splitlines()[problem.line - 1][problem.column - 1 :].startswith("renamed_key:")
    assert list(VALIDATOR.iter_errors(mutated))


WRONG: dict[type, list[object]] = {
    inspect.StrType: [17, 1.5, True, ["x"], {"x": "y"}],
    inspect.LiteralType: [17, False, "no such choice", ["x"]],
    inspect.IntType: ["17", 1.5, True, -1, {"x": 1}],
    inspect.FloatType: ["1.5", False, -0.5, ["x"]],
    inspect.BoolType: ["true", 1, ["x"]],
    inspect.ListType: ["x", 17, {"x": "y"}],
    inspect.DictType: ["x", 17, ["y"]],
    inspect.StructType: ["x", 17, ["y"]],
}


@given(fleets(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_value_of_the_wrong_type_is_refused_by_reader_and_schema(spec: FleetSpec, data: st.DataObject) -> None:
    mutated = copy.deepcopy(plain(spec))
    places = [
        (path, type_)
        for path, type_, value in slots(mutated, inspect.type_info(FleetSpec))
        if path and value is not None
    ]
    path, type_ = data.draw(st.sampled_from(places))
    wrong = WRONG[type(type_)]
    if path[-1] == "max_in_flight":  # a word or a number
        wrong = [one for one in wrong if one != 17]
    marker = data.draw(st.sampled_from(wrong))
    at(mutated, path[:-1])[path[-1]] = marker

    text = written(mutated, flow=False)
    found = {problem.path: problem for problem in read_fleet(text).problems}
    problem = found[strict.path_text(path)]
    assert problem.line is not None
    if not isinstance(marker, list | dict):  # those start on a line of their own
        assert written(marker, flow=True).splitlines()[0] in text.splitlines()[problem.line - 1]
    assert list(VALIDATOR.iter_errors(mutated))


def test_the_reader_knows_every_kind_of_type_a_fleet_is_made_of() -> None:
    def kinds(type_: inspect.Type) -> Iterator[inspect.Type]:
        if isinstance(type_, inspect.Metadata):
            yield from kinds(type_.type)
        elif isinstance(type_, inspect.UnionType):
            others = [one for one in type_.types if not isinstance(one, inspect.NoneType)]
            words = sum(isinstance(one, inspect.LiteralType) for one in others)
            kinds_of_others = (inspect.StructType, inspect.IntType, inspect.LiteralType)
            plain = [one.type if isinstance(one, inspect.Metadata) else one for one in others]
            decided = len(others) == 2 and words == 1 and all(isinstance(one, kinds_of_others) for one in plain)
            assert len(others) == 1 or decided, "the reader decides by one type"
            for other in others:
                yield from kinds(other)
        else:
            yield type_
            match type_:
                case inspect.StructType():
                    for field in type_.fields:
                        yield from kinds(field.type)
                case inspect.ListType():
                    yield from kinds(type_.item_type)
                case inspect.DictType():
                    yield from kinds(type_.key_type)
                    yield from kinds(type_.value_type)

    for type_ in kinds(inspect.type_info(FleetSpec)):
        assert type(type_) in strict._WANTED
        # Constraints the walk does not enforce itself must not appear unnoticed.
        assert isinstance(type_, inspect.StrType) or getattr(type_, "min_length", None) is None
        for constraint in ("max_length", "lt", "multiple_of"):
            assert getattr(type_, constraint, None) is None


def test_the_schema_in_docs_is_the_one_generated_from_the_types() -> None:
    assert (ROOT / "docs" / "fleet.schema.json").read_text() == schema_text(), "run make schema"


def test_the_schema_is_a_valid_schema_that_explains_the_fields() -> None:
    schema = fleet_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert all(definition["additionalProperties"] is False for definition in schema["$defs"].values())
    endpoint = schema["$defs"]["EndpointSpec"]["properties"]
    assert endpoint["http"]["description"] == (
        "Base URL of the engine's HTTP API (protocol `openai` needs it, and so does transport `http`)."
    )


def test_the_example_fits_the_schema() -> None:
    VALIDATOR.validate(yaml.safe_load((ROOT / "examples" / "fleet.yaml").read_text()))


@pytest.mark.parametrize(
    "name",
    [
        *("EndpointSpec", "PoolSpec", "RouteSpec", "FleetSpec", "GatewaySpec", "TimeoutSpec"),
        *("OutlierSpec", "OverloadSpec", "RetrySpec", "ProbeSpec", "TenantSpec", "LimitSpec", "KeySpec", "AuthSpec"),
        *("TlsSpec", "AdminTlsSpec", "ClientsSpec", "JwtSpec"),
    ],
)
def test_every_field_is_in_the_configuration_reference(name: str) -> None:
    reference = (ROOT / "docs" / "configuration.md").read_text()
    for field in {**vars(fleet), **vars(gateway)}[name].__struct_fields__:
        assert f"`{field}`" in reference
