"""The admin API on a real server, and the shared state in a real Valkey."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from prometheus_client import Counter

from gateway.admin.app import BODY_LIMIT
from router.spec.documents import Document
from router.state.store import DocumentStore, Mark
from tests.contract.admin_gateway import NEW, Gateway, call, headrace, refused, serving
from tests.valkey import ValkeyProcess, servers_here


@pytest_asyncio.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[ValkeyProcess]:
    async with ValkeyProcess(servers_here()[0], tmp_path) as server:
        yield server


@pytest_asyncio.fixture
async def gateway(valkey: ValkeyProcess) -> AsyncIterator[Gateway]:
    async with serving(valkey.url) as gateway:
        yield gateway


async def test_health_readiness_and_metrics_need_no_token(valkey: ValkeyProcess) -> None:
    async with serving(valkey.url, token="secret") as gateway, aiohttp.ClientSession() as session:
        Counter("headrace_seen", "Seen.", registry=gateway.registry).inc(3)
        async with session.get(gateway.url + "/healthz") as response:
            assert (response.status, await response.text()) == (200, "ok")
        async with session.get(gateway.url + "/metrics") as response:
            assert response.headers["content-type"].startswith("text/plain; version=")
            assert "headrace_seen_total 3.0" in await response.text()
        assert (await call(gateway, "GET", "/readyz"))[0] == 503
        gateway.fleet.endpoints["a"].state.phase = "ready"
        status, answer = await call(gateway, "GET", "/readyz")
        assert (status, answer["status"], answer["degraded"]) == (200, "ready", [])


async def test_the_admin_api_wants_its_token(valkey: ValkeyProcess) -> None:
    async with serving(valkey.url, token="secret") as gateway:
        for headers in ({}, {"x-headrace-admin-token": "sekret"}):
            for path in ("/admin/v1/endpoints", "/%61dmin/v1/endpoints"):
                assert (await call(gateway, "GET", path, **headers))[0] == 401
        assert (await call(gateway, "GET", "/admin/v1/endpoints", **{"x-headrace-admin-token": "secret"}))[0] == 200
        assert (await headrace(gateway, "endpoints", "list", token="secret")).exit_code == 0
        for token, words in (
            (None, "needs its token in the header x-headrace-admin-token. Give it with --admin-token"),
            ("sekret", "is not the one this gateway was started with. Check --admin-token"),
        ):
            denied = await headrace(gateway, "endpoints", "list", token=token)
            assert (denied.exit_code, denied.stdout) == (1, "")
            assert words in denied.stderr


async def test_an_added_endpoint_serves_in_every_gateway_until_it_is_removed(
    valkey: ValkeyProcess, gateway: Gateway
) -> None:
    async with serving(valkey.url) as other:
        assert await call(gateway, "POST", "/admin/v1/endpoints", NEW) == (201, {"id": "new", "pool": "p"})
        await asyncio.sleep(0.5)
        _, answer = await call(other, "GET", "/admin/v1/endpoints")
        (row,) = [row for row in answer["endpoints"] if row["id"] == "new"]
        assert (row["pool"], row["protocol"], row["sources"], row["url"]) == ("p", "openai", ["cli"], NEW["http"])
        assert (await call(gateway, "DELETE", "/admin/v1/endpoints/new"))[0] == 200
        assert "new" not in gateway.fleet.endpoints
        assert (await refused(gateway, "DELETE", "/admin/v1/endpoints/new"))[0] == 404


async def test_a_drain_is_an_overlay_on_any_endpoint_and_ends_with_undrain(gateway: Gateway) -> None:
    await call(gateway, "POST", "/admin/v1/endpoints", NEW)
    for id_ in ("a", "new"):
        for _ in range(2):  # saying it twice is no error
            assert (await call(gateway, "POST", f"/admin/v1/endpoints/{id_}/drain"))[0] == 200
            assert gateway.fleet.endpoints[id_].spec.drain
        assert (await call(gateway, "POST", f"/admin/v1/endpoints/{id_}/undrain"))[0] == 200
        assert not gateway.fleet.endpoints[id_].spec.drain
    assert gateway.merged.sources["endpoints", "a"] == ("file",)
    assert gateway.fleet.endpoints["new"].spec.http == NEW["http"]
    assert (await refused(gateway, "POST", "/admin/v1/endpoints/nobody/drain"))[0] == 404


async def test_changes_and_refused_ones_are_in_the_log_and_questions_are_not(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.admin.app")
    await call(gateway, "GET", "/admin/v1/endpoints")
    await call(gateway, "POST", "/admin/v1/endpoints/a/drain")
    await refused(gateway, "DELETE", "/admin/v1/routes/r%0A")
    assert [record.getMessage() for record in caplog.records if record.name == "gateway.admin.app"] == [
        "POST /admin/v1/endpoints/a/drain, asked for by 127.0.0.1: 200",
        "DELETE /admin/v1/routes/r%0A, asked for by 127.0.0.1: 404",
    ]


async def test_undrain_goes_before_a_weaker_sources_drain(valkey: ValkeyProcess, gateway: Gateway) -> None:
    store = DocumentStore(valkey.url, "demo")
    spec = msgspec.Raw(b'{"drain":true}')
    overlay = Document(family="endpoints", id="a", source="operator", generation=1, spec=spec)
    await store.replace_source("operator", [overlay], Mark(1, ""))
    await store.close()
    await asyncio.sleep(0.5)
    assert gateway.fleet.endpoints["a"].spec.drain
    assert (await call(gateway, "POST", "/admin/v1/endpoints/a/undrain"))[0] == 200
    assert not gateway.fleet.endpoints["a"].spec.drain


@pytest.mark.parametrize("drained", [False, True])
async def test_another_sources_document_cannot_be_removed(gateway: Gateway, drained: bool) -> None:
    if drained:
        await call(gateway, "POST", "/admin/v1/endpoints/a/drain")
    status, message = await refused(gateway, "DELETE", "/admin/v1/endpoints/a")
    assert status == 409
    assert "comes from file" in message
    assert "drain" in message
    assert gateway.fleet.endpoints["a"].spec.drain == drained
    assert (await refused(gateway, "DELETE", "/admin/v1/routes/r"))[0] == 409


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"id": "x", "pool": "p"}, "http"),
        ({"id": "x", "pool": "t", "http": "http://127.0.0.1:9"}, "grpc"),
        ({**NEW, "http": "http://h:99999"}, "http"),
        ({**NEW, "grpc": "h:0"}, "grpc"),
        ({**NEW, "metrics": "http://h:x/metrics"}, "metrics"),
    ],
)
async def test_an_address_that_cannot_be_connected_to_is_refused_by_its_fields_name(
    gateway: Gateway, body: Any, param: str
) -> None:
    status, answer = await call(gateway, "POST", "/admin/v1/endpoints", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert f"`{param}`" in answer["error"]["message"]
    assert set(gateway.fleet.endpoints) == {"a"}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({**NEW, "zoen": "b"}, 400, "`zoen`: unknown key; did you mean zone?"),
        ({**NEW, "zoen": "b", "tp": 0}, 400, "`zoen`: unknown key; did you mean zone? `tp`: must be at least 1."),
        ({**NEW, "http": "9"}, 400, "`http`: '9' is not a URL: write http://9"),
        ({**NEW, "http": "http://h:1/v1"}, 400, "`http`: leave out /v1: the gateway adds it"),
        ({**NEW, "http": "http://127.0.0.1:1/"}, 400, "`http`: m at this address is already endpoint a"),
        ({**NEW, "capacity": "cheap"}, 400, "`capacity`: 'cheap' is not one of on-demand, spot"),
        ({**NEW, "id": "sp ace"}, 400, "`id`: 'sp ace' is not a name"),
        ({**NEW, "pool": "nobody's"}, 400, "`pool`: no pool is named nobody's; there are p, t."),
        ({"pool": "p"}, 400, "`id`: is missing"),
        ([], 400, "The body: expected a mapping, found a list."),
        ({**NEW, "id": "a"}, 409, "from file"),
    ],
)
async def test_an_endpoint_that_cannot_be_is_refused_with_a_reason(
    gateway: Gateway, body: Any, status: int, said: str
) -> None:
    answered, message = await refused(gateway, "POST", "/admin/v1/endpoints", body)
    assert answered == status
    assert said in message


async def test_malformed_and_oversized_bodies_are_refused(gateway: Gateway) -> None:
    async with aiohttp.ClientSession() as session:
        for body, status in ((b"{", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400), (b" " * (BODY_LIMIT + 1), 413)):
            async with session.post(gateway.url + "/admin/v1/endpoints", data=body) as response:
                assert response.status == status
                assert (await response.json())["error"]["message"]
    assert (await refused(gateway, "PATCH", "/admin/v1/routes"))[0] == 405
    assert (await refused(gateway, "GET", "/admin/v1/pools"))[0] == 404


@pytest.mark.parametrize("path", ["org/model", "org%2Fmodel", "org%2fmodel"])
async def test_a_route_with_a_slash_in_its_name_can_be_set_and_removed(gateway: Gateway, path: str) -> None:
    assert (await call(gateway, "PUT", f"/admin/v1/routes/{path}", {"pool": "p"})) == (200, {"name": "org/model"})
    _, answer = await call(gateway, "GET", "/admin/v1/routes")
    assert [row["name"] for row in answer["routes"]] == ["org/model", "r"]
    assert (await call(gateway, "DELETE", f"/admin/v1/routes/{path}"))[0] == 200
    assert set(gateway.fleet.routes) == {"r"}


async def test_a_route_set_over_the_files_is_whole_and_removing_it_gives_the_files_back(gateway: Gateway) -> None:
    split = {"pools": [{"pool": "t", "weight": 3}, {"pool": "p"}]}
    assert (await call(gateway, "PUT", "/admin/v1/routes/r", split))[0] == 200
    assert [(pool.name, weight) for pool, weight in gateway.fleet.routes["r"].pools] == [("t", 3.0), ("p", 1.0)]
    assert (await call(gateway, "PUT", "/admin/v1/routes/r", {"pool": "t", "fallback": ["p"]}))[0] == 200
    assert [pool.name for pool in gateway.fleet.routes["r"].all_pools] == ["t", "p"]
    assert (await call(gateway, "PUT", "/admin/v1/routes/r", {"pool": "t"}))[0] == 200
    assert [pool.name for pool in gateway.fleet.routes["r"].all_pools] == ["t"]
    status, answer = await call(gateway, "DELETE", "/admin/v1/routes/r")
    assert (status, answer["still_from"]) == (200, ["file"])
    assert [pool.name for pool in gateway.fleet.routes["r"].all_pools] == ["p"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "The route needs `pool`, or `pools` for a weighted split."),
        ({"pool": "p", "pools": [{"pool": "t"}]}, "The route has both `pool` and `pools`; keep one."),
        ({"pool": "x"}, "`pool`: no pool is named x; there are p, t."),
        ({"pool": "p", "fallback": ["x"]}, "`fallback[0]`: no pool is named x"),
        ({"pool": "p", "fallback": ["p"]}, "`fallback[0]`: pool p is named twice in this route."),
        ({"pools": [{"pool": "p"}, {"pool": "p"}]}, "`pools[1].pool`: pool p is named twice in this route."),
        ({"pools": [{"pool": "p", "wieght": 1}]}, "`pools[0].wieght`: unknown key; did you mean weight?"),
        ({"pools": [{"pool": "p", "weight": 0}]}, "`pools[0].weight`: must be at least 0.001."),
    ],
)
async def test_a_route_that_cannot_be_is_refused_with_a_reason(gateway: Gateway, body: Any, said: str) -> None:
    status, message = await refused(gateway, "PUT", "/admin/v1/routes/r", body)
    assert status == 400
    assert said in message
    assert "`name`: 'a b' is not a name" in (await refused(gateway, "PUT", "/admin/v1/routes/a%20b", {"pool": "p"}))[1]
    assert (await refused(gateway, "PUT", "/admin/v1/routes/a%0Ab", {"pool": "p"}))[0] == 400


async def test_what_no_endpoint_can_be_made_of_is_listed_with_the_reason_and_can_be_removed(
    valkey: ValkeyProcess, gateway: Gateway
) -> None:
    async def put(id_: str, spec: bytes, **changes: Any) -> None:
        document = Document(family="endpoints", id=id_, source="cli", generation=1, spec=msgspec.Raw(spec))
        await gateway.state.put(msgspec.structs.replace(document, **changes))

    await put("badurl", b'{"pool":"p","http":"http://[bad"}')
    await put("nopool", b'{"pool":"gone","http":"http://127.0.0.1:7"}')
    await put("noaddress", b'{"pool":"p"}')
    await put("orphan", b'{"drain":true}')
    await put("a", b"[1]")  # over the file's, which is in use
    async with valkey.client() as client:
        await client.hset("headrace:{demo}:endpoints", "cli/unreadable", b"\xff{")
        await client.xadd("headrace:{demo}:changes", {"what": "test"})
    async with asyncio.timeout(5):
        while not gateway.state.status.problems:  # noqa: ASYNC110 - a status has no event to wait for
            await asyncio.sleep(0.02)

    answer = (await call(gateway, "GET", "/admin/v1/endpoints"))[1]
    why = {row["id"]: row["detail"] for row in answer["endpoints"] if row["phase"] == "unusable"}
    assert set(why) == {"badurl", "nopool", "noaddress", "orphan"}
    assert why["badurl"] == "(from cli) is left out: `http`: the IPv6 address lacks its closing ]"
    assert "no pool 'gone'" in why["nopool"]
    assert "`http`: is missing; protocol openai needs" in why["noaddress"]
    assert "only what was laid over it is left" in why["orphan"]
    assert any("cli/unreadable" in problem for problem in answer["problems"])
    for id_ in (*why, "a", "unreadable"):
        assert (await call(gateway, "DELETE", f"/admin/v1/endpoints/{id_}"))[0] == 200, id_
    answer = (await call(gateway, "GET", "/admin/v1/endpoints"))[1]
    assert ([row["id"] for row in answer["endpoints"]], answer["problems"]) == (["a"], [])


async def test_a_route_to_pools_that_are_gone_is_listed_with_the_reason_and_can_be_removed(gateway: Gateway) -> None:
    spec = msgspec.Raw(b'{"pool":"gone"}')
    await gateway.state.put(Document(family="routes", id="lost", source="cli", generation=1, spec=spec))
    (row,) = [r for r in (await call(gateway, "GET", "/admin/v1/routes"))[1]["routes"] if r["name"] == "lost"]
    assert "there is no pool 'gone'" in row["problem"]
    assert "there is no pool 'gone'" in (await headrace(gateway, "routes", "list")).stdout
    assert (await headrace(gateway, "routes", "remove", "lost")).exit_code == 0
    assert {r["name"] for r in (await call(gateway, "GET", "/admin/v1/routes"))[1]["routes"]} == {"r"}


async def test_a_change_that_this_gateway_did_not_take_over_is_no_success(gateway: Gateway) -> None:
    gateway.frozen = True
    for method, path, body in (
        ("POST", "endpoints/a/drain", None),
        ("POST", "endpoints", NEW),
        ("PUT", "routes/r", {"pool": "t"}),
    ):
        status, message = await refused(gateway, method, f"/admin/v1/{path}", body)
        assert (status, message[:21]) == (503, "The change is stored,")


@pytest.mark.parametrize("phase", ["ready", "unhealthy", "starting"])
async def test_a_drain_shows_whatever_the_phase_and_says_when_it_is_done(gateway: Gateway, phase: str) -> None:
    state = gateway.fleet.endpoints["a"].state
    state.phase, state.detail, state.in_flight = phase, "as probed", 1  # type: ignore[assignment]
    await headrace(gateway, "endpoints", "drain", "a")
    (row,) = (await call(gateway, "GET", "/admin/v1/endpoints"))[1]["endpoints"]
    assert (row["drain"], row["detail"]) == ("draining", "as probed")
    gateway.fleet.endpoints["a"].state.in_flight = 0
    (row,) = (await call(gateway, "GET", "/admin/v1/endpoints"))[1]["endpoints"]
    assert (row["drain"], row["detail"]) == ("drained", "drained, safe to stop once every gateway says so; as probed")
    assert "drained, safe to stop" in (await headrace(gateway, "endpoints", "list")).stdout
    await headrace(gateway, "endpoints", "undrain", "a")
    (row,) = (await call(gateway, "GET", "/admin/v1/endpoints"))[1]["endpoints"]
    assert (row["drain"], row["phase"]) == (None, phase)


async def test_without_redis_the_fleet_is_shown_and_not_changed(valkey: ValkeyProcess, gateway: Gateway) -> None:
    async with serving(None) as alone:
        assert "redis: {url" in (await refused(alone, "POST", "/admin/v1/endpoints/a/drain"))[1]
    valkey.kill()
    async with asyncio.timeout(5):
        while gateway.state.status.connected:  # noqa: ASYNC110 - a status has no event to wait for
            await asyncio.sleep(0.02)
    gateway.fleet.endpoints["a"].state.phase = "ready"
    status, answer = await call(gateway, "GET", "/readyz")
    assert status == 200
    assert answer["degraded"][0].startswith("redis: ")
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + "/admin/v1/endpoints/a/drain") as response,
    ):
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
    assert (await call(gateway, "GET", "/admin/v1/endpoints"))[0] == 200
