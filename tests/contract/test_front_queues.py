"""Replicas that cannot take a request now: their queue is full, or they have not got the model. Whichever API it comes
by, a request goes where there is room, and a client is told only when there is none."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import grpc
import pytest_asyncio
from tritonclient.grpc import service_pb2

from tests.contract.both_fronts import KSERVE, Ask, Fronts, Reply, Side, both_fronts, by_completion
from tests.contract.grpc_front import channel, infer, scripted, stub
from tests.contract.triton_models_server import TritonModels

MODELS = ("ensemble", "ensemble_whole", "typed_identity")
EVERY_API: dict[str, Ask] = {**KSERVE, "completions": by_completion}
BUSY_S = 1.5


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fronts() -> AsyncIterator[Fronts]:
    async with both_fronts(*MODELS) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@contextlib.asynccontextmanager
async def full(*servers: TritonModels) -> AsyncIterator[None]:
    """Servers that are asked for `ensemble_whole` until they refuse it: it works on one request and queues one."""
    async with contextlib.AsyncExitStack() as stack:
        taken = []
        for server in servers:
            opened = await stack.enter_async_context(channel(server.grpc))
            script = {"text": "at work", "first_delay": BUSY_S}
            while True:
                asked = asyncio.create_task(infer(opened, scripted("ensemble_whole", script)))
                if (await asyncio.wait((asked,), timeout=0.1))[0]:
                    break
                taken.append(asked)
                script = {"text": "queued"}
            assert "Exceeds maximum queue size" in (await asked).details
        yield
        assert not any(task.done() for task in taken), "the test took longer than the queues were full"
        assert {(await task).code for task in taken} == {grpc.StatusCode.OK}


async def test_a_request_goes_past_a_full_queue(fronts: Fronts, http: aiohttp.ClientSession) -> None:
    async with channel(fronts.running.grpc_address) as opened, full(fronts.a):
        side = Side(fronts.running.url, opened, http)
        asked = {
            name: [await ask(side, "ensemble_whole", {"text": "ok", "n": number}) for number in range(4)]
            for name, ask in EVERY_API.items()
        }
    assert {name: [reply[0] for reply in replies] for name, replies in asked.items()} == {
        name: [True] * 4 for name in EVERY_API
    }, asked
    assert {reply[2] for replies in asked.values() for reply in replies} == {"ensemble_whole-b"}
    assert fronts.phases("ensemble_whole") == ["ready", "ready"]


async def test_what_shares_a_stream_goes_past_a_full_queue_and_is_answered_in_order(fronts: Fronts) -> None:
    async with channel(fronts.running.grpc_address) as opened, full(fronts.a):
        call = stub(opened).ModelStreamInfer()
        for number in range(6):
            await call.write(scripted("ensemble_whole", str(number), str(number)))
        answers = [await call.read() for _ in range(6)]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    assert [(answer.infer_response.id, answer.error_message) for answer in answers] == [
        (str(number), "") for number in range(6)
    ]


async def test_when_every_queue_is_full_clients_are_told_so(fronts: Fronts, http: aiohttp.ClientSession) -> None:
    """Triton's clients by Triton, with its own words."""
    script = {"text": "too much"}
    async with channel(fronts.running.grpc_address) as opened, channel(fronts.a.grpc) as direct:
        side, triton = Side(fronts.running.url, opened, http), Side(fronts.a.http, direct, http)
        async with full(fronts.a, fronts.b):
            told = {name: (await ask(side, "ensemble_whole", script))[:2] for name, ask in EVERY_API.items()}
            by_triton = {name: (await ask(triton, "ensemble_whole", script))[:2] for name, ask in KSERVE.items()}
    assert told == by_triton | {"completions": (False, (429, "engine_busy", "1"))}
    assert all("Exceeds maximum queue size" in str(said) for _, said in by_triton.values())
    assert fronts.phases("ensemble_whole") == ["ready", "ready"]


async def ask_on_one_stream(side: Side, stop: asyncio.Event) -> list[Reply]:
    """Requests to a model that answers once, one after another on one stream: passed on as a stream, they would end
    Triton 2.51 within seconds (`gateway.grpc.stream`)."""
    replies: list[Reply] = []
    call = stub(side.channel).ModelStreamInfer()
    while not stop.is_set():
        await call.write(identity("stream"))
        answer = await call.read()
        replies.append((not answer.error_message, answer.error_message, ""))
        await asyncio.sleep(0.02)
    await call.done_writing()
    return replies


def identity(id_: str) -> Any:
    request = service_pb2.ModelInferRequest(model_name="typed_identity", id=id_)
    request.inputs.add(name="INT32_IN", datatype="INT32").shape.extend([1, 1])
    request.raw_input_contents.append(bytes(4))
    return request


async def ask_identity(side: Side, _: str, __: dict[str, Any]) -> Reply:
    answer = await infer(side.channel, identity("unary"))
    return answer.code is grpc.StatusCode.OK, answer.details, answer.metadata.get("x-headrace-endpoint", "")


async def repository(server: TritonModels, action: str) -> None:
    async with aiohttp.ClientSession() as session:
        for model in ("ensemble", "typed_identity"):
            async with session.post(f"{server.http}/v2/repository/models/{model}/{action}") as response:
                assert response.status == 200, await response.text()


DECOUPLED: dict[str, Ask] = {
    name: ask for name, ask in EVERY_API.items() if name not in ("ModelInfer", "infer", "generate")
} | {"typed_identity": ask_identity}


@contextlib.asynccontextmanager
async def light_traffic(fronts: Fronts, http: aiohttp.ClientSession) -> AsyncIterator[dict[str, list[Reply]]]:
    """Requests by every API, one after another each; on leaving, all have been answered."""
    stop = asyncio.Event()
    replies: dict[str, list[Reply]] = {name: [] for name in (*DECOUPLED, "one stream")}
    async with channel(fronts.running.grpc_address) as opened:
        side = Side(fronts.running.url, opened, http)

        async def keep_asking(name: str, ask: Ask) -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                replies[name].append(await ask(side, "ensemble", {"text": "ok", "n": number}))
                await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(keep_asking(name, ask)) for name, ask in DECOUPLED.items()]
        one_stream = asyncio.create_task(ask_on_one_stream(side, stop))
        try:
            yield replies
        finally:
            stop.set()
            async with asyncio.timeout(20):
                await asyncio.gather(*tasks)
                replies["one stream"] += await one_stream


async def test_no_request_fails_when_a_replica_unloads_and_loads_the_model(
    fronts: Fronts, http: aiohttp.ClientSession
) -> None:
    running = fronts.running

    async def more(what: Callable[[], int], count: int) -> None:
        before = what()
        await running.until(lambda: what() >= before + count, "more requests", 10)

    async with light_traffic(fronts, http) as replies:
        await more(lambda: min(map(len, (replies[name] for name in DECOUPLED))), 5)
        await repository(fronts.a, "unload")
        await running.until_phase("ensemble-a", "unhealthy")
        await running.until_phase("typed_identity-a", "unhealthy")
        away = {name: len(found) for name, found in replies.items()}
        await more(lambda: min(map(len, (replies[name] for name in DECOUPLED))), 5)
        back = {name: len(found) for name, found in replies.items()}
        await repository(fronts.a, "load")
        await running.until_phase("ensemble-a", "ready")
        await running.until_phase("typed_identity-a", "ready")
        await more(lambda: min(map(len, (replies[name] for name in DECOUPLED))), 10)
    assert {name: [reply for reply in found if not reply[0]] for name, found in replies.items()} == {
        name: [] for name in replies
    }
    for name in DECOUPLED:
        # The request that was under way at the first look may have been sent before.
        assert {endpoint[-2:] for _, _, endpoint in replies[name][away[name] + 1 : back[name]]} == {"-b"}, name
        assert {endpoint[-2:] for _, _, endpoint in replies[name][back[name] :]} == {"-a", "-b"}, name
    assert len(replies["one stream"]) > 20


async def test_when_no_replica_has_the_model_every_api_says_so(fronts: Fronts, http: aiohttp.ClientSession) -> None:
    for server in (fronts.a, fronts.b):
        await repository(server, "unload")
    async with channel(fronts.running.grpc_address) as opened:
        side = Side(fronts.running.url, opened, http)
        told = {name: await ask(side, "ensemble", {"text": "ok"}) for name, ask in DECOUPLED.items()}
        assert not any(ok for ok, _, _ in told.values()), told
        for name in ("ensemble-a", "ensemble-b", "typed_identity-a", "typed_identity-b"):
            await fronts.running.until_phase(name, "unhealthy")
        told = {name: await ask(side, "ensemble", {"text": "ok"}) for name, ask in DECOUPLED.items()}
        assert all("No endpoint" in str(said) for name, (_, said, _) in told.items() if name != "completions"), told
        assert told["completions"][1][0] == 503
    for server in (fronts.a, fronts.b):
        await repository(server, "load")
    for name in ("ensemble-a", "ensemble-b", "typed_identity-a", "typed_identity-b"):
        await fronts.running.until_phase(name, "ready")
