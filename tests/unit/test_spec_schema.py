"""The strict reader, the types and the JSON Schema agree about what a fleet file may hold."""

import copy
import re
import string
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
from router.spec import fleet, strict
from router.spec.fleet import (
    AdminTlsSpec,
    AuthSpec,
    ChatTemplateSpec,
    ClientsSpec,
    DiscoverSpec,
    DrainSpec,
    EndpointSpec,
    FleetSpec,
    GatewaySpec,
    JwtSpec,
    KeySpec,
    LimitSpec,
    OutlierSpec,
    OverloadSpec,
    PoolSpec,
    PriceSpec,
    ProbeSpec,
    QueueSpec,
    RedisSpec,
    ReplaceSpec,
    RetentionSpec,
    RetrySpec,
    RouteSpec,
    SecretSpec,
    TenantSpec,
    TimeoutLimitSpec,
    TimeoutSpec,
    TlsSpec,
    TokenizerSpec,
    TracingSpec,
    WeightedPool,
)
from router.spec.schema import fleet_schema
from router.spec.strict import read_fleet
from router.spec.units import LOG_PATTERN, seconds, share
from router.spec.wording import only_type

ROOT = Path(__file__).parents[2]
LOG = re.compile(LOG_PATTERN)
VALIDATOR = jsonschema.Draft202012Validator(fleet_schema())

Path_ = tuple[str | int, ...]

names = st.from_regex(r"[A-Za-z][A-Za-z0-9._/-]{0,12}", fullmatch=True)
words = st.text(string.ascii_letters + string.digits + " :#{}[]'\"|>-äß水🌊\n\\", max_size=12)
durations = st.from_regex(r"[1-9][0-9]{0,3}(\.[0-9]{1,2})?(ms|s|m|h)", fullmatch=True)
durations_or_off = durations | st.just("off")
host_names = st.from_regex(r"([a-z0-9]{1,3}[-_.])*[a-z]", fullmatch=True) | st.ip_addresses(v=4).map(str)
hosts = host_names | st.ip_addresses(v=6).map(lambda address: f"[{address.exploded}]")
positive = st.integers(1, 2**40)
percents = st.from_regex(r"(100|[0-9]{1,2}(\.[0-9]{1,2})?)%", fullmatch=True)
money = st.none() | st.floats(0, 1e6)


def struct(type_: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of a type; a test below holds that every field of it is generated."""
    assert set(fields) == set(type_.__struct_fields__)  # type: ignore[attr-defined]
    return st.builds(type_, **fields)


def templates() -> st.SearchStrategy[ChatTemplateSpec]:
    file_or_text = st.tuples(words.filter(bool), st.none()) | st.tuples(st.none(), words)
    rest = struct(
        ChatTemplateSpec,
        file=st.none(),
        text=st.none(),
        bos=words,
        eos=words,
        stop=st.lists(words, max_size=3),
        engine_adds_bos=st.booleans(),
    )
    return st.builds(lambda pair, t: msgspec.structs.replace(t, file=pair[0], text=pair[1]), file_or_text, rest)


def retentions() -> st.SearchStrategy[RetentionSpec]:
    priorities = st.integers(0, 100)
    duration = st.none() | durations
    return struct(RetentionSpec, prompt=priorities, decode=st.none() | priorities, duration=duration) | struct(
        RetentionSpec, prompt=st.none(), decode=priorities, duration=duration
    )


def queues() -> st.SearchStrategy[QueueSpec]:
    some = percents.filter(lambda percent: share(percent) > 0)
    return struct(
        QueueSpec,
        size=st.integers(0, 2**40),
        bytes=st.sampled_from(["1B", "512KiB", "1GiB"]),
        timeout=durations_or_off,
        tenant_share=some,
    )


def secrets() -> st.SearchStrategy[SecretSpec]:
    some = words.filter(bool)
    return struct(SecretSpec, env=some, file=st.none()) | struct(SecretSpec, env=st.none(), file=some)


def discovers() -> st.SearchStrategy[DiscoverSpec]:
    port = st.none() | st.integers(1, 65535)
    rest = {"http": port, "grpc": port, "metrics": port, "tp": positive, "pp": positive}
    namespace = st.none() | st.just("llm")
    return struct(
        DiscoverSpec, selector=words.filter(bool), inference_pool=st.none(), namespace=namespace | st.just("*"), **rest
    ) | struct(DiscoverSpec, selector=st.none(), inference_pool=st.just("a-1.b"), namespace=namespace, **rest)


def outliers() -> st.SearchStrategy[OutlierSpec]:
    ejections = st.lists(durations, min_size=2, max_size=2).map(lambda pair: sorted(pair, key=seconds))
    once = st.just("1s")
    rest = struct(OutlierSpec, failures=positive, base_ejection=once, max_ejection=once, max_ejected=percents)
    return st.builds(
        lambda pair, o: msgspec.structs.replace(o, base_ejection=pair[0], max_ejection=pair[1]), ejections, rest
    )


def limits() -> st.SearchStrategy[LimitSpec]:
    count = st.none() | st.integers(0, 2**40)
    return struct(
        LimitSpec,
        requests_per_minute=count,
        prompt_tokens_per_minute=count,
        completion_tokens_per_minute=count,
        streams=count,
    )


def prices() -> st.SearchStrategy[PriceSpec]:
    by_hour = {"usd_per_million_prompt_tokens": st.none(), "usd_per_million_completion_tokens": st.none()}
    by_token = {"usd_per_million_prompt_tokens": money, "usd_per_million_completion_tokens": money}
    gpus = st.integers(1, 64)
    return struct(PriceSpec, usd_per_gpu_hour=money, gpus=gpus, **by_hour) | struct(
        PriceSpec, usd_per_gpu_hour=st.none(), gpus=gpus, **by_token
    )


def clients() -> st.SearchStrategy[ClientsSpec]:
    networks = st.ip_addresses().map(str) | st.sampled_from(["10.0.0.0/8", "fd00::/8"])
    rest = struct(
        ClientsSpec,
        connections_per_address=st.none() | positive,
        requests_per_address=st.none() | positive,
        grpc_connections=st.none() | positive,
        streams_per_connection=st.none() | positive,
        streams_per_peer=st.none() | positive,
        trusted_proxies=st.lists(networks, min_size=1, max_size=2),
        address_header=st.sampled_from(["x-forwarded-for", "forwarded"]),
        proxy_protocol=st.sampled_from(["off", "v1", "v2", "any"]),
    )
    trusting_nobody = {"trusted_proxies": [], "proxy_protocol": "off"}
    return rest | rest.map(lambda spec: msgspec.structs.replace(spec, **trusting_nobody))


def issuers() -> st.SearchStrategy[list[JwtSpec]]:
    urls = st.tuples(st.sampled_from(["http", "https"]), hosts, st.sampled_from(["", ":8443", "/x", "?p=1"]))
    one = struct(
        JwtSpec,
        issuer=urls.map("{0[0]}://{0[1]}{0[2]}".format),
        audience=words.filter(bool),
        jwks=st.none() | urls.map("{0[0]}://{0[1]}{0[2]}".format),
        tenant_claim=words.filter(bool),
        algorithms=st.lists(st.sampled_from(["RS256", "PS512", "ES384", "EdDSA"]), min_size=1, max_size=2),
        leeway=durations,
    )
    return st.lists(one, max_size=2, unique_by=lambda one: (one.issuer, one.audience))


@st.composite
def fleets(draw: st.DrawFn) -> FleetSpec:
    """Valid fleets, every field of every type included."""
    pools: dict[str, PoolSpec] = {}
    serial = iter(range(1, 1000))

    def endpoint() -> EndpointSpec:
        number = next(serial)  # makes ids and addresses unique
        spec: EndpointSpec = draw(
            struct(
                EndpointSpec,
                id=names.map(lambda name: f"{name}{number}"),
                http=hosts.map(lambda host: f"http://{host}:{number}/base"),
                grpc=hosts.map(lambda host: f"{host}:{number}"),
                metrics=st.none() | hosts.map(lambda host: f"http://{host}/metrics"),
                role=st.sampled_from(["prefill", "decode", "both"]),
                tp=positive,
                pp=positive,
                nodes=positive,
                capacity=st.sampled_from(["on-demand", "spot"]),
                zone=st.none() | words,
                node=st.none() | words,
            )
        )
        return spec

    for name in draw(st.lists(names, max_size=3, unique=True)):
        pools[name] = draw(
            struct(
                PoolSpec,
                protocol=st.sampled_from(["openai", "triton"]),
                transport=st.sampled_from(["grpc", "http"]),
                model=words.filter(bool),
                endpoints=st.just([endpoint() for _ in range(draw(st.integers(0, 2)))]),
                credentials=st.sampled_from(["none", "forward"]) | struct(ReplaceSpec, replace=secrets()),
                chat_template=st.none() | templates(),
                tokenizer=st.none() | struct(TokenizerSpec, file=words.filter(bool), eos=words),
                price=st.none() | prices(),
                timeouts=struct(
                    TimeoutSpec,
                    connect=durations,
                    first_byte=durations_or_off,
                    idle=durations_or_off,
                    total=durations_or_off,
                ),
                timeout_limits=st.none()
                | struct(
                    TimeoutLimitSpec,
                    connect=st.none() | durations,
                    first_byte=st.none() | durations_or_off,
                    idle=st.none() | durations_or_off,
                    total=st.none() | durations_or_off,
                ),
                ping=durations_or_off,
                discover=st.none() | discovers(),
                probe=struct(ProbeSpec, interval=durations, timeout=durations, failures=positive),
                outlier=outliers(),
                max_in_flight=st.none() | st.just("off") | positive,
                kv_block_tokens=st.none() | positive,
            )
        )
    routes: dict[str, RouteSpec] = {}
    for name in draw(st.lists(names, max_size=3, unique=True)) if pools else []:
        first, *others = draw(st.permutations(list(pools)))
        split = [WeightedPool(pool=pool, weight=draw(st.floats(1e-3, 1e3))) for pool in (first, *others)]
        route = draw(
            st.sampled_from([RouteSpec(pool=first, fallback=others), RouteSpec(pools=split), RouteSpec(pool=first)])
        )
        routes[name] = msgspec.structs.replace(
            route,
            retention=draw(st.none() | retentions()),
            queue=draw(queues()),
            bytes_per_token=draw(st.floats(0.5, 64)),
        )
    tenants: dict[str, TenantSpec] = {}
    for name in draw(st.lists(names, max_size=2, unique=True)):
        key = struct(
            KeySpec,
            sha256=st.just(f"{next(serial):064x}"),
            name=st.none() | names,
            expires=st.none() | st.dates().map(str),
        )
        may = st.lists(names, max_size=2)
        tenants[name] = draw(
            struct(
                TenantSpec,
                keys=st.lists(key, max_size=1),
                routes=may,
                isolated=st.booleans(),
                limits=limits(),
                route_limits=st.dictionaries(names, limits(), max_size=2),
                priority=st.sampled_from(["interactive", "standard", "batch"]),
                weight=st.floats(1e-3, 1e3),
            )
        )
    spec: FleetSpec = draw(
        struct(
            FleetSpec,
            fleet=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True),
            redis=st.none() | struct(RedisSpec, url=hosts.map(lambda host: f"rediss://{host}:6379")),
            pools=st.just(pools),
            routes=st.just(routes),
            tenants=st.just(tenants),
            gateway=struct(
                GatewaySpec,
                http=hosts.map(lambda host: f"{host}:8000"),
                grpc=st.none() | hosts.map(lambda host: f"{host}:8001"),
                admin=st.just(":9090"),
                tls=st.none() | struct(TlsSpec, cert=words.filter(bool), key=words.filter(bool)),
                admin_tls=st.none()
                | struct(
                    AdminTlsSpec,
                    cert=words.filter(bool),
                    key=words.filter(bool),
                    client_ca=st.none() | words.filter(bool),
                ),
                clients=clients(),
                body_limit=st.from_regex(r"[1-9][0-9]{0,3}(B|KiB|MiB|GiB)", fullmatch=True),
                message_limit=st.from_regex(r"[1-9][0-9]{0,3}(B|KiB|MiB|GiB)", fullmatch=True),
                expose_routing=st.booleans(),
                tracing=st.none()
                | struct(
                    TracingSpec,
                    endpoint=st.none() | hosts.map(lambda host: f"https://{host}:4317"),
                    protocol=st.sampled_from(["grpc", "http"]),
                    sample=percents,
                ),
                access_log=st.sampled_from(["off", "stdout"]) | words.map(lambda word: f"/{word}").filter(LOG.match),
                auth=struct(AuthSpec, anonymous=st.sampled_from(["allow", "deny"]), jwt=issuers()),
                drain=struct(DrainSpec, settle=durations | st.just("0s"), grace=durations),
                overload=struct(
                    OverloadSpec,
                    loop_lag=durations_or_off,
                    memory=percents | st.just("off"),
                    files=percents | st.just("off"),
                    cpu=percents | st.just("off"),
                ),
                retry=struct(RetrySpec, budget=percents | st.just("off"), min_per_second=st.integers(0, 1000)),
            ),
        )
    )
    return spec


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
    for field in getattr(fleet, name).__struct_fields__:
        assert f"`{field}`" in reference
