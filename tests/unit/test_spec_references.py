"""How the parts of a fleet must fit together: each contradiction is found, at its line."""

# ruff: noqa: E501 (one contradiction a line)

import pytest

from router.spec.strict import read_fleet

FILE = """\
fleet: demo
pools:
  smollm:
    protocol: triton
    model: ensemble
    chat_template: {text: x}
    endpoints:
      - {id: a, grpc: "h:1"}
      - {id: b, grpc: "h:2"}
  llama:
    protocol: openai
    model: m
    endpoints: [{id: c, http: "http://h:3"}]
routes:
  smollm2: {pool: smollm, fallback: [llama]}
  both: {pools: [{pool: smollm}, {pool: llama}]}
gateway: {http: ":8000", admin: "127.0.0.1:9090", auth: {anonymous: allow}}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "message"),
    [
        ("model: m", "model: m\n    discover: {}", 13, "pools.llama.discover", "needs `selector` or `inference_pool`"),
        ("model: m", "model: m\n    discover: {selector: a, inference_pool: b}", 13, "pools.llama.discover", "has both `selector` and `inference_pool`; keep one"),
        ("model: m", "model: m\n    discover: {inference_pool: b, namespace: '*'}", 13, "pools.llama.discover.namespace", "may not be * with `inference_pool`, which is in one namespace"),
        ("{pool: smollm, fallback", "{pool: smolm, fallback", 15, "routes.smollm2.pool", "no pool is named smolm; did you mean smollm?"),
        ("[llama]", "[zebra]", 15, "routes.smollm2.fallback[0]", "no pool is named zebra; there are smollm, llama"),
        ("{pool: llama}]", "{pool: lama}]", 16, "routes.both.pools[1].pool", "no pool is named lama; did you mean llama?"),
        ("[llama]", "[llama, smollm]", 15, "routes.smollm2.fallback[1]", "pool smollm is named twice in this route"),
        ("{pool: llama}]", "{pool: smollm}]", 16, "routes.both.pools[1].pool", "pool smollm is named twice in this route"),
        ("pool: smollm, fallback", "fallback", 15, "routes.smollm2", "needs `pool`, or `pools` for a weighted split"),
        ("{pools:", "{pool: llama, pools:", 16, "routes.both", "has both `pool` and `pools`; keep one"),
        ("id: c", "id: a", 13, "pools.llama.endpoints[0].id", "endpoint id a is taken in pool smollm; ids are unique in a fleet"),
        ('{id: b, grpc: "h:2"}', '{id: b, http: "http://h:2"}', 9, "pools.smollm.endpoints[1]", "`grpc`: is missing; protocol triton needs the address of the engine's gRPC API"),
        ('http: "http://h:3"', 'grpc: "h:3"', 13, "pools.llama.endpoints[0]", "`http`: is missing; protocol openai needs the address of the engine's HTTP API"),
        ('{id: a, grpc: "h:1"}\n      - {id: b, grpc: "h:2"}', '{id: a, grpc: "h:1"}\n    transport: http', 8, "pools.smollm.endpoints[0]", "`http`: is missing; protocol triton with transport http needs the address of the engine's HTTP API"),
        ("h:2", "h:1", 9, "pools.smollm.endpoints[1].grpc", "ensemble at this address is already endpoint a"),
        ("{text: x}", "{bos: x}", 6, "pools.smollm.chat_template", "needs `file` or `text`"),
        ("{text: x}", "{text: x, file: y}", 6, "pools.smollm.chat_template", "has both `file` and `text`; keep one"),
        ("model: m", "model: m\n    price: {usd_per_gpu_hour: 1, usd_per_million_prompt_tokens: 1}", 13, "pools.llama.price.usd_per_million_prompt_tokens", "a pool is paid by the GPU-hour or by the token, not both"),
        ("model: m", "model: m\n    outlier: {base_ejection: 600s}", 13, "pools.llama.outlier.max_ejection", "300s is shorter than `base_ejection`, 600s"),
        ("admin:", "clients: {proxy_protocol: v2}, admin:", 17, "gateway.clients.proxy_protocol", "has no effect without `trusted_proxies`: nobody else is believed"),
        ("admin:", "clients: {trusted_proxies: [10.0.0.1/8]}, admin:", 17, "gateway.clients.trusted_proxies[0]", "is no network: 10.0.0.1/8 has host bits set"),
        ("127.0.0.1:9090", "127.0.0.1:8000", 17, "gateway.admin", "listens on port 8000, which `http` already takes"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_where_it_stands(old: str, new: str, line: int, path: str, message: str) -> None:
    assert FILE.count(old) == 1
    reading = read_fleet(FILE.replace(old, new))
    (problem,) = reading.problems
    assert (problem.line, problem.path, problem.message) == (line, path, message)
    assert reading.fleet is None


@pytest.mark.parametrize(
    ("old", "new", "path", "words"),
    [
        ("model: m", "model: m\n    timeouts: {first_byte: 60s, total: 30s}", "pools.llama.timeouts.first_byte", "never reached"),
        ("model: m", "model: m\n    chat_template: {text: x}", "pools.llama.chat_template", "has no effect"),
        ("model: m", "model: m\n    transport: http", "pools.llama.transport", "has no effect"),
        ("model: m", "model: m\n    discover: {selector: app=x}", "pools.llama.discover", "has no effect without `redis`"),
        ("model: m", "model: m\n    ping: 20ms", "pools.llama.ping", "more pings than text"),
        ("    chat_template: {text: x}\n", "", "pools.smollm", "no `chat_template`: chat requests are refused"),
        ('[{id: c, http: "http://h:3"}]', "[]", "pools.llama", "no endpoints: it serves nothing"),
        ("routes:", "  spare: {protocol: openai, model: m, endpoints: [{id: d, http: 'http://h:4'}]}\nroutes:", "pools.spare", "no route leads to it"),
    ],
)  # fmt: skip
def test_what_works_but_cannot_be_meant_is_a_warning(old: str, new: str, path: str, words: str) -> None:
    reading = read_fleet(FILE.replace(old, new))
    (warning,) = reading.warnings
    assert reading.fleet is not None
    assert warning.path == path
    assert words in warning.message


def test_a_default_timeout_above_total_is_nobodys_mistake() -> None:
    reading = read_fleet(FILE.replace("model: m", "model: m\n    timeouts: {total: 30s}"))
    assert (reading.problems, reading.warnings) == ([], [])


def test_a_file_without_routes_can_start_with_a_warning() -> None:
    reading = read_fleet("fleet: demo\ngateway: {auth: {anonymous: allow}}\n")
    assert reading.fleet is not None
    assert [warning.message for warning in reading.warnings] == [
        "no routes: nothing is served until one is set from elsewhere"
    ]


def test_one_server_may_serve_two_models() -> None:
    second = '  other: {protocol: triton, model: n, endpoints: [{id: d, grpc: "h:1"}]}\nroutes:'
    assert read_fleet(FILE.replace("routes:", second)).problems == []


def test_listeners_may_share_a_port_on_different_interfaces_or_leave_it_to_the_system() -> None:
    for http, admin in (("127.0.0.2:8000", "127.0.0.1:8000"), (":0", ":0")):
        assert read_fleet(FILE.replace(":8000", http).replace("127.0.0.1:9090", admin)).problems == []


def test_mistakes_of_one_part_do_not_hide_contradictions_of_others() -> None:
    """Also not where the mistake stands in front of the contradiction in one list, or at the fleet's name."""
    text = FILE.replace("fleet: demo", "fleet: a b").replace("id: a", "id: a b").replace("id: b", "id: c")
    text = text.replace("[llama]", "[17, lama]")
    assert [problem.path for problem in read_fleet(text).problems] == [
        "fleet",
        "pools.smollm.endpoints[0].id",
        "pools.llama.endpoints[0].id",
        "routes.smollm2.fallback[0]",
        "routes.smollm2.fallback[1]",
    ]


def test_a_pool_with_a_mistake_inside_still_counts_as_there() -> None:
    reading = read_fleet(FILE.replace("model: ensemble", "modle: ensemble"))
    assert [problem.path for problem in reading.problems] == ["pools.smollm.model", "pools.smollm.modle"]
