"""The client-facing API's OpenAPI document: it is what is committed and served, and the API is as it says."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from gateway.http.front import APIS, OPENAPI
from gateway.http.kserve_paths import METHODS
from gateway.http.openapi import document_text
from headrace.bench.kserve.messages import STREAM
from router.spec.fleet import FleetSpec, RouteSpec
from router.spec.gateway import GatewaySpec
from tests.fault.held_triton import HeldTriton
from tests.harness import (
    DONE,
    FAST_PROBES,
    ONE,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    one_pool,
    running_gateway,
)
from tests.schemathesis_runs import schemathesis_run

COMMITTED = Path(__file__).parents[2] / "docs/openapi.json"
WITHOUT = ("positive_data_acceptance", "negative_data_rejection")
"""What is passed to engines unread, the gateway can neither accept nor reject."""
LEAK_BYTES = 48 * 1024 * 1024


async def answer(connection: EngineConnection) -> None:
    """What a healthy engine says, whatever it is asked."""
    if b'"stream":true' in connection.body or connection.path.endswith("/generate_stream"):
        await connection.stream(ONE, DONE)
    else:
        await connection.json()


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[RunningGateway]:
    """The route `m` to a scripted engine, and one to a stand-in for Triton that is the same over HTTP."""
    async with ScriptedEngine(answer) as engine, HeldTriton() as triton:
        triton.endpoint = msgspec.structs.replace(triton.endpoint, http=f"http://127.0.0.1:{engine.port}")
        spec = one_pool(engine.endpoint())
        pools = {**spec.pools, STREAM: triton.pools(probe=FAST_PROBES)[STREAM]}
        routes = {**spec.routes, STREAM: RouteSpec(pool=STREAM)}
        whole = FleetSpec(fleet="test", pools=pools, routes=routes, gateway=GatewaySpec())
        async with running_gateway(whole) as running:
            yield running


def operations() -> list[tuple[str, str]]:
    paths: dict[str, Any] = msgspec.json.decode(document_text())["paths"]
    return [(method.upper(), path) for path, one in paths.items() for method in one if method != "parameters"]


async def test_the_committed_document_is_the_one_that_a_gateway_serves() -> None:
    async with running_gateway(one_pool(), wait_ready=False) as running, aiohttp.ClientSession() as session:
        async with session.get(running.url + OPENAPI) as response:
            assert response.content_type == "application/json"
            assert await response.text() == COMMITTED.read_text(), "run: make openapi"


async def test_what_the_front_answers_is_in_the_document_with_the_method_that_it_takes() -> None:
    described = {path: method for method, path in operations()}
    assert described.keys() >= APIS.keys()
    ends = {"" if one == "metadata" else f"/{one}": method for one, method in METHODS.items()}
    for version in ("", "/versions/{version}"):
        assert (
            ends.items()
            <= {
                path.removeprefix(f"/v2/models/{{model}}{version}"): method for path, method in described.items()
            }.items()
        )
    async with fleet() as running, aiohttp.ClientSession() as session:
        for path, method in described.items():
            url = running.url + path.replace("{model}", STREAM).replace("{version}", "1")
            async with session.request(method, url, data=b"{}" if method == "POST" else None) as response:
                assert response.status not in (404, 405, 501) or path == "/v1/models/{model}", (path, response.status)
            async with session.delete(url) as response:
                assert (response.status, response.headers["allow"]) == (405, method)


async def test_the_api_is_as_its_document_says_whatever_it_is_sent(tmp_path: Path) -> None:
    whole = msgspec.json.decode(COMMITTED.read_bytes())
    whole["components"]["schemas"]["Route"]["enum"] = ["m"]
    whole["components"]["parameters"]["Model"]["schema"]["enum"] = [STREAM]
    document = tmp_path / "openapi.json"
    document.write_bytes(msgspec.json.encode(whole))
    async with fleet() as running:
        process = psutil.Process()
        files, memory = process.num_fds(), process.memory_info().rss
        outcome = await schemathesis_run(str(document), running.url, tmp_path, examples=3, without=WITHOUT)
        assert outcome.passed, outcome.report
        assert outcome.operations == len(operations())
        await running.until_idle()
        clients = running.gateway._clients
        assert clients is not None
        await running.until(lambda: not clients.connections, "no connection is left", 10)
        await running.until(lambda: process.num_fds() <= files + 8, "files are closed", 10)
        assert process.memory_info().rss - memory < LEAK_BYTES
