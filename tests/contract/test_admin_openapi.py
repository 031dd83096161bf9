"""The admin API's OpenAPI document: it is the whole API, it is what is committed, and the API is as it says."""

from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import psutil
import pytest
from aiohttp import web

from gateway.admin import OPENAPI, TOKEN_HEADER
from gateway.admin.app import admin_app
from gateway.admin.openapi import document_text
from tests.contract.admin_gateway import serving
from tests.harness import ScriptedEngine, one_pool, running_gateway
from tests.schemathesis_runs import schemathesis_run
from tests.valkey import ValkeyProcess, servers_here

COMMITTED = Path(__file__).parents[2] / "docs/admin-openapi.json"
TOKEN = "sesame"
OPEN = {"/healthz", "/readyz", "/metrics"}
"""What needs no token: probes and scrapes carry none."""
LEAK_BYTES = 32 * 1024 * 1024


def document() -> Any:
    return msgspec.json.decode(document_text())


def operations() -> list[tuple[str, str]]:
    return [(method.upper(), path) for path, methods in document()["paths"].items() for method in methods]


async def test_the_committed_document_is_the_one_that_a_gateway_serves() -> None:
    async with running_gateway(one_pool(), wait_ready=False) as running, aiohttp.ClientSession() as session:
        async with session.get(running.admin_url + OPENAPI) as response:
            assert response.content_type == "application/json"
            assert await response.text() == COMMITTED.read_text(), "run: make openapi"


async def test_every_route_of_the_application_is_in_the_document_and_nothing_else_is() -> None:
    async with serving(None) as gateway:
        routes = admin_app(gateway, None).router.routes()
        paths = {(route.method, route.resource.canonical) for route in routes if route.resource is not None}
    assert {route for route in paths if route[0] != "HEAD"} == set(operations())
    assert {path for method, path in paths if method == "HEAD"} == {path for method, path in paths if method == "GET"}


def test_every_reference_of_the_document_leads_somewhere_and_its_schemas_are_json_schema() -> None:
    whole = document()
    for schema in whole["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = document_text()
    for kind, names in whole["components"].items():
        for name in names:
            if kind != "securitySchemes":
                assert f'"#/components/{kind}/{name}"' in text, f"{name} is used"
    references = {part.partition('"')[0] for part in text.split('"#/components/')[1:]}
    assert {tuple(one.split("/")) for one in references} <= {
        (kind, name) for kind, names in whole["components"].items() for name in names
    }


async def test_without_the_token_everything_is_refused_but_probes_and_metrics() -> None:
    async with running_gateway(one_pool(), wait_ready=False, admin_token=TOKEN) as running:
        async with aiohttp.ClientSession() as session:
            for method, path in operations():
                url = running.admin_url + path.replace("{name}", "x")
                async with session.request(method, url) as response:
                    assert (response.status != 401) == (path in OPEN), path
            async with session.get(f"{running.admin_url}/unheard-of") as response:
                assert response.status == 401


@pytest.mark.parametrize("exposed", [False, True])
async def test_where_other_machines_can_reach_it_and_there_is_no_token_nobody_may_use_it(exposed: bool) -> None:
    async with serving(None) as gateway:
        runner = web.AppRunner(admin_app(gateway, None, exposed=exposed))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            for method, path in operations():
                async with session.request(method, url + path.replace("{name}", "x")) as response:
                    assert (response.status == 403) == (exposed and path not in OPEN), path
                    if response.status == 403:
                        assert "HEADRACE_ADMIN_TOKEN" in (await response.json())["error"]["message"]
        await runner.cleanup()


async def test_the_api_is_as_its_document_says_whatever_it_is_sent(tmp_path: Path) -> None:
    async def unused(_: object) -> None:
        raise AssertionError("nobody asks the engine")

    async with ValkeyProcess(servers_here()[0], tmp_path) as valkey, ScriptedEngine(unused) as engine:
        spec = one_pool(engine.endpoint(), redis=valkey.url)
        async with running_gateway(spec, admin_token=TOKEN) as running:
            before = psutil.Process().memory_info().rss
            outcome = await schemathesis_run(
                str(COMMITTED),
                running.admin_url,
                tmp_path,
                headers={TOKEN_HEADER: TOKEN},
                examples=3,
                # A document cannot say which pools and endpoints there are, nor that names may hold slashes: so what it
                # allows may be refused, and a name that ends in a verb has another path's methods, too.
                without=("positive_data_acceptance", "unsupported_method", "allow_header_conformance"),
            )
            assert outcome.passed, outcome.report
            assert outcome.operations == len(operations())
            assert psutil.Process().memory_info().rss - before < LEAK_BYTES
            async with aiohttp.ClientSession() as session, session.get(f"{running.admin_url}/readyz") as response:
                assert response.status == 200
