"""Requests that wait for an engine which has all it may have: who is served, who is told to come back, and that nothing
of those who leave is left. The engine is scripted."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import aiohttp
import msgspec
import pytest

from router.spec.documents import file_documents
from router.spec.fleet import EndpointSpec, FleetSpec, KeySpec, PoolSpec, Priority, RouteSpec, TenantSpec
from tests.harness import (
    CHAT,
    DONE,
    FAST_PROBES,
    ONE,
    STREAM,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    one_pool,
    running_gateway,
)

PING = b": ping\n\n"


class Gate:
    """A script that answers when it is let."""

    def __init__(self) -> None:
        self.open = asyncio.Semaphore(0)
        self.at_work = 0
        self.most = 0
        self.order: list[str] = []

    async def __call__(self, connection: EngineConnection) -> None:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        self.order.append(json.loads(connection.body)["messages"][0]["content"])
        try:
            gone = asyncio.ensure_future(connection.client_gone())
            let = asyncio.ensure_future(self.open.acquire())
            await asyncio.wait((gone, let), return_when=asyncio.FIRST_COMPLETED)
            if not let.done():
                let.cancel()
                return
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            await connection.stream(ONE, DONE)
        finally:
            self.at_work -= 1

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self.open.release()


Answer = tuple[int, bytes, Any]


async def ask(
    client: aiohttp.ClientSession, running: RunningGateway, said: str = "hi", body: dict[str, Any] = STREAM, **more: str
) -> Answer:
    asked = {**body, "messages": [{"role": "user", "content": said}]}
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    async with client.post(f"{running.url}/v1/chat/completions", json=asked, headers=headers) as response:
        return response.status, await response.read(), response.headers


def code(answer: Answer) -> str:
    found: str = json.loads(answer[1])["error"]["code"]
    return found


def waiting(running: RunningGateway, route: str = "m") -> int:
    return int(running.gateway.registry.get_sample_value("headrace_queue_requests", {"route": route}) or 0)


def refused(running: RunningGateway, reason: str) -> float:
    labels = {"route": "m", "reason": reason}
    return running.gateway.registry.get_sample_value("headrace_queue_refusals_total", labels) or 0.0


@contextlib.asynccontextmanager
async def full(
    client: aiohttp.ClientSession, limit: int = 1, **options: Any
) -> AsyncIterator[tuple[RunningGateway, Gate, ScriptedEngine]]:
    """A gateway whose engine has all it may have; on leaving, what is still at the engine is answered."""
    gate = Gate()
    async with ScriptedEngine(gate) as engine:
        spec = one_pool(engine.endpoint(), max_in_flight=limit, **options)
        async with running_gateway(spec) as running:
            first = [asyncio.create_task(ask(client, running, "first")) for _ in range(limit)]
            await running.until(lambda: gate.at_work == limit, "the engine is full")
            yield running, gate, engine
            gate.let(1000)
            assert [(await one)[0] for one in first] == [200] * limit
            await running.until_idle()
            assert waiting(running) == 0
            assert gate.most <= limit


async def test_requests_wait_their_turn_and_are_told_their_place(client: aiohttp.ClientSession) -> None:
    async with full(client) as (running, gate, _):
        asked = []
        for number in range(3):
            asked.append(asyncio.create_task(ask(client, running, f"waits {number}")))
            await running.until(lambda: waiting(running) == len(asked), "it waits")
        gate.let(4)
        answers = [await one for one in asked]
        assert gate.order == ["first", "waits 0", "waits 1", "waits 2"]
    assert [(status, body) for status, body, _ in answers] == [(200, ONE + DONE)] * 3
    assert [headers["x-headrace-queue-position"] for _, _, headers in answers] == ["1", "2", "3"]
    assert all(float(headers["x-headrace-queue-ms"]) > 0 for _, _, headers in answers)
    count = running.gateway.registry.get_sample_value("headrace_queue_wait_seconds_count", {"route": "m"})
    assert count == 3


async def test_who_did_not_wait_is_told_no_place(client: aiohttp.ClientSession) -> None:
    gate = Gate()
    gate.let()
    async with ScriptedEngine(gate) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        status, _, headers = await ask(client, running)
    assert status == 200
    assert "x-headrace-queue-position" not in headers


async def test_a_client_that_leaves_while_it_waits_is_forgotten_and_never_sent(client: aiohttp.ClientSession) -> None:
    async with full(client) as (running, gate, engine):
        gone = [asyncio.create_task(ask(client, running, "gone")) for _ in range(20)]
        await running.until(lambda: waiting(running) == 20, "all wait")
        for one in gone:
            one.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        await running.until(lambda: waiting(running) == 0, "nobody waits")
        assert running.live_requests == 1
        gate.let(2)
        assert (await ask(client, running, "next"))[0] == 200
        assert len(engine.requests) == 2


async def test_a_request_that_asks_not_to_wait_is_told_at_once(client: aiohttp.ClientSession) -> None:
    async with full(client) as (running, _, __):
        answer = await ask(client, running, Prefer="if-available")
        assert (answer[0], code(answer)) == (503, "not_available")
        assert int(answer[2]["Retry-After"]) >= 1
        assert refused(running, "if_available") == 1


async def test_a_request_that_is_not_started_by_its_deadline_is_told(client: aiohttp.ClientSession) -> None:
    async with full(client) as (running, _, engine):
        answer = await ask(client, running, x_headrace_timeouts="first_byte=100ms")
        assert (answer[0], code(answer), answer[2]["x-headrace-queue-position"]) == (503, "queue_deadline", "1")
        assert refused(running, "deadline") == 1
        assert len(engine.requests) == 1


async def test_streaming_clients_are_kept_alive_while_they_wait(client: aiohttp.ClientSession) -> None:
    async with full(client, ping="50ms") as (running, gate, _):
        asked = asyncio.create_task(ask(client, running))
        await running.until(lambda: waiting(running) == 1, "it waits")
        answer = await ask(client, running, x_headrace_timeouts="first_byte=1s")
        assert answer[0] == 200
        assert answer[1].startswith(PING * 2)
        assert b"queue_deadline" in answer[1] and b"[DONE]" not in answer[1]
        gate.let(2)
        status, body, headers = await asked
        assert (status, body.replace(PING, b"")) == (200, ONE + DONE)
        assert body.startswith(PING)
        assert headers["x-headrace-queue-position"] == "1"


async def test_a_stopping_gateway_lets_those_who_wait_finish_and_tells_them_if_it_cannot(
    client: aiohttp.ClientSession,
) -> None:
    gate = Gate()
    async with ScriptedEngine(gate) as engine, running_gateway(one_pool(engine.endpoint(), max_in_flight=1)) as running:
        first = asyncio.create_task(ask(client, running))
        await running.until(lambda: gate.at_work == 1, "the engine is full")
        second, third = (asyncio.create_task(ask(client, running, body=CHAT)) for _ in range(2))
        await running.until(lambda: waiting(running) == 2, "two wait")
        stopping = asyncio.create_task(running.gateway.stop())
        gate.let()
        assert (await first)[0] == 200
        await running.until(lambda: waiting(running) == 1, "one is served")
        stopping.cancel()
        await asyncio.wait_for(stopping, 5)
        answers = [await second, await third]
    assert sorted(code(answer) for answer in answers) == ["gateway_stopping", "gateway_stopping"]


async def test_a_new_endpoint_takes_over_those_who_wait_and_a_lost_one_ends_their_wait(
    client: aiohttp.ClientSession,
) -> None:
    async with full(client) as (running, gate, engine):
        asked = asyncio.create_task(ask(client, running, "waits"))
        await running.until(lambda: waiting(running) == 1, "it waits")
        async with ScriptedEngine(gate) as other:
            spec = one_pool(engine.endpoint(), other.endpoint("other"), max_in_flight=1)
            running.apply(file_documents(spec, content_hash="h2"))
            await running.until(lambda: len(other.requests) == 1, "the new endpoint has it")
            gate.most = 1
            told = asyncio.create_task(ask(client, running, "told"))
            await running.until(lambda: waiting(running) == 1, "one more waits")
            running.apply(file_documents(msgspec.structs.replace(spec, routes={}), content_hash="h3"))
            answer = await told
            assert (answer[0], code(answer)) == (404, "model_not_found")
            running.apply(file_documents(spec, content_hash="h4"))
            gate.let(2)
            assert (await asked)[0] == 200
        gate.most = 1


async def test_routes_that_share_an_engine_wait_for_it_together(client: aiohttp.ClientSession) -> None:
    gate = Gate()
    async with ScriptedEngine(gate) as engine:
        spec = one_pool(engine.endpoint(), max_in_flight=1)
        spec = msgspec.structs.replace(spec, routes={"m": RouteSpec(pool="p"), "other": RouteSpec(pool="p")})
        async with running_gateway(spec) as running:
            many = [asyncio.create_task(ask(client, running, "m")) for _ in range(10)]
            await running.until(lambda: waiting(running) == 9, "nine wait")
            one = asyncio.create_task(ask(client, running, "other", {**STREAM, "model": "other"}))
            await running.until(lambda: waiting(running, "other") == 1, "and one of another route")
            gate.let(3)
            assert (await one)[0] == 200
            assert gate.order.index("other") <= 2
            gate.let(20)
            assert [(await each)[0] for each in many] == [200] * 10
    assert gate.most == 1


def tenants(**classes: Priority) -> dict[str, TenantSpec]:
    return {
        name: TenantSpec(keys=[KeySpec(sha256=sha256(name.encode()).hexdigest())], priority=priority)
        for name, priority in classes.items()
    }


async def test_classes_go_in_their_order_and_a_request_may_stand_back(client: aiohttp.ClientSession) -> None:
    gate = Gate()
    async with ScriptedEngine(gate) as engine:
        spec = one_pool(engine.endpoint(), max_in_flight=1)
        known = tenants(first="interactive", usual="standard", night="batch")
        async with running_gateway(msgspec.structs.replace(spec, tenants=known)) as running:
            asked = [asyncio.create_task(ask(client, running, "at work", x_api_key="usual"))]
            await running.until(lambda: gate.at_work == 1, "the engine is full")
            for said, key, asks in (
                ("batch", "night", "interactive"),
                ("stands back", "first", "batch"),
                ("standard", "usual", "standard"),
                ("interactive", "first", "interactive"),
            ):
                asked.append(asyncio.create_task(ask(client, running, said, x_api_key=key, x_headrace_priority=asks)))
                await running.until(lambda: waiting(running) == len(asked) - 1, f"{said} waits")
            wrong = await ask(client, running, x_api_key="usual", x_headrace_priority="highest")
            assert (wrong[0], code(wrong)) == (400, "invalid_header")
            gate.let(10)
            assert [(await one)[0] for one in asked] == [200] * 5
    assert gate.order[:3] == ["at work", "interactive", "standard"]
    assert sorted(gate.order[3:]) == ["batch", "stands back"]


async def test_without_a_limit_nobody_waits(client: aiohttp.ClientSession) -> None:
    gate = Gate()
    async with (
        ScriptedEngine(gate) as engine,
        running_gateway(one_pool(engine.endpoint(), max_in_flight="off")) as running,
    ):
        asked = [asyncio.create_task(ask(client, running)) for _ in range(90)]
        try:
            await running.until(lambda: gate.at_work == 90, "all are at the engine")
        finally:
            gate.let(90)
        assert [(await one)[0] for one in asked] == [200] * 90


@pytest.mark.parametrize(
    ("owner", "props", "limit"),
    [("llamacpp", b'{"total_slots":3}', 3), ("llamacpp", b"[]", 64), ("vllm", b'{"total_slots":3}', 64)],
)
async def test_the_limit_is_what_llama_cpp_says_of_itself(
    client: aiohttp.ClientSession, owner: str, props: bytes, limit: int
) -> None:
    models = json.dumps({"data": [{"id": "engine-model", "owned_by": owner}]}).encode()
    async with ScriptedEngine(Gate(), models=models, props=props) as engine:
        async with running_gateway(one_pool(engine.endpoint())) as running:
            assert running.gateway.fleet.endpoints["engine"].state.max_in_flight == limit


async def test_a_pools_own_limit_goes_before_what_the_engine_says_and_may_change(
    client: aiohttp.ClientSession,
) -> None:
    async with full(client) as (running, gate, engine):
        asked = [asyncio.create_task(ask(client, running)) for _ in range(4)]
        await running.until(lambda: waiting(running) == 4, "four wait")
        running.apply(file_documents(one_pool(engine.endpoint(), max_in_flight=3), content_hash="h2"))
        await running.until(lambda: gate.at_work == 3, "two of them are sent")
        assert waiting(running) == 2
        gate.let(5)
        assert [(await one)[0] for one in asked] == [200] * 4
        gate.most = 1


async def test_who_waits_for_one_of_two_pools_gets_the_first_that_has_room(client: aiohttp.ClientSession) -> None:
    first, second = Gate(), Gate()
    async with ScriptedEngine(first) as one, ScriptedEngine(second) as other:
        pools = {
            name: PoolSpec(
                protocol="openai",
                model="x",
                endpoints=[EndpointSpec(id=name, http=f"http://127.0.0.1:{engine.port}")],
                probe=FAST_PROBES,
                max_in_flight=1,
            )
            for name, engine in (("p", one), ("q", other))
        }
        spec = FleetSpec(fleet="test", pools=pools, routes={"m": RouteSpec(pool="p", fallback=["q"])})
        async with running_gateway(spec) as running:
            asked = [asyncio.create_task(ask(client, running)) for _ in range(3)]
            await running.until(lambda: (first.at_work, second.at_work) == (1, 1), "both are full")
            assert waiting(running) == 1
            second.let()
            await running.until(lambda: len(other.requests) == 2, "the fallback takes the third")
            second.let()
            first.let()
            assert [(await each)[0] for each in asked] == [200] * 3
