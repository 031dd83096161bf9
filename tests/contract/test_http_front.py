"""Triton's HTTP API through the gateway, to a real Triton: a client must not notice the gateway."""

import gzip
import json
import zlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.contract.http_front import Front, ask, http_front


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def front() -> AsyncIterator[Front]:
    async with http_front() as started:
        yield started


async def test_generate_is_answered_under_the_routes_name_with_the_engines_bytes(front: Front) -> None:
    body = b'{ "text_input": "hello", "max_tokens": 5 }'
    through = await ask(front.running.url, "/v2/models/renamed/generate", data=body)
    direct = await ask(front.triton.http, "/v2/models/ensemble/generate", data=body)
    assert (through[0], through[2]) == (direct[0], direct[2])
    assert through[1]["x-headrace-route"] == "renamed"
    assert b'"text_output":"hello"' in through[2]


WHOLE = {
    "inputs": [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["hello"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [9]},
    ]
}
INFER = json.dumps(WHOLE).encode()
GENERATE = b'{"text_input":"hello","max_tokens":5}'
STREAM = json.dumps({"text_input": json.dumps({"text": "abcdef 漢字", "cut": 1}), "max_tokens": 50, "stream": True})
FAILS_LATE = json.dumps(
    {
        "text_input": json.dumps({"text": "ab", "cut": 1, "fail": "boom", "fail_after": 1}),
        "max_tokens": 5,
        "stream": True,
    }
)
FAILS_AT_ONCE = json.dumps({"text_input": json.dumps({"fail": "boom"}), "max_tokens": 5, "stream": True})

CASES: list[tuple[str, str, dict[str, str], str | bytes | None]] = [
    ("GET", "/v2/health/live", {}, None),
    ("GET", "/v2/health/ready", {}, None),
    ("POST", "/v2/health/live", {}, b""),
    ("GET", "/v2/models/ensemble", {}, None),
    ("GET", "/v2/models/ensemble/versions/1", {}, None),
    ("GET", "/v2/models/ensemble/versions/9", {}, None),
    ("GET", "/v2/models/ensemble/versions/x", {}, None),
    ("GET", "/v2/models/ensemble/ready", {}, None),
    ("GET", "/v2/models/ensemble/ready?x=1", {}, None),
    ("GET", "/v2/models/ensemble/versions/9/ready", {}, None),
    ("GET", "/v2/models/ensemble/config", {}, None),
    ("GET", "/v2/models/ensemble/versions/1/config", {}, None),
    ("GET", "/v2/models/nope", {}, None),
    ("GET", "/v2/models/nope/versions/3", {}, None),
    ("GET", "/v2/models/nope/ready", {}, None),
    ("GET", "/v2/models/nope/config", {}, None),
    ("GET", "/v2/models/nope/stats", {}, None),
    ("GET", "/v2/models/nope/versions/3/stats", {}, None),
    ("POST", "/v2/models/nope/infer", {}, b"{}"),
    ("POST", "/v2/models/nope/versions/3/infer", {}, b"{}"),
    ("POST", "/v2/models/nope/generate", {}, b"{}"),
    ("POST", "/v2/models/nope/generate_stream", {}, b"{}"),
    ("POST", "/v2/models/ensemble", {}, b""),
    ("GET", "/v2/models/ensemble/infer", {}, None),
    ("GET", "/v2/models/ensemble/generate", {}, None),
    ("GET", "/v2/models/ensemble/generate_stream", {}, None),
    ("POST", "/v2/models/ensemble/stats", {}, b""),
    ("GET", "/v2/models/ensemble/foo", {}, None),
    ("GET", "/v2/models", {}, None),
    ("GET", "/v2/foo", {}, None),
    ("GET", "/v2/", {}, None),
    ("POST", "/v2/models/ensemble/generate", {}, GENERATE),
    ("POST", "/v2/models/ensemble/versions/1/generate", {}, GENERATE),
    ("POST", "/v2/models/ensemble/versions/2/generate", {}, GENERATE),
    ("POST", "/v2/models/ensemble_whole/generate", {}, GENERATE),
    ("POST", "/v2/models/ensemble/generate", {}, b"{}"),
    ("POST", "/v2/models/ensemble/generate", {}, b""),
    ("POST", "/v2/models/ensemble/generate", {}, b"{"),
    ("POST", "/v2/models/ensemble/generate", {}, b'"a string"'),
    ("POST", "/v2/models/ensemble/generate", {}, b'{"text_input":"a","max_tokens":"x"}'),
    ("POST", "/v2/models/ensemble/generate", {}, b'{"text_input":"a","max_tokens":1,"odd":{"a":1}}'),
    ("POST", "/v2/models/ensemble/generate", {}, STREAM),
    ("POST", "/v2/models/ensemble/generate", {"content-encoding": "gzip"}, GENERATE),
    ("POST", "/v2/models/ensemble/generate_stream", {}, STREAM),
    ("POST", "/v2/models/ensemble/generate_stream", {}, FAILS_LATE),
    ("POST", "/v2/models/ensemble/generate_stream", {}, FAILS_AT_ONCE),
    ("POST", "/v2/models/ensemble/generate_stream", {}, b"{"),
    ("POST", "/v2/models/ensemble/generate_stream", {"endpoint-load-metrics-format": "text"}, STREAM),
    ("POST", "/v2/models/ensemble/infer", {}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {}, b"{"),
    ("POST", "/v2/models/ensemble_whole/infer", {}, b"{}"),
    ("POST", "/v2/models/ensemble_whole/infer", {}, b""),
    ("POST", "/v2/models/ensemble_whole/infer", {"inference-header-content-length": "99999"}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {"inference-header-content-length": "0"}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {"inference-header-content-length": "-1"}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {"inference-header-content-length": "abc"}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {"content-encoding": "br"}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {"content-encoding": "gzip"}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {"content-encoding": "gzip"}, gzip.compress(INFER, mtime=0)),
    ("POST", "/v2/models/ensemble_whole/infer", {"content-encoding": "deflate"}, zlib.compress(INFER)),
    ("POST", "/v2/models/ensemble_whole/infer", {"accept-encoding": "gzip"}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {"accept-encoding": "deflate"}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {"accept-encoding": "br;q=1, gzip;q=0.5"}, INFER),
    ("POST", "/v2/models/ensemble_whole/infer", {"content-type": "text/html"}, INFER),
]
SHOWN = ("content-type", "content-encoding", "inference-header-content-length", "accept-encoding", "content-length")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[2]} {str(case[3])[:40]}")
async def test_an_answer_is_tritons_own(
    front: Front, case: tuple[str, str, dict[str, str], str | bytes | None]
) -> None:
    method, path, headers, body = case
    options = {"headers": {"accept-encoding": "identity", **headers}, "data": body}
    direct = await ask(front.triton.http, path, method, **options)
    through = await ask(front.running.url, path, method, **options)
    assert (through[0], through[2]) == (direct[0], direct[2])
    if "nope" not in path and through[0] not in (404, 405):
        assert [through[1].get(name) for name in SHOWN] == [direct[1].get(name) for name in SHOWN]


async def test_the_repository_index_lists_the_routes_and_on_demand_the_ready_ones(front: Front) -> None:
    names = {"ensemble", "ensemble_whole", "typed_identity", "renamed"}
    for body in (b"", b"{}", b'{"ready": true}'):
        status, _, answer = await ask(front.running.url, "/v2/repository/index", data=body)
        assert (status, {entry["name"] for entry in json.loads(answer)}) == (200, names)
    assert (await ask(front.running.url, "/v2/repository/index", data=b'{"ready":tr'))[0] == 400  # Triton: 500
    assert (await ask(front.running.url, "/v2/repository/index", "GET"))[0] == 405


async def test_requests_are_counted_under_their_route_and_status(front: Front) -> None:
    def counted(route: str, status: str) -> float:
        labels = {"api": "kserve", "route": route, "status": status}
        return front.running.gateway.registry.get_sample_value("headrace_requests_total", labels) or 0.0

    before = counted("renamed", "200"), counted("renamed", "400"), counted("unknown", "404")
    await ask(front.running.url, "/v2/models/renamed/generate", data=GENERATE)
    await ask(front.running.url, "/v2/models/renamed/generate", data=b"{}")
    await ask(front.running.url, "/v2/models/nope/generate", data=GENERATE)
    await front.running.until_idle()
    assert (counted("renamed", "200"), counted("renamed", "400"), counted("unknown", "404")) == tuple(
        count + 1 for count in before
    )
