"""Strict reading: each kind of mistake is found, named and placed; no text makes the reader fall over."""

# ruff: noqa: E501 (one mistake a line)

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from router.spec.fleet import EndpointSpec
from router.spec.strict import Problem, read_fleet, read_part
from router.spec.units import (
    BaseUrl,
    Duration,
    DurationOrOff,
    DurationOrZero,
    FleetName,
    HostPort,
    HttpUrl,
    ListenAddress,
    Name,
    RedisUrl,
    Size,
    host_and_port,
)
from router.spec.wording import pattern_of, text_fault

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"

FILE = """\
fleet: demo
pools:
  smollm:
    protocol: triton
    model: ensemble
    endpoints:
      - id: a
        grpc: "127.0.0.1:18001"
      - id: b
        grpc: "127.0.0.1:18011"
        zone: no
    timeouts:
      connect: 500ms
      total: off
routes:
  smollm2: {pool: smollm}
gateway:
  http: ":8000"
  auth: {anonymous: allow}
"""


def problems(text: str) -> list[Problem]:
    return read_fleet(text).problems


def only(text: str) -> tuple[str, str]:
    """Place and path of the only problem, and its message."""
    (problem,) = problems(text)
    return f"{problem.line}:{problem.column} {problem.path}", problem.message


def test_a_correct_file_becomes_the_fleet_it_describes() -> None:
    reading = read_fleet(FILE)
    assert reading.problems == []
    assert [warning.path for warning in reading.warnings] == ["pools.smollm"]  # it has no chat template
    assert reading.fleet is not None
    pool = reading.fleet.pools["smollm"]
    assert [endpoint.id for endpoint in pool.endpoints] == ["a", "b"]
    assert pool.timeouts.connect == "500ms"


def test_off_and_no_are_words_not_booleans() -> None:
    reading = read_fleet(FILE)
    assert reading.fleet is not None
    pool = reading.fleet.pools["smollm"]
    assert pool.timeouts.total == "off"
    assert pool.endpoints[1].zone == "no"


def test_the_example_is_correct() -> None:
    reading = read_fleet(EXAMPLE.read_text())
    assert (reading.problems, reading.warnings) == ([], [])


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ("grpc: \"127.0.0.1:18001\"", "grcp: x", "8:9 pools.smollm.endpoints[0].grcp", "unknown key; did you mean grpc?"),
        ("      total: off", "      firstByte: 3s", "14:7 pools.smollm.timeouts.firstByte", "unknown key; did you mean first_byte?"),
        ("gateway:", "wombat:", "17:1 wombat", "unknown key; known here: fleet, redis, pools, routes, tenants, gateway"),
        ("    model: ensemble", "    model: a\n    model: b", "6:5 pools.smollm.model", "duplicate key; the first is on line 5"),
        ("- id: b\n        grpc", "- grpc", "9:9 pools.smollm.endpoints[1].id", "is missing"),
        ("    model: ensemble\n", "", "3:3 pools.smollm.model", "is missing"),
        ("protocol: triton", "protocol: tritton", "4:15 pools.smollm.protocol", "'tritton' is not one of openai, triton; did you mean triton?"),
        ("500ms", "30", "13:16 pools.smollm.timeouts.connect", "a duration needs its unit: write 30s (or ms, m, h)"),
        ("500ms", '"30"', "13:16 pools.smollm.timeouts.connect", "a duration needs its unit: write 30s (or ms, m, h)"),
        ("500ms", "30 sec", "13:16 pools.smollm.timeouts.connect", "'30 sec' is not a duration: write 30s"),
        ("500ms", "off", "13:16 pools.smollm.timeouts.connect", "'off' is not a duration: write a number and ms, s, m or h, like 30s"),
        ("500ms", "0s", "13:16 pools.smollm.timeouts.connect", "must be longer than zero"),
        ("total: off", "total: 0.0s", "14:14 pools.smollm.timeouts.total", "must be longer than zero; write off for no limit"),
        ('http: ":8000"', "drain: {settle: 0s, grace: 0s}", "18:30 gateway.drain.grace", "must be longer than zero"),
        ('http: ":8000"', "http: 8000", "18:9 gateway.http", '8000 is not an address to listen on: write ":8000" for every interface, or HOST:8000'),
        ('http: ":8000"', "body_limit: 32MB", "18:15 gateway.body_limit", "'32MB' is not a size: write 32MiB"),
        ('http: ":8000"', "body_limit: 4096", "18:15 gateway.body_limit", "a size needs its unit: write 4096B, or use KiB, MiB, GiB"),
        ('"127.0.0.1:18011"', "grpc://h:18011/", "10:15 pools.smollm.endpoints[1].grpc", "'grpc://h:18011/' is not a HOST:PORT address: write h:18011, without grpc://"),
        ('"127.0.0.1:18011"', "h", "10:15 pools.smollm.endpoints[1].grpc", "'h' has no port: write h:PORT"),
        ('"127.0.0.1:18011"', "h:70000", "10:15 pools.smollm.endpoints[1].grpc", "port 70000 is not between 1 and 65535"),
        ('"127.0.0.1:18011"', "h:0", "10:15 pools.smollm.endpoints[1].grpc", "port 0 is not between 1 and 65535"),
        ('http: ":8000"', "access_log: log/access", "18:15 gateway.access_log", "'log/access' is no place for a log: write off, stdout, or the absolute path of a file in ASCII"),
        ("zone: no", "http: h:1", "11:15 pools.smollm.endpoints[1].http", "'h:1' is not a URL: write http://h:1"),
        ("zone: no", "http: https://h", "11:15 pools.smollm.endpoints[1].http", "engines are reached over plain http:// only"),
        ("zone: no", "http: http://h:99999", "11:15 pools.smollm.endpoints[1].http", "port 99999 is not between 1 and 65535"),
        ("zone: no", "http: http://h:1/v1/", "11:15 pools.smollm.endpoints[1].http", "leave out /v1: the gateway adds it"),
        ("gateway:", "redis: redis://h\ngateway:", "17:8 redis", "expected a mapping, found a string; write {url: ...}"),
        ("model: ensemble", 'model: ""', "5:12 pools.smollm.model", "is empty"),
        ("zone: no", "zone: 1", "11:15 pools.smollm.endpoints[1].zone", 'expected a string, found a number; write "1"'),
        ("zone: no", "tp: 0", "11:13 pools.smollm.endpoints[1].tp", "must be at least 1"),
        ("zone: no", "tp: 2.5", "11:13 pools.smollm.endpoints[1].tp", "expected a whole number, found a number"),
        ("zone: no", 'tp: "2"', "11:13 pools.smollm.endpoints[1].tp", "expected a whole number, found a string; write it without quotes"),
        ("zone: no", "tp: 99999999999999999999999", "11:13 pools.smollm.endpoints[1].tp", "is too large"),
        ("zone: no", "zone: [b]", "11:15 pools.smollm.endpoints[1].zone", "expected a string, found a list"),
        ("zone: no", "zone: !python/none b", "11:15 pools.smollm.endpoints[1].zone", "the tag '!python/none' has no meaning in a fleet file"),
        ("zone: no", "role:", "11:14 pools.smollm.endpoints[1].role", "has no value; expected a string"),
        ("{pool: smollm}", "{pool: smollm, fallback: smollm}", "16:37 routes.smollm2.fallback", "expected a list, found a string; put it in brackets: [...]"),
        ("  smollm2:", '  "a b":', '16:3 routes["a b"]', "'a b' is not a name: letters, digits and . _ / -, first a letter or digit, 128 at most"),
        ("fleet: demo", "fleet: a/b", "1:8 fleet", "'a/b' is not a name: letters, digits and . _ -, first a letter or digit, 63 at most"),
        ("fleet: demo", "fleet: |\n  demo", "1:8 fleet", "'demo\\n' is not a name: letters, digits and . _ -, first a letter or digit, 63 at most"),
        ("{pool: smollm}", "{pools: [{pool: smollm, weight: 1e999}]}", "16:44 routes.smollm2.pools[0].weight", "is too large"),
        ("{pool: smollm}", "{pools: [{pool: smollm, weight: 0}]}", "16:44 routes.smollm2.pools[0].weight", "must be at least 0.001"),
        ("{pool: smollm}", "{pools: [{pool: smollm, weight: 1e7}]}", "16:44 routes.smollm2.pools[0].weight", "must be at most 1000000"),
        ("{pool: smollm}", "{pool: smollm, ? [a] : b}", "16:29 routes.smollm2", "a key must be a plain word"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_where_it_stands(old: str, new: str, place: str, message: str) -> None:
    assert FILE.count(old) == 1
    assert only(FILE.replace(old, new)) == (place, message)


def test_every_mistake_is_reported_in_the_order_of_the_file() -> None:
    text = FILE.replace("protocol: triton", "protocol: x").replace("500ms", "3").replace("pool: smollm", "pool: smolm")
    assert [problem.line for problem in problems(text)] == [4, 13, 16]


def test_a_mistake_is_not_reported_again_as_its_own_consequence() -> None:
    text = FILE.replace('grpc: "127.0.0.1:18001"', 'grcp: "127.0.0.1:18001"')
    assert [problem.path for problem in problems(text)] == ["pools.smollm.endpoints[0].grcp"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "the file is empty"),
        ("# only a comment\n", 1, "the file is empty"),
        ("fleet: [a\npools: {}\n", 2, "not valid YAML"),
        ("fleet: a\n\tpools: {}\n", 2, "indent with spaces, not tabs"),
        ("fleet: a\n---\nfleet: b\n", 2, "not valid YAML: but found another document"),
        ("fleet: a\nrole: \x07\n", 2, "character"),
        ("fleet: a\nx: *nowhere\n", 2, "undefined alias"),
        ('fleet: a\nx: "\\UFFFFFFFF"\n', 2, "not valid YAML"),
        ('fleet: a\nx: "\\ud83d"\n', 2, "half a character"),
        ("- fleet\n", 1, "expected a mapping, found a list"),
        ("demo\n", 1, "expected a mapping, found a string"),
    ],
)
def test_text_that_is_no_fleet_at_all_gets_one_sentence(text: str, line: int, words: str) -> None:
    (problem,) = problems(text)
    assert problem.line == line
    assert words in problem.message


def test_deep_nesting_is_refused_in_one_sentence() -> None:
    for text in ("a: " + "[" * 100_000, "a: " + '{"a":' * 100_000, "\n".join(" " * n + "a:" for n in range(500))):
        (problem,) = problems(text)
        assert problem.message == "nested deeper than 32 levels"


def test_a_huge_file_is_refused_in_one_sentence() -> None:
    (problem,) = problems("#" * (1024 * 1024 + 1))
    assert "larger than 1048576 characters" in problem.message
    (problem,) = problems("fleet: a\nroutes: [" + "a," * 200_000 + "]")
    assert "more than 50000 values" in problem.message


def test_aliases_that_unfold_to_millions_of_values_are_refused_in_one_sentence() -> None:
    endpoints = "\n".join(f"    - {{id: e{n}, http: http://h}}" for n in range(1000))
    text = f"fleet: a\npools:\n  p0: &p\n   protocol: openai\n   model: m\n   endpoints:\n{endpoints}\n"
    text += "".join(f"  p{n}: *p\n" for n in range(1, 5000))
    (problem,) = problems(text)
    assert problem.message == "its aliases unfold to more than 50000 values"


def test_a_file_of_mistakes_gets_as_many_as_a_reader_can_use() -> None:
    for text in (
        "".join(f"k{n}: 1\n" for n in range(1000)),
        FILE + "".join(f"  r{n}: {{pool: x}}\n" for n in range(1000)),
    ):
        found = problems(text.replace('gateway:\n  http: ":8000"\n  auth: {anonymous: allow}\n', ""))
        assert len(found) == 101
        assert found[-1].message == "reading ended after 100 mistakes"


def test_an_alias_that_contains_itself_ends() -> None:
    assert problems("fleet: a\npools: &p\n  p: *p\n")


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://10.0.0.1:6379/0",
        "redis://:p@ss%2Fword@[::1]:6379",
        "rediss://user:p,w;d@h:1/15?ssl_ca_certs=/etc/ca.pem&ssl_certfile=c.pem&ssl_keyfile=k.pem",
        "unix:///run/redis.sock",
        "unix://u:p@/run/redis.sock?db=2",
    ],
)
def test_a_redis_url_that_is_accepted_is_one_the_client_can_use(url: str) -> None:
    reading = read_fleet(f"fleet: a\nredis: {{url: '{url}'}}\n")
    assert reading.problems == []
    assert reading.fleet is not None and reading.fleet.redis is not None
    Redis.from_url(reading.fleet.redis.url).connection_pool.make_connection()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sesame", "starts with redis://"),
        ("http://:sesame@h", "starts with redis://"),
        ("redis://:sesame@h x", "expected redis://HOST:PORT"),
        ("redis://", "expected redis://HOST:PORT"),
        ("redis://:sesame@h:notaport", "expected redis://HOST:PORT"),
        ("redis://:ses/ame@h", "%2F"),
        ("redis://:ses[ame@h", "%5B"),
        ("redis://:sesame@h:99999", "port 99999 is not between 1 and 65535"),
        ("redis://:sesame@h:0", "port 0 is not between 1 and 65535"),
        ("redis://:sesame@[1:2]", "its host is not a host name"),
        ("redis://:sesame@h?foo=bar", "takes no options but"),
        ("redis://:sesame@h?socket_timeout=60", "takes no options but"),
        ("redis://:sesame@h?ssl_ca_certs=ca.pem", "takes no options but"),
        ("unix://sesame.sock", "unix:///PATH"),
        ("unix:///sesame.sock?timeout=1", "unix:///PATH"),
    ],
)
def test_a_redis_url_the_client_cannot_use_is_refused_without_being_repeated(url: str, words: str) -> None:
    (problem,) = problems(f'fleet: a\nredis: {{url: "{url}"}}\n')
    assert words in problem.message
    assert "sesame" not in problem.message


def test_no_message_repeats_what_stands_where_the_redis_url_should() -> None:
    (problem,) = problems("fleet: a\nredis: {url: [sesame]}\n")
    assert "sesame" not in problem.message


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (Name, "a"), (FleetName, "a"), (Duration, "1s"), (DurationOrOff, "off"), (DurationOrZero, "0s"), (Size, "1B"),
        (HostPort, "h:1"), (ListenAddress, ":1"), (HttpUrl, "http://h"), (BaseUrl, "http://h"), (RedisUrl, "redis://h"),
    ],
)  # fmt: skip
def test_no_pattern_accepts_a_newline_at_the_end_of_a_value(type_: Any, value: str) -> None:
    assert msgspec.convert(value, type_) == value
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value + "\n", type_)


def test_user_names_in_engine_addresses_are_not_repeated() -> None:
    text = FILE.replace("zone: no", "http: user:sesame@h").replace('"127.0.0.1:18011"', '"http://u:sesame@h:1"')
    found = problems(text)
    assert len(found) == 2
    assert not any("sesame" in problem.message for problem in found)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("[bad:80", "lacks its closing ]"),
        ("[zz]:1", "'[zz]' is not an IPv6 address"),
        ("[::1", "lacks its closing ]"),
        ("[1:2]:80", "'[1:2]' is not an IPv6 address"),
        ("::1:80", "stands in brackets"),
        ("..:80", "'..' is not a host name"),
        ("-h:80", "'-h' is not a host name"),
        ("1.2.3:80", "'1.2.3' is not an IPv4 address"),
        ("256.0.0.1:80", "'256.0.0.1' is not an IPv4 address"),
        ("a" * 64 + ":80", "longer than 63"),
        (".".join(["a" * 50] * 6) + ":80", "longer than 253"),
        ("hé:80", "xn-- form"),
    ],
)
@pytest.mark.parametrize("type_", [HostPort, ListenAddress, HttpUrl, BaseUrl])
def test_a_host_that_cannot_be_is_refused_wherever_an_address_stands(type_: Any, address: str, words: str) -> None:
    value = f"http://{address}/" if type_ in (HttpUrl, BaseUrl) else address
    fault = text_fault(value, pattern_of(type_))
    assert fault is not None
    assert words in fault


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://[bad", "lacks its closing ]"),
        ("http://:80", "the URL has no host"),
        ("http://", "the URL has no host"),
        ("http://user:sesame@h", "engine credentials do not belong in a URL"),
        ("http://h\0:1", "a space or a control character"),
        ("http://h/a b", "a space or a control character"),
        ("http://h/?x", "without ? and #"),
        ("http://h:x", "port is not a number"),
    ],
)
def test_a_url_no_request_can_be_sent_to_is_refused(url: str, words: str) -> None:
    fault = text_fault(url, pattern_of(HttpUrl))
    assert fault is not None
    assert words in fault
    assert "sesame" not in fault


@given(st.text(max_size=30) | st.text("htp:/[]@.-_:1234567890av?#\0é", max_size=40))
@settings(max_examples=1000, deadline=None)
def test_what_is_accepted_as_an_address_can_be_taken_apart(text: str) -> None:
    for value in (text, f"http://{text}", f"http://[{text}]", f"http://h{text}"):
        if text_fault(value, pattern_of(BaseUrl)) is None:
            parts = urlsplit(value)
            assert parts.hostname
            assert parts.port is None or parts.port > 0
            assert not parts.path.rstrip("/").endswith("/v1")
        if text_fault(value, pattern_of(HostPort)) is None:
            host, port = host_and_port(value)
            assert host
            assert 0 < port <= 65535


def test_a_part_that_came_as_json_is_read_as_strictly_as_a_file() -> None:
    part, found = read_part({"id": "a", "http": "http://h:1", "tp": 2, "zone": None}, EndpointSpec)
    assert part == EndpointSpec(id="a", http="http://h:1", tp=2)
    assert found == []
    part, found = read_part({"id": "a b", "htpp": "x", "tp": True, "role": "chef", "node": [1.5]}, EndpointSpec)
    assert part is None
    assert {problem.path: problem.message.partition(";")[0] for problem in found} == {
        "id": "'a b' is not a name: letters, digits and . _ / -, first a letter or digit, 128 at most",
        "htpp": "unknown key",
        "tp": "expected a whole number, found true or false",
        "role": "'chef' is not one of both, decode, prefill",
        "node": "expected a string, found a list",
    }


def test_a_part_nested_beyond_the_reader_is_refused_in_one_sentence() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert read_part({"id": deep}, EndpointSpec) == (None, [Problem("", "is nested too deep")])


def test_a_thousand_endpoints_are_within_the_limits() -> None:
    endpoints = "\n".join(f'      - {{id: e{n}, grpc: "10.0.{n // 250}.{n % 250}:8001"}}' for n in range(1000))
    text = f"fleet: a\npools:\n  p:\n    protocol: triton\n    model: m\n    endpoints:\n{endpoints}\nroutes: {{r: {{pool: p}}}}\n"
    reading = read_fleet(text)
    assert reading.fleet is not None
    assert len(reading.fleet.pools["p"].endpoints) == 1000


@given(st.text(max_size=60) | st.text("\n :-[]{}&*!|>'\"\\#%@,?a0~<\t", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_gets_a_fleet_or_problems_with_lines(text: str) -> None:
    for candidate in (text, FILE + text, text + FILE):
        reading = read_fleet(candidate)
        assert (reading.fleet is None) == bool(reading.problems)
        assert all(problem.line is not None and problem.line >= 1 for problem in reading.problems)


@given(st.integers(0, len(FILE) - 1), st.sampled_from([*"\n :-[]{}&*!|>'\"#%,?a0", "", "    "]))
@settings(max_examples=300, deadline=None)
def test_a_slip_of_the_finger_never_breaks_the_reader(position: int, slip: str) -> None:
    reading = read_fleet(FILE[:position] + slip + FILE[position + 1 :])
    lines = FILE.count("\n") + 2
    assert all(1 <= (problem.line or 0) <= lines for problem in reading.problems)
