"""The admin API on a real server, the shared state in a real Valkey, and the commands on top of both."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter
from typer.testing import CliRunner, Result

from gateway.admin.app import BODY_LIMIT, admin_app
from gateway.admin.view import Lifecycle, Workers, no_requests_left
from gateway.configuration import Origins
from gateway.exchange import LiveExchanges
from gateway.live_requests import RequestFilter, RequestList, cancel_request, list_requests
from gateway.log_levels import LogLevel, LogLevels
from gateway.reload import Reloaded, ReloadError
from headrace.cli.main import app
from router.admission.limits import Limits, TenantLimits
from router.fleet import Endpoint, FleetView, compile_view
from router.merge import MergedFleet, merge
from router.retry import RetryBudget
from router.spec.documents import Document, file_documents
from router.spec.fleet import FleetSpec
from router.state.fleet import FleetState
from router.state.store import DocumentStore, Mark
from tests.valkey import ValkeyProcess, servers_here

FILE = {
    "fleet": "demo",
    "pools": {
        "p": {"protocol": "openai", "model": "m", "endpoints": [{"id": "a", "http": "http://127.0.0.1:1"}]},
        "t": {"protocol": "triton", "model": "ensemble"},
    },
    "routes": {"r": {"pool": "p"}},
}
NEW = {"id": "new", "pool": "p", "http": "http://127.0.0.1:9"}


@dataclass
class Gateway:
    """The least that has an admin API: the documents compiled into a view, and no traffic."""

    redis_url: str | None
    lifecycle: Lifecycle = "serving"
    fleet: FleetView = field(default_factory=FleetView)
    merged: MergedFleet = field(default_factory=lambda: merge([]))
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    url: str = ""
    workers: Workers | None = None
    anonymous: bool = True
    frozen: bool = False
    """Takes nothing over any more, as if compiling a change failed."""

    def __post_init__(self) -> None:
        documents = file_documents(msgspec.convert(FILE, FleetSpec), content_hash="h")
        self.log_levels = LogLevels()
        self.live = LiveExchanges(list, RetryBudget(0, 0))
        self.state = FleetState(self.redis_url, "demo", documents, "h", self._on_documents)

    def degraded(self) -> list[str]:
        return []

    async def list_requests(self, wanted: RequestFilter) -> RequestList:
        return list_requests(self.live, wanted)

    def configuration(self) -> tuple[FleetSpec, Origins]:
        return msgspec.convert(FILE, FleetSpec), Origins(content_hash="h")

    def set_log_level(self, name: str, level: LogLevel | None) -> None:
        self.log_levels.set_or_reset(name, level)

    async def cancel_request(self, id_: str) -> bool:
        return cancel_request(self.live, id_)

    async def reload(self) -> Reloaded:
        raise ReloadError("The file is refused: line 3.")

    def drained(self, endpoint: Endpoint) -> bool:
        return no_requests_left(endpoint)

    def _on_documents(self, documents: list[Document]) -> None:
        if self.frozen:
            return
        self.merged = merge(documents)
        self.fleet = compile_view(self.merged, self.fleet)


@asynccontextmanager
async def serving(redis_url: str | None, token: str | None = None) -> AsyncIterator[Gateway]:
    gateway = Gateway(redis_url)
    runner = web.AppRunner(admin_app(gateway, token))
    try:
        await gateway.state.start()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield gateway
    finally:
        await runner.cleanup()
        await gateway.state.stop()


@pytest_asyncio.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[ValkeyProcess]:
    async with ValkeyProcess(servers_here()[0], tmp_path) as server:
        yield server


@pytest_asyncio.fixture
async def gateway(valkey: ValkeyProcess) -> AsyncIterator[Gateway]:
    async with serving(valkey.url) as gateway:
        yield gateway


async def call(gateway: Gateway, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method, gateway.url + path, data=None if body is None else json.dumps(body), headers=headers
        ) as r,
    ):
        return r.status, await r.json()


async def refused(gateway: Gateway, method: str, path: str, body: Any = None) -> tuple[int, str]:
    """Status and message of a refusal in the API's one shape."""
    status, answer = await call(gateway, method, path, body)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]["message"]


async def headrace(gateway: Gateway, *arguments: str, token: str | None = None) -> Result:
    """The command, in a thread: the gateway it talks to lives on this event loop."""
    environment = {"HEADRACE_ADMIN": gateway.url, "HEADRACE_ADMIN_TOKEN": token}
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)


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


async def test_the_commands_change_the_fleet(gateway: Gateway) -> None:
    for line in (
        "endpoints add org/new --pool p --http http://127.0.0.1:9 --zone b --capacity spot",
        "endpoints drain org/new",
        "routes set org/model --pool p=2 --pool t=1",
    ):
        result = await headrace(gateway, *line.split())
        assert (result.exit_code, result.stderr) == (0, ""), line
    listed = json.loads((await headrace(gateway, "endpoints", "list", "--json")).stdout)
    (row,) = [row for row in listed if row["id"] == "org/new"]
    assert (row["zone"], row["capacity"], row["sources"]) == ("b", "spot", ["cli"])
    assert gateway.fleet.endpoints["org/new"].spec.drain
    (route,) = [r for r in json.loads((await headrace(gateway, "routes", "list", "--json")).stdout) if r["name"] != "r"]
    assert route["pools"] == [{"pool": "p", "weight": 2.0}, {"pool": "t", "weight": 1.0}]
    assert "org/new" in (await headrace(gateway, "endpoints", "list")).stdout
    assert "p=2, t=1" in (await headrace(gateway, "routes", "list")).stdout
    for line in ("endpoints undrain org/new", "endpoints remove org/new", "routes remove org/model"):
        assert (await headrace(gateway, *line.split())).exit_code == 0, line
    assert set(gateway.fleet.endpoints) == {"a"}
    assert set(gateway.fleet.routes) == {"r"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"-ERR unknown command '\x1b[31m\xff'\r\n", "it does not speak HTTP"),
        (b"", "closed"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}", "status 404"),
        (b'HTTP/1.1 404 Oh\r\ncontent-length: 43\r\n\r\n{"error":{"message":"No","code":"not_found"}}', "status 404"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "its answer is not a gateway's"),
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 3\r\n\r\n\x1b[m", "status 500"),
    ],
)  # fmt: skip
async def test_what_is_no_admin_api_is_said_to_be_none_and_not_printed(answer: bytes, said: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        result = await asyncio.to_thread(CliRunner().invoke, app, ["endpoints", "list", "--admin", url])
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert url in result.stderr
    assert "\x1b" not in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("endpoints remove a", "comes from file"),
        ("endpoints drain nobody", "no endpoint 'nobody'"),
        ("endpoints add x --pool q --http http://127.0.0.1:9", "no pool is named q"),
        ("endpoints add x --pool p --http http://127.0.0.1:9 --capacity cheap", "not one of on-demand, spot"),
        ("endpoints list --admin http://127.0.0.1:1", "No gateway answers"),
        ("endpoints list --admin localhost", "not an address"),
        ("routes set r --pool p=much", "weight"),
        ("routes set r --pool =", "names no pool"),
        ("routes set r --pool =2", "names no pool"),
        ("routes set r --pool p --fallback p", "named twice"),
        ("routes remove nobody", "no route"),
    ],
)
async def test_a_command_that_fails_says_why_in_one_sentence_and_exits_with_1(
    gateway: Gateway, line: str, said: str
) -> None:
    result = await headrace(gateway, *line.split())
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


async def test_a_reload_that_is_refused_says_why(gateway: Gateway) -> None:
    assert await refused(gateway, "POST", "/admin/v1/reload") == (409, "The file is refused: line 3.")
    result = await headrace(gateway, "reload")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "The file is refused: line 3.\n")


async def test_a_tenant_is_set_listed_and_removed_with_its_keys_as_hashes_only(gateway: Gateway) -> None:
    first, second = "a" * 64, "b" * 64
    key = f"{{sha256: '{first}', name: ci, expires: 2027-01-31}}"
    limits = ["--limits", "{requests_per_minute: 60, streams: 4}", "--route-limits", "{r: {streams: 2}}"]
    keys = ["--key", key, "--key", second]
    waits = ["--priority", "batch", "--weight", "2"]
    result = await headrace(gateway, "tenants", "set", "org/search", *keys, "--route", "r", *limits, *waits)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "Tenant org/search has 2 keys and may call r.\n"
    assert gateway.fleet.keys.tenant_of(bytes.fromhex(first), 0.0) == "org/search"
    assert set(gateway.fleet.tenants["org/search"].routes) == {"r"}
    (row,) = json.loads((await headrace(gateway, "tenants", "list", "--json")).stdout)
    assert row == {
        "name": "org/search",
        "keys": [{"sha256": first, "name": "ci", "expires": "2027-01-31"}, {"sha256": second}],
        "routes": ["r"], "isolated": True, "priority": "batch", "weight": 2.0, "sources": ["cli"], "problem": None,
        "limits": {"requests_per_minute": 60, "streams": 4}, "route_limits": {"r": {"streams": 2}},
    }  # fmt: skip
    held = gateway.fleet.tenants["org/search"].limits
    assert held == TenantLimits("org/search", Limits(requests=60, streams=4), {"r": Limits(streams=2)})
    listed = (await headrace(gateway, "tenants", "list")).stdout
    assert "ci (to 2027-01-31), bbbbbbbb" in listed
    assert "60 requests/min, 4 at a time; r: 2 at a time" in listed
    result = await headrace(gateway, "tenants", "set", "org/search")
    assert result.stdout == "Tenant org/search is known by tokens only and may call every route.\n"
    assert gateway.fleet.tenants["org/search"].tenant == "org/search"
    for line, said in (("routes remove r", "comes from file"), ("tenants remove org/search", "")):
        assert said in (await headrace(gateway, *line.split())).stderr
    assert gateway.fleet.tenants == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["set", "t", "--key", "hr-secret"], "never the key itself"),
        (["set", "t", "--key", "{sha256: x"], "is no key as `headrace keys new` prints it"),
        (["set", "t", "--key", "a" * 64, "--route", "rr"], "no route is named rr; did you mean r?"),
        (["set", "t", "--key", "a" * 64, "--key", "a" * 64], "listed twice"),
        (["set", "t", "--key", "c" * 64], "tenant taken's already"),
        (["set", "t", "--key", "a" * 64, "--limits", "60"], "--limits: is no mapping"),
        (["set", "t", "--key", "a" * 64, "--limits", "{requests: 60}"], "requests"),
        (["set", "t", "--key", "a" * 64, "--route-limits", "{r: {streams: -1}}"], "route_limits.r.streams"),
        (["set", "a b", "--key", "a" * 64], "is not a name"),
        (["remove", "nobody"], "There is no tenant 'nobody'. There are: taken."),
    ],
)
async def test_a_tenant_that_cannot_be_is_refused_with_a_reason(
    gateway: Gateway, arguments: list[str], said: str
) -> None:
    assert (await headrace(gateway, "tenants", "set", "taken", "--key", "c" * 64)).exit_code == 0
    result = await headrace(gateway, "tenants", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert "hr-secret" not in result.stderr
    assert result.stderr.count("\n") == 1


async def test_a_loggers_level_is_set_and_reset_and_the_log_tells_who_did(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    for line, said in (
        ("log-level set gateway.upstream debug", "gateway.upstream says what is debug and above.\n"),
        ("log-level set root error", "root says what is error and above.\n"),
    ):
        result = await headrace(gateway, *line.split())
        assert (result.exit_code, result.stdout) == (0, said), result.stderr
    listed = json.loads((await headrace(gateway, "log-level", "list", "--json")).stdout)
    changed = {row["name"]: row["level"] for row in listed if row["changed"]}
    assert changed == {"root": "error", "gateway.upstream": "debug"}
    assert "gateway.upstream" in (await headrace(gateway, "log-level", "list")).stdout
    told = [record.getMessage() for record in caplog.records]
    assert "logger root is set to error" in told, "although the root said no more than errors then"
    assert "PUT /admin/v1/log-levels/root, asked for by 127.0.0.1: 200" in told
    for name in changed:
        assert (await headrace(gateway, "log-level", "reset", name)).exit_code == 0
    assert gateway.log_levels.changed == {}
    for line, said in (
        ("log-level set gatway debug", "There is no logger 'gatway'; did you mean gateway?"),
        ("log-level set gateway loud", "`level`: 'loud' is not one of debug, error, info, warning."),
        ("log-level set gateway.admin.app error", "always does."),
        ("log-level reset nobody", "There is no logger 'nobody'."),
    ):
        denied = await headrace(gateway, *line.split())
        assert (denied.exit_code, said in denied.stderr) == (1, True), denied.stderr
