"""The commands that ask the admin API, on a real server and a real Valkey."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from headrace.cli.main import app
from router.admission.limits import Limits, TenantLimits
from tests.contract.admin_gateway import Gateway, headrace, refused, serving
from tests.valkey import ValkeyProcess, servers_here


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with ValkeyProcess(servers_here()[0], tmp_path) as valkey, serving(valkey.url) as gateway:
        yield gateway


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
