"""What holds whatever happens: retries, credentials, labels, logs, drains and changes of the fleet under traffic."""

import asyncio
import json
import logging
from typing import Any

import aiohttp
import msgspec
import pytest

from router.spec.documents import Document, file_documents
from router.spec.fleet import FleetSpec, TimeoutSpec
from tests.harness import (
    CHAT,
    DONE,
    ONE,
    STREAM,
    EngineConnection,
    HeldEngine,
    RunningGateway,
    ScriptedEngine,
    answering,
    one_pool,
    running_gateway,
    streaming,
)


async def ask(client: aiohttp.ClientSession, running: RunningGateway, body: dict[str, Any]) -> tuple[int, bytes]:
    async with client.post(f"{running.url}/v1/chat/completions", json=body) as response:
        return response.status, await response.read()


whole = streaming(ONE, DONE)


async def lost(connection: EngineConnection) -> None:
    connection.reset()


def documents(spec: FleetSpec) -> list[Document]:
    return file_documents(spec, content_hash="other")


def raw_request(body: dict[str, Any]) -> bytes:
    encoded = json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(encoded) + encoded


class TestRetries:
    async def test_nothing_is_retried_once_an_engine_has_begun_to_answer(self, client: aiohttp.ClientSession) -> None:
        async def dies(connection: EngineConnection) -> None:
            await connection.events(ONE)
            connection.reset()

        async with ScriptedEngine(dies) as first, ScriptedEngine(dies) as second:
            async with running_gateway(one_pool(first.endpoint("a"), second.endpoint("b"))) as running:
                status, body = await ask(client, running, STREAM)
        assert (status, body.count(b"one")) == (200, 1)
        assert b'"error"' in body and b"[DONE]" not in body
        assert len(first.requests) + len(second.requests) == 1

    async def test_three_endpoints_are_tried_and_no_more(self, client: aiohttp.ClientSession) -> None:
        async def busy(connection: EngineConnection) -> None:
            await connection.head("content-length: 0", status="503 Service Unavailable")

        async with ScriptedEngine(busy) as engine:
            spec = one_pool(*(engine.endpoint(f"e{n}") for n in range(5)))
            async with running_gateway(spec) as running:
                assert (await ask(client, running, CHAT))[0] == 503
                assert (await metrics(client, running)).count("headrace_attempts_total{") == 3
        assert len(engine.requests) == 3

    async def test_a_clients_mistake_counts_against_no_endpoint(self, client: aiohttp.ClientSession) -> None:
        async def refuses(connection: EngineConnection) -> None:
            await connection.head("content-length: 2", "content-type: application/json", status="400 Bad Request")
            await connection.send(b"{}")

        async with ScriptedEngine(refuses) as engine, running_gateway(one_pool(engine.endpoint())) as running:
            for _ in range(20):
                assert (await ask(client, running, CHAT))[0] == 400
            assert running.gateway.fleet.endpoints["engine"].phase == "ready"
            assert "headrace_upstream_failures_total{" not in await metrics(client, running)

    async def test_an_endpoint_taken_out_while_another_was_tried_is_passed_over(
        self, client: aiohttp.ClientSession
    ) -> None:
        async def takes_out_the_other(connection: EngineConnection) -> None:
            asked_first = connection.headers["host"] == f"127.0.0.1:{first.port}"
            running.apply(documents(one_pool(first.endpoint("a") if asked_first else second.endpoint("b"))))
            connection.reset()

        async with ScriptedEngine(takes_out_the_other) as first, ScriptedEngine(takes_out_the_other) as second:
            async with running_gateway(one_pool(first.endpoint("a"), second.endpoint("b"))) as running:
                status, body = await ask(client, running, CHAT)
        assert (status, json.loads(body)["error"]["code"]) == (503, "engine_gone")


async def metrics(client: aiohttp.ClientSession, running: RunningGateway) -> str:
    async with client.get(f"{running.admin_url}/metrics") as response:
        return await response.text()


async def test_credentials_and_hop_by_hop_headers_stay_on_their_side(client: aiohttp.ClientSession) -> None:
    async def talkative(connection: EngineConnection) -> None:
        await connection.head(
            "content-type: application/json",
            "content-length: 2",
            "set-cookie: engine=secret",
            "x-api-key: secret",
            "proxy-authenticate: Basic",
            "upgrade: h2c",
            "server: engine",
        )
        await connection.send(b"{}")

    sent = {
        "authorization": "Bearer secret",
        "x-api-key": "secret",
        "api-key": "secret",
        "cookie": "a=secret",
        "openai-organization": "secret",
        "te": "trailers",
        "x-headrace-admin-token": "secret",
        "traceparent": "00-1-2-01",
        "x-request-id": "given",
    }
    async with ScriptedEngine(talkative) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        async with client.post(f"{running.url}/v1/chat/completions", json=CHAT, headers=sent) as response:
            received = response.headers
    (request,) = engine.requests
    assert set(request.headers) == {
        "host", "content-type", "content-length", "accept-encoding", "x-request-id", "traceparent",
    }  # fmt: skip
    assert (request.headers["x-request-id"], request.headers["traceparent"]) == ("given", "00-1-2-01")
    assert "secret" not in str(received)
    assert not {"set-cookie", "proxy-authenticate", "upgrade", "server"} & {name.lower() for name in received}


async def test_a_header_cannot_smuggle_lines_into_the_engines_request() -> None:
    async with ScriptedEngine(whole) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        head, _, body = raw_request(STREAM).partition(b"\r\n\r\n")
        odd = b"\r\nx-request-id: a\xff b\r\ntraceparent: \xc3\xa9\r\ntracestate: a\tb"
        writer.write(head + odd + b"\r\n\r\n" + body)
        answer = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 5)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    (request,) = engine.requests
    assert request.headers["x-request-id"].isalnum()
    assert "traceparent" not in request.headers


async def test_metric_labels_are_bounded_by_the_fleet(client: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(whole) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        for number in range(20):
            assert (await ask(client, running, {**CHAT, "model": f"made-up-{number}"}))[0] == 404
        assert (await ask(client, running, STREAM))[0] == 200
        page = await metrics(client, running)
        assert "made-up" not in page
        assert 'headrace_requests_total{api="chat.completions",route="unknown",status="404"} 20.0' in page
        assert 'headrace_attempts_total{endpoint="engine",reason="affinity"} 1.0' in page
        other = ScriptedEngine(whole, port=engine.port)
        running.apply(documents(one_pool(other.endpoint("renamed"))))
        assert 'endpoint="engine"' not in await metrics(client, running)


async def test_prompts_answers_and_credentials_are_never_logged(
    client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(connection: EngineConnection) -> None:
        await connection.events(b'data: {"choices":[{"delta":{"content":"COMPLETION"}}]}\n\n')
        await connection.send(b"COMPLETION is not a chunk size\r\n")
        await connection.client_gone()

    caplog.set_level(logging.DEBUG)
    secret = {"role": "user", "content": "PROMPT"}
    async with ScriptedEngine(fails) as engine, ScriptedEngine(lost) as other:
        async with running_gateway(one_pool(engine.endpoint("a"), other.endpoint("b"))) as running:
            for salt in range(6):
                headers = {"authorization": "Bearer CREDENTIAL"}
                body = {**STREAM, "messages": [secret], "cache_salt": str(salt)}
                async with client.post(f"{running.url}/v1/chat/completions", json=body, headers=headers) as response:
                    await response.read()
            await ask(client, running, {"model": "m", "messages": [secret], "temperature": "PROMPT"})
            await ask(client, running, {"model": "m", "messages": "PROMPT"})
    ours = [
        record for record in caplog.records if record.name.split(".")[0] in ("gateway", "router", "headrace", "aiohttp")
    ]
    assert ours
    assert not [record for record in ours if any(word in record.getMessage() for word in ("PROMPT", "CREDENTIAL"))]


class TestDrain:
    async def test_a_stopping_gateway_lets_its_streams_finish(self, client: aiohttp.ClientSession) -> None:
        async with HeldEngine() as engine, running_gateway(one_pool(engine.endpoint())) as running:
            asked = asyncio.create_task(ask(client, running, STREAM))
            await running.until(lambda: running.live_requests == 1 and bool(engine.requests), "a stream is running")
            await asyncio.sleep(0.05)
            stopping = asyncio.create_task(running.gateway.stop())
            await running.until(lambda: running.gateway.lifecycle == "draining", "draining")
            with pytest.raises(aiohttp.ClientConnectionError):
                await asyncio.sleep(0.1)
                await ask(client, running, CHAT)
            async with client.get(f"{running.admin_url}/readyz") as response:
                assert response.status == 503
            engine.let_go()
            assert await asked == (200, ONE + DONE)
            await asyncio.wait_for(stopping, 5)

    async def test_a_gateway_told_to_wait_no_longer_tells_its_clients(self, client: aiohttp.ClientSession) -> None:
        async def hangs(connection: EngineConnection) -> None:
            await connection.events(ONE)
            await connection.client_gone()

        async with ScriptedEngine(hangs) as engine, running_gateway(one_pool(engine.endpoint())) as running:
            asked = asyncio.create_task(ask(client, running, STREAM))
            await running.until(lambda: bool(engine.requests), "a stream is running")
            await asyncio.sleep(0.05)
            stopping = asyncio.create_task(running.gateway.stop())
            await asyncio.sleep(0.1)
            stopping.cancel()
            await asyncio.wait_for(stopping, 5)
            status, body = await asked
        assert status == 200
        assert body.startswith(ONE + b'data: {"error"') and b"gateway_stopping" in body and b"[DONE]" not in body

    async def test_taking_an_endpoint_out_cuts_no_stream(self, client: aiohttp.ClientSession) -> None:
        async with HeldEngine() as engine, running_gateway(one_pool(engine.endpoint())) as running:
            asked = asyncio.create_task(ask(client, running, STREAM))
            await running.until(lambda: bool(engine.requests), "a stream is running")
            running.apply([])
            assert (await ask(client, running, CHAT))[0] == 404
            await asyncio.sleep(0.1)
            engine.let_go()
            assert await asked == (200, ONE + DONE)


async def test_a_change_of_a_pools_settings_interrupts_nothing(client: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(whole) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        before = running.gateway.fleet.endpoints["engine"]
        for seconds in range(1, 5):
            running.apply(documents(one_pool(engine.endpoint(), timeouts=TimeoutSpec(idle=f"{seconds}s"))))
            assert await ask(client, running, STREAM) == (200, ONE + DONE)
        after = running.gateway.fleet.endpoints["engine"]
        assert after.state is before.state
        assert running.gateway.fleet.pools["p"].timeouts.idle == 4


async def test_one_document_that_cannot_be_used_costs_the_fleet_nothing_else(client: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(whole) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        good = documents(one_pool(engine.endpoint()))
        bad = [
            Document(family="endpoints", id=f"bad{n}", source="cli", generation=1, spec=msgspec.Raw(spec))
            for n, spec in enumerate(
                [
                    b'{"pool":"p","http":"http://h:99999"}',
                    b'{"pool":"p"}',
                    b'{"pool":"nope","http":"http://h:1"}',
                    b'{"pool":3}',
                    b'{"pool":"p","http":"http://h:1","role":"chief"}',
                ]
            )
        ]
        running.apply(good + bad)
        assert await ask(client, running, STREAM) == (200, ONE + DONE)
        assert set(running.gateway.fleet.endpoints) == {"engine"}
        async with client.get(f"{running.admin_url}/readyz") as response:
            problems = (await response.json())["detail"]["problems"]
        assert all(any(f"bad{n}" in problem for problem in problems) for n in range(len(bad))), problems
        async with client.get(f"{running.url}/v1/models") as response:
            assert response.status == 200


class TestEndOfStream:
    @pytest.mark.parametrize("mark", [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"])
    async def test_a_stream_that_said_done_is_whole_even_if_its_framing_is_not(
        self, client: aiohttp.ClientSession, mark: bytes
    ) -> None:
        async def cut(connection: EngineConnection) -> None:
            await connection.events(ONE, mark)
            connection.reset()

        async with ScriptedEngine(cut) as engine, running_gateway(one_pool(engine.endpoint())) as running:
            assert await ask(client, running, STREAM) == (200, ONE + mark)

    async def test_text_that_quotes_the_end_mark_is_not_the_end(self, client: aiohttp.ClientSession) -> None:
        quoting = b'data: {"choices":[{"delta":{"content":"\\n\\ndata: [DONE]"}}]}\n\n'

        async def dies(connection: EngineConnection) -> None:
            await connection.events(quoting)
            connection.reset()

        async with ScriptedEngine(dies) as engine, running_gateway(one_pool(engine.endpoint())) as running:
            status, body = await ask(client, running, STREAM)
        assert status == 200 and body.startswith(quoting + b'data: {"error"')


class TestBackPressure:
    async def test_an_engine_connection_whose_client_fell_behind_serves_the_next_request(
        self, client: aiohttp.ClientSession
    ) -> None:
        size = 12 * 1024 * 1024

        large = answering(body=b"x" * size)

        async with ScriptedEngine(large) as engine, running_gateway(one_pool(engine.endpoint())) as running:
            for _ in range(3):
                async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
                    await asyncio.sleep(0.1)
                    assert len(await response.read()) == size
                await running.until_idle()

    async def test_an_answer_behind_one_that_was_not_read_is_held_up_too(self) -> None:
        size = 8 * 1024 * 1024
        written = 0

        async def flood(connection: EngineConnection) -> None:
            nonlocal written
            await connection.events()
            for _ in range(64):
                await connection.chunk(b"data: " + b"x" * (size // 64) + b"\n\n")
                written += size // 64
            await connection.end()

        async with ScriptedEngine(flood) as engine:
            spec = one_pool(engine.endpoint(), timeouts=TimeoutSpec(idle="1s"))
            async with running_gateway(spec) as running:
                _, writer = await asyncio.open_connection("127.0.0.1", running.http_port, limit=1024)
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                for _ in range(4):
                    writer.write(raw_request(STREAM))
                await running.until(lambda: running.live_requests == 1, "the first request is being answered")
                await running.until_idle(10)
                writer.transport.abort()
        assert written < 3 * size


async def test_a_request_sent_again_after_a_lost_prefill_is_not_mixed_with_the_first(
    client: aiohttp.ClientSession,
) -> None:
    progress = b'data: {"prompt_progress":{"total":9,"processed":3}}\n\n'
    models = b'{"data":[{"id":"engine-model","owned_by":"llamacpp"}]}'

    async def dies_in_prefill(connection: EngineConnection) -> None:
        if len(engine.requests) == 1:
            await whole(connection)
            return
        await connection.head("content-type: text/event-stream", "transfer-encoding: chunked")
        await asyncio.sleep(0.05)
        await connection.chunk(progress)
        await asyncio.sleep(0.05)
        connection.reset()

    async with ScriptedEngine(dies_in_prefill, models=models) as engine:
        async with running_gateway(one_pool(engine.endpoint())) as running:
            assert (await ask(client, running, STREAM))[0] == 200
            status, body = await ask(client, running, STREAM)
    assert (status, json.loads(body)["error"]["code"]) == (502, "engine_lost")
    assert len(engine.requests) == 2
