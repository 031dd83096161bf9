"""The open requests of a gateway, listed and cancelled over its admin API and by the command."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

from gateway.admin import TOKEN_HEADER
from gateway.live_requests import CANCELLED
from headrace.cli.main import app
from tests.harness import ONE, EngineConnection, RunningGateway, ScriptedEngine, one_pool, running_gateway

SECRET = "what nobody else is to read"
ASKED = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
SIX = 6 * len(ONE)
STATES = ("decode", "prefill", "queued", "reading")


async def _holds(connection: EngineConnection) -> None:
    """Begins a stream and goes on with it for ever, or never begins."""
    if b'"stream"' in connection.body:
        await connection.events(ONE)
    await connection.client_gone()


class Asked:
    """A request of every state, by it."""

    def __init__(self, running: RunningGateway, engine: ScriptedEngine) -> None:
        self.running = running
        self.engine = engine
        self.answers: dict[str, asyncio.Task[tuple[int, bytes]]] = {}

    async def rows(self, **query: Any) -> list[dict[str, Any]]:
        listed = await self.listed(**query)
        found: list[dict[str, Any]] = listed["requests"]
        return found

    async def listed(self, **query: Any) -> Any:
        url = f"{self.running.admin_url}/admin/v1/requests"
        async with aiohttp.ClientSession() as session, session.get(url, params=query) as response:
            text = await response.text()
            assert response.status == 200 and SECRET not in text, text
            return json.loads(text)

    async def cancel(self, id_: str) -> tuple[int, Any]:
        url = f"{self.running.admin_url}/admin/v1/requests/{id_}"
        async with aiohttp.ClientSession() as session, session.delete(url) as response:
            return response.status, await response.json()

    async def until_state(self, state: str) -> None:
        async with asyncio.timeout(5):
            while not await self.rows(state=state):  # noqa: ASYNC110 - what the admin API says is no event
                await asyncio.sleep(0.01)

    async def headrace(self, *arguments: str) -> Result:
        environment = {"HEADRACE_ADMIN": self.running.admin_url}
        return await asyncio.to_thread(CliRunner().invoke, app, ["requests", *arguments], env=environment)


async def _answer(url: str, session: aiohttp.ClientSession, body: Any, request_id: str) -> tuple[int, bytes]:
    headers = {"x-request-id": request_id, "content-type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
        return response.status, await response.content.read()


async def _half() -> AsyncIterator[bytes]:
    """A body whose second half never comes."""
    yield json.dumps(ASKED).encode()[:-20]
    await asyncio.sleep(60)


@pytest_asyncio.fixture
async def asked() -> AsyncIterator[Asked]:
    async with ScriptedEngine(_holds) as engine, aiohttp.ClientSession() as session:
        async with running_gateway(one_pool(engine.endpoint(), max_in_flight=2)) as running:
            asked = Asked(running, engine)
            bodies = {"decode": json.dumps({**ASKED, "stream": True}), "prefill": json.dumps(ASKED)}
            bodies["queued"] = bodies["prefill"]
            for state in STATES:
                body = bodies.get(state) or _half()
                asked.answers[state] = asyncio.create_task(_answer(running.url, session, body, f"of-{state}"))
                await asked.until_state(state)
            try:
                yield asked
            finally:
                for task in asked.answers.values():
                    task.cancel()
                await asyncio.gather(*asked.answers.values(), return_exceptions=True)


async def test_open_requests_are_listed_in_every_state_without_their_prompts(asked: Asked) -> None:
    rows = await asked.rows()
    assert [row["state"] for row in rows] == list(STATES), "the oldest first"
    assert [row["request_id"] for row in rows] == [f"of-{state}" for state in STATES]
    assert len({row["id"] for row in rows}) == len(STATES)
    decode, prefill, queued, reading = rows
    for row in rows:
        assert (row["client"], row["protocol"], row["path"]) == ("127.0.0.1", "http", "/v1/chat/completions")
    for row in (decode, prefill):
        assert (row["route"], row["endpoint"], row["engine"]) == ("m", "engine", "openai")
        assert (row["model"], row["attempts"]) == ("engine-model", 1)
    assert (decode["bytes"], prefill["bytes"]) == (len(ONE), 0)
    assert (queued["route"], queued["endpoint"], queued["queue_position"]) == ("m", None, 1)
    assert (reading["route"], reading["endpoint"], reading["attempts"]) == (None, None, 0)
    assert decode["age_s"] >= reading["age_s"] >= 0


async def test_bytes_of_a_stream_under_way_are_counted_and_listing_changes_nothing_of_it() -> None:
    go_on = asyncio.Event()

    async def script(connection: EngineConnection) -> None:
        await connection.events(ONE)
        for _ in range(5):
            await asyncio.sleep(0.01)
            await connection.chunk(ONE)
        await go_on.wait()
        await connection.chunk(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        await connection.end()

    async with ScriptedEngine(script) as engine, aiohttp.ClientSession() as session:
        async with running_gateway(one_pool(engine.endpoint())) as running:
            asked = Asked(running, engine)
            body = json.dumps({**ASKED, "stream": True})
            answer = asyncio.create_task(_answer(running.url, session, body, "r"))
            async with asyncio.timeout(5):
                # The framing of chunks that are passed on as they came is counted with them.
                while [row["bytes"] < SIX for row in await asked.rows(state="decode")] != [False]:  # noqa: ASYNC110 - nor is this
                    await asyncio.sleep(0.005)
            go_on.set()
            status, content = await answer
            assert (status, content.count(ONE), content.endswith(b"data: [DONE]\n\n")) == (200, 6, True)


async def test_filters_and_the_limit_hold_and_what_they_leave_out_is_counted(asked: Asked) -> None:
    for state in STATES:
        assert [row["request_id"] for row in await asked.rows(state=state)] == [f"of-{state}"]
    assert {row["state"] for row in await asked.rows(endpoint="engine")} == {"decode", "prefill"}
    assert {row["state"] for row in await asked.rows(route="m")} == {"decode", "prefill", "queued"}
    assert await asked.rows(tenant="nobody") == []
    assert await asked.rows(older_than_s=3600) == []
    listed = await asked.listed(limit=1)
    assert ([row["state"] for row in listed["requests"]], listed["matching"]) == (["decode"], 4)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("limit=0", "`limit`: Expected `int` >= 1."),
        ("limit=1001", "`limit`: Expected `int` <= 1000."),
        ("older_than_s=-1", "`older_than_s`: Expected `float` >= 0"),
        ("older_than_s=nan", "`older_than_s`: Expected `float`"),
        ("state=asleep", "`state`: Invalid enum value 'asleep'."),
        ("tenat=a", "`tenat` is not known; known are tenant, route,"),
        ("tenant=a&tenant=b", "`tenant` is given twice."),
    ],
)
async def test_a_filter_that_means_nothing_is_refused_by_its_name(query: str, said: str) -> None:
    async with running_gateway(one_pool(), wait_ready=False) as running, aiohttp.ClientSession() as session:
        async with session.get(f"{running.admin_url}/admin/v1/requests?{query}") as response:
            assert response.status == 400
            assert (await response.json())["error"]["message"].startswith(said)


@pytest.mark.parametrize("state", STATES)
async def test_a_cancelled_request_ends_properly_whatever_it_was_at(asked: Asked, state: str) -> None:
    (row,) = await asked.rows(state=state)
    assert await asked.cancel(row["id"]) == (200, {"id": row["id"], "cancelled": True})
    async with asyncio.timeout(5):
        status, content = await asked.answers[state]
    if state == "decode":
        assert (status, content.startswith(ONE), b"[DONE]" in content) == (200, True, False)
        content = content.removeprefix(ONE + b"data: ")
    else:
        assert status == 410
    error = json.loads(content)["error"]
    assert (error["code"], error["message"]) == (CANCELLED, "The operator of this gateway has ended the request.")
    if state in ("decode", "prefill"):  # the engine is told, and has room for the one that waited
        await asked.running.until(lambda: len(asked.engine.requests) == 3, "the engine has the next request")
    assert len(await asked.rows()) == 3
    assert asked.running.gateway.fleet.endpoints["engine"].phase == "ready"
    status, answer = await asked.cancel(row["id"])
    assert (status, answer["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize("id_", ["0", "nobody", "00000000-1", "-", "%2F"])
async def test_an_id_that_no_open_request_has_is_not_found(asked: Asked, id_: str) -> None:
    assert (await asked.cancel(id_))[0] == 404
    assert len(await asked.rows()) == 4


@pytest.mark.parametrize(
    "line",
    [b"x-headrace-admin-token: hunter2\r", b"x-headrace-admin-token hunter2", b" x-headrace-admin-token: hunter2"],
)
async def test_what_is_not_http_on_the_admin_port_is_refused_and_not_quoted_in_the_log(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_gateway(one_pool()) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.admin_port)
        writer.write(b"GET /admin/v1/routes HTTP/1.1\r\nhost: x\r\n" + line + b"\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
        writer.close()
    assert "hunter2" not in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize("token", [None, "t"])
async def test_a_web_page_changes_nothing_without_the_token(token: str | None) -> None:
    async with running_gateway(one_pool(), admin_token=token) as running, aiohttp.ClientSession() as session:
        headers = {"origin": "https://evil.example", "content-type": "text/plain"}
        headers |= {TOKEN_HEADER: token} if token is not None else {}
        url = f"{running.admin_url}/admin/v1/log-levels/root"
        async with session.delete(url, headers=headers) as response:
            assert response.status == (403 if token is None else 200), await response.text()
        async with session.get(f"{running.admin_url}/readyz", headers=headers) as response:
            assert response.status != 403, "probes and metrics are anybody's"


async def test_the_command_lists_and_cancels(asked: Asked) -> None:
    listed = await asked.headrace("list")
    assert listed.exit_code == 0, listed.output
    for state, line in zip(STATES, listed.stdout.splitlines()[1:], strict=True):
        assert f" of-{state} " in line
    rows = json.loads((await asked.headrace("list", "--json", "--state", "queued")).stdout)
    assert [row["request_id"] for row in rows] == ["of-queued"]
    limited = await asked.headrace("list", "--limit", "1")
    assert limited.stderr == "3 more are not shown: filter, or raise --limit.\n"
    ended = await asked.headrace("cancel", rows[0]["id"])
    assert (ended.exit_code, ended.stdout) == (0, f"Request {rows[0]['id']} is ended.\n")
    again = await asked.headrace("cancel", rows[0]["id"])
    assert (again.exit_code, "No open request has the id" in again.stderr) == (1, True)
    refused = await asked.headrace("list", "--state", "asleep")
    assert (refused.exit_code, "`state`: Invalid enum value 'asleep'" in refused.stderr) == (1, True)
    with contextlib.suppress(asyncio.CancelledError):
        assert (await asked.answers["queued"])[0] == 410
