"""Any fleet that a file may hold, for property tests (hypothesis)."""

import re
import string
from typing import Any

import msgspec
from hypothesis import strategies as st

from router.spec.fleet import (
    ChatTemplateSpec,
    DiscoverSpec,
    EndpointSpec,
    FleetSpec,
    KeySpec,
    LimitSpec,
    OutlierSpec,
    PoolSpec,
    PriceSpec,
    ProbeSpec,
    QueueSpec,
    RedisSpec,
    ReplaceSpec,
    RetentionSpec,
    RouteSpec,
    SecretSpec,
    TenantSpec,
    TimeoutLimitSpec,
    TimeoutSpec,
    TokenizerSpec,
    WeightedPool,
)
from router.spec.gateway import (
    AdminTlsSpec,
    AuthSpec,
    ClientsSpec,
    DrainSpec,
    GatewaySpec,
    JwtSpec,
    OverloadSpec,
    RetrySpec,
    TlsSpec,
    TracingSpec,
)
from router.spec.units import LOG_PATTERN, seconds, share

LOG = re.compile(LOG_PATTERN)
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
