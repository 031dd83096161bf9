"""What a client sees, and what the engine and the counters see, when something breaks. The engine is scripted: real
ones cannot be told to die in the middle of a chunk."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.spec.fleet import TimeoutSpec
from tests.harness import (
    CHAT,
    DONE,
    ONE,
    STREAM,
    TWO,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    free_port,
    one_pool,
    running_gateway,
    streaming,
)

whole = streaming(ONE, TWO, DONE)


async def ask(
    client: aiohttp.ClientSession, running: RunningGateway, body: dict[str, Any] = STREAM
) -> tuple[int, bytes]:
    """Status and body; a body that breaks off ends in `<cut>`."""
    async with client.post(f"{running.url}/v1/chat/completions", json=body) as response:
        received = b""
        try:
            async for piece in response.content.iter_any():
                received += piece
        except aiohttp.ClientPayloadError:
            received += b"<cut>"
        return response.status, received


def last_error(body: bytes) -> dict[str, Any]:
    """The error of the last event."""
    event = body.removesuffix(b"\n\n").rpartition(b"\n\n")[2] or body
    error: dict[str, Any] = json.loads(event.removeprefix(b"data: "))["error"]
    return error


async def before_head(connection: EngineConnection) -> None:
    connection.reset()


async def after_head(connection: EngineConnection) -> None:
    await connection.events()
    connection.reset()


async def between_events(connection: EngineConnection) -> None:
    await connection.events(ONE)
    connection.reset()


async def mid_event(connection: EngineConnection) -> None:
    await connection.events(ONE, TWO[:20])
    connection.reset()


async def mid_chunk(connection: EngineConnection) -> None:
    await connection.events(ONE)
    await connection.send(b"%x\r\n%b" % (len(TWO), TWO[:20]))
    connection.reset()


async def mid_character(connection: EngineConnection) -> None:
    await connection.events(ONE, TWO[: TWO.index(b"\x99")])
    connection.reset()


async def garbage_chunk(connection: EngineConnection) -> None:
    await connection.events(ONE)
    await connection.send(b"not a size\r\n")
    await connection.client_gone()


async def closed_without_done(connection: EngineConnection) -> None:
    await connection.head("content-type: text/event-stream", "connection: close")
    await connection.send(ONE)
    connection.writer.close()


async def endless_event(connection: EngineConnection) -> None:
    await connection.events(ONE)
    while True:
        await connection.chunk(b"x" * 65536)


DEATHS = [
    between_events,
    mid_event,
    mid_chunk,
    mid_character,
    garbage_chunk,
    closed_without_done,
    endless_event,
]


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.__name__)
async def test_a_stream_that_breaks_off_ends_in_an_error_event_without_done(
    client: aiohttp.ClientSession, death: Callable[[EngineConnection], Awaitable[None]]
) -> None:
    async with ScriptedEngine(death) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        status, body = await ask(client, running)
    assert status == 200
    assert body.startswith(ONE + b'data: {"error":')
    assert last_error(body)["type"] == "server_error"
    assert b"[DONE]" not in body


@pytest.mark.parametrize("death", [before_head, after_head], ids=lambda death: death.__name__)
async def test_what_died_before_answering_is_tried_elsewhere(
    client: aiohttp.ClientSession, death: Callable[[EngineConnection], Awaitable[None]]
) -> None:
    async with ScriptedEngine(death) as dying, ScriptedEngine(whole) as good:
        async with running_gateway(one_pool(dying.endpoint("a"), good.endpoint("b"))) as running:
            answers = [await ask(client, running, {**STREAM, "user": str(n), "cache_salt": str(n)}) for n in range(8)]
    assert answers == [(200, ONE + TWO + DONE)] * 8
    assert dying.requests


async def test_with_nobody_else_to_try_the_client_gets_the_failure(client: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(before_head) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        status, body = await ask(client, running)
    assert (status, last_error(body)["code"]) == (502, "engine_lost")


async def test_a_plain_answer_that_breaks_off_never_looks_whole(client: aiohttp.ClientSession) -> None:
    async def short(connection: EngineConnection) -> None:
        await connection.head("content-type: application/json", "content-length: 100")
        await connection.send(b'{"half":')
        connection.reset()

    async with ScriptedEngine(short) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        status, body = await ask(client, running, CHAT)
    assert (status, body) == (200, b'{"half":<cut>')


@pytest.mark.parametrize("framing", ["length", "close", "chunked", "chunk extensions", "byte by byte", "1xx first"])
async def test_every_framing_brings_the_same_bytes(client: aiohttp.ClientSession, framing: str) -> None:
    answer = ONE + TWO + DONE

    async def script(connection: EngineConnection) -> None:
        kind = "content-type: text/event-stream"
        if framing == "length":
            await connection.head(kind, f"content-length: {len(answer)}")
            await connection.send(answer)
        elif framing == "close":
            await connection.head(kind)
            await connection.send(answer)
            connection.writer.close()
        elif framing == "chunk extensions":
            await connection.head(kind, "transfer-encoding: chunked")
            await connection.send(b"%x;a=b\r\n%b\r\n0\r\ntrailer: x\r\n\r\n" % (len(answer), answer))
        elif framing == "byte by byte":
            framed = b"HTTP/1.1 200 OK\r\n%b\r\ntransfer-encoding: chunked\r\n\r\n" % kind.encode()
            framed += b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer), answer)
            for byte in framed:
                await connection.send(bytes((byte,)))
        else:
            if framing == "1xx first":
                await connection.head(status="103 Early Hints")
            await whole(connection)

    async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        assert await ask(client, running) == (200, answer)
        assert await ask(client, running) == (200, answer)


async def test_an_http_1_0_client_gets_the_plain_body_and_the_end_of_the_connection() -> None:
    async with ScriptedEngine(whole) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
        body = json.dumps(STREAM).encode()
        head = f"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        received = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    head_received, _, rest = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head_received.lower()
    assert rest == ONE + TWO + DONE


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["before the head", "before the first token", "mid stream"])
async def test_a_client_that_leaves_is_seen_by_the_engine(
    client: aiohttp.ClientSession, stream: bool, phase: str
) -> None:
    seen = asyncio.Event()

    async def script(connection: EngineConnection) -> None:
        if phase != "before the head":
            await connection.events(*([ONE] if phase == "mid stream" else []))
        if await connection.client_gone():
            seen.set()

    async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        request = asyncio.create_task(ask(client, running, STREAM if stream else CHAT))
        await running.until(lambda: bool(engine.requests), "the engine has the request")
        await asyncio.sleep(0.05)
        request.cancel()
        await asyncio.wait_for(seen.wait(), 2)


@pytest.mark.parametrize(
    ("timeouts", "code", "status"),
    [
        (TimeoutSpec(first_byte="100ms"), "first_byte_timeout", 504),
        (TimeoutSpec(idle="100ms"), "idle_timeout", 200),
        (TimeoutSpec(total="100ms"), "total_timeout", 200),
    ],
)
async def test_a_silent_engine_is_given_up_after_the_timeout_that_says_so(
    client: aiohttp.ClientSession, timeouts: TimeoutSpec, code: str, status: int
) -> None:
    hung_up = asyncio.Event()

    async def script(connection: EngineConnection) -> None:
        if status == 200:
            await connection.events(ONE)
        if await connection.client_gone():
            hung_up.set()

    async with (
        ScriptedEngine(script) as engine,
        running_gateway(one_pool(engine.endpoint(), timeouts=timeouts)) as running,
    ):
        received, body = await ask(client, running)
        await asyncio.wait_for(hung_up.wait(), 2)
    assert (received, last_error(body)["code"]) == (status, code)


async def test_a_reader_that_does_not_keep_up_holds_up_the_engine_and_is_cut_after_the_idle_timeout() -> None:
    written = 0
    event = b"data: " + b"x" * 65536 + b"\n\n"

    async def flood(connection: EngineConnection) -> None:
        nonlocal written
        await connection.events()
        for _ in range(1000):
            await connection.chunk(event)
            written += len(event)

    async with ScriptedEngine(flood) as engine:
        spec = one_pool(engine.endpoint(), timeouts=TimeoutSpec(idle="500ms"))
        async with running_gateway(spec) as running:
            _, writer = await asyncio.open_connection("127.0.0.1", running.http_port, limit=1024)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            body = json.dumps(STREAM).encode()
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            await running.until(lambda: running.live_requests == 1, "the request is being answered")
            await running.until_idle(10)
            writer.transport.abort()
    assert written < 32 * 1024 * 1024


async def test_a_connection_the_engine_closed_meanwhile_costs_no_request(client: aiohttp.ClientSession) -> None:
    async def once(connection: EngineConnection) -> None:
        await whole(connection)
        if len(engine.requests) == 1:
            await asyncio.sleep(0.01)
            connection.reset()

    async with ScriptedEngine(once) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        assert await ask(client, running) == (200, ONE + TWO + DONE)
        assert await ask(client, running) == (200, ONE + TWO + DONE)


async def test_an_engines_own_error_passes_through(client: aiohttp.ClientSession) -> None:
    said = b'{"error":{"message":"too long","type":"BadRequest","param":null,"code":400}}'

    async def script(connection: EngineConnection) -> None:
        await connection.head(
            "content-type: application/json", f"content-length: {len(said)}", status="400 Bad Request"
        )
        await connection.send(said)

    async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        assert await ask(client, running) == (400, said)


async def test_a_busy_engine_sends_the_request_elsewhere_and_is_quoted_if_there_is_no_elsewhere(
    client: aiohttp.ClientSession,
) -> None:
    async def busy(connection: EngineConnection) -> None:
        await connection.head("content-length: 4", "retry-after: 7", status="503 Service Unavailable")
        await connection.send(b"busy")

    async with ScriptedEngine(busy) as full, ScriptedEngine(whole) as good:
        async with running_gateway(one_pool(full.endpoint("a"), good.endpoint("b"))) as running:
            for salt in range(6):
                assert await ask(client, running, {**STREAM, "cache_salt": str(salt)}) == (200, ONE + TWO + DONE)
        async with running_gateway(one_pool(full.endpoint())) as running:
            async with client.post(f"{running.url}/v1/chat/completions", json=STREAM) as response:
                assert (response.status, await response.read()) == (503, b"busy")
                assert response.headers["retry-after"] == "7"


async def test_a_dead_endpoint_is_avoided_at_once_and_taken_back_when_it_answers(client: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(whole) as first, ScriptedEngine(whole) as second:
        async with running_gateway(one_pool(first.endpoint("a"), second.endpoint("b"))) as running:
            await first.die()
            for salt in range(8):
                assert (await ask(client, running, {**STREAM, "cache_salt": str(salt)}))[0] == 200
            assert running.gateway.fleet.endpoints["a"].phase == "unhealthy"
            await first.listen()
            await running.until_phase("a", "ready")


async def test_a_fleet_without_a_ready_endpoint_answers_503_with_retry_after(client: aiohttp.ClientSession) -> None:
    engine = ScriptedEngine(whole, port=free_port())
    async with running_gateway(one_pool(engine.endpoint()), wait_ready=False) as running:
        async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert (await response.json())["error"]["code"] == "no_capacity"


SCRIPTS = {script.__name__: script for script in [whole, before_head, *DEATHS]}
del SCRIPTS["endless_event"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plays=st.lists(
        st.tuples(st.sampled_from(sorted(SCRIPTS)), st.sampled_from([None, 0.0, 0.001, 0.01]), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
async def test_whatever_engines_and_clients_do_every_counter_returns_to_zero(
    client: aiohttp.ClientSession, plays: list[tuple[str, float | None, bool]]
) -> None:
    async def script(connection: EngineConnection) -> None:
        await SCRIPTS[json.loads(connection.body)["user"]](connection)

    async def play(running: RunningGateway, name: str, leave_after: float | None, stream: bool) -> None:
        request = ask(client, running, {**CHAT, "stream": stream, "user": name})
        if leave_after is None:
            await request
        else:
            task = asyncio.create_task(request)
            await asyncio.sleep(leave_after)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async with ScriptedEngine(script) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        await asyncio.gather(*(play(running, *one) for one in plays))
        await running.until_idle()


PROGRESS = b'data: {"choices":[{"text":""}],"prompt_progress":{"total":9,"processed":%d}}\n\n'
LLAMA_MODELS = b'{"data":[{"id":"engine-model","owned_by":"llamacpp"}]}'


async def test_a_llama_cpp_engine_is_asked_for_progress_and_the_client_sees_none_of_it(
    client: aiohttp.ClientSession,
) -> None:
    quoting = b'data: {"choices":[{"text":"\\"prompt_progress\\": me"}]}\n\n'

    async def script(connection: EngineConnection) -> None:
        await connection.events(PROGRESS % 0, PROGRESS % 3, PROGRESS % 9 + quoting)
        await connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(TWO + DONE), TWO + DONE))

    async with ScriptedEngine(script, models=LLAMA_MODELS) as engine:
        async with running_gateway(one_pool(engine.endpoint())) as running:
            assert await ask(client, running) == (200, quoting + TWO + DONE)
            asked = {**STREAM, "return_progress": False}
            assert (await ask(client, running, asked))[1].startswith(PROGRESS % 0)
    assert [json.loads(request.body)["return_progress"] for request in engine.requests] == [True, False]


async def test_an_engine_that_dies_in_its_prefill_may_still_be_replaced(client: aiohttp.ClientSession) -> None:
    async def dies(connection: EngineConnection) -> None:
        await connection.events(PROGRESS % 0)
        await asyncio.sleep(0.01)
        await connection.chunk(PROGRESS % 3)
        connection.reset()

    async with ScriptedEngine(dies, models=LLAMA_MODELS) as dying, ScriptedEngine(whole) as good:
        async with running_gateway(one_pool(dying.endpoint("a"), good.endpoint("b"))) as running:
            for salt in range(6):
                assert await ask(client, running, {**STREAM, "cache_salt": str(salt)}) == (200, ONE + TWO + DONE)
    assert dying.requests


async def test_thousands_of_messages_and_escaped_nul_reach_the_engine_as_they_were(
    client: aiohttp.ClientSession,
) -> None:
    async with ScriptedEngine(whole) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        messages = [{"role": "user", "content": f"\0 {number} \U0001f642"} for number in range(5000)]
        assert (await ask(client, running, {**STREAM, "messages": messages}))[0] == 200
    sent = json.loads(engine.requests[0].body)
    assert (sent["messages"], sent["model"]) == (messages, "engine-model")


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("asked", [False, True])
async def test_usage_is_asked_for_counted_and_shown_to_who_asked(
    client: aiohttp.ClientSession, together: bool, asked: bool
) -> None:
    answer = streaming(*([ONE + TWO + USAGE + DONE] if together else [ONE, TWO, USAGE, DONE]))

    options = {"stream_options": {"include_usage": True}} if asked else {}
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        status, body = await ask(client, running, STREAM | options)
        assert (status, body) == (200, ONE + TWO + (USAGE if asked else b"") + DONE)
        assert json.loads(engine.requests[0].body)["stream_options"] == {"include_usage": True}
        labels = {"api": "chat.completions", "route": "m"}
        value = running.gateway.registry.get_sample_value
        assert value("headrace_tokens_total", labels | {"kind": "prompt"}) == 9
        assert value("headrace_tokens_total", labels | {"kind": "completion"}) == 2
