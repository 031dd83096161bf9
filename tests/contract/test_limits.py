"""Limits as clients meet them, over each API, and as several gateways share them through a real Valkey."""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from router.admission.leases import LEASE_S, RateAsk
from router.admission.limits import Ask, Limits, TenantLimits
from router.spec.documents import file_documents
from router.spec.fleet import (
    EndpointSpec,
    FleetSpec,
    KeySpec,
    LimitSpec,
    PoolSpec,
    ProbeSpec,
    RedisSpec,
    RouteSpec,
    TenantSpec,
)
from router.spec.gateway import GatewaySpec
from router.state.limits import LimitStore
from tests.contract.both_fronts import KSERVE, Side, by_completion, fronts_spec
from tests.contract.grpc_front import channel
from tests.contract.keyed_gateway import running
from tests.contract.triton_models_server import triton_models
from tests.harness import (
    CHAT,
    STREAM,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    answering,
    free_port,
    running_gateway,
)
from tests.valkey import ValkeyProcess, servers_here

KEY, FREE_KEY = "hr-limited-key", "hr-free-key"
ANSWER = b'{"choices":[{"message":{"content":"hello"}}],"usage":{"prompt_tokens":10,"completion_tokens":40}}'
REFUSED = {"type": "rate_limit_error", "code": "rate_limit_exceeded", "param": None}

answer = answering(body=ANSWER)


def fleet(engine: ScriptedEngine, limits: LimitSpec, redis: str | None = None, **routes: LimitSpec) -> FleetSpec:
    """The routes `m` and `other` to a scripted engine, and `triton`, where nobody is; a tenant with limits and one
    without."""
    nobody = EndpointSpec(id="nobody", grpc=f"127.0.0.1:{free_port()}", http=f"http://127.0.0.1:{free_port()}")
    slow = ProbeSpec(interval="60s")
    keys = {name: [KeySpec(sha256=sha256(key.encode()).hexdigest())] for name, key in (("t", KEY), ("free", FREE_KEY))}
    return FleetSpec(
        fleet="test",
        redis=RedisSpec(url=redis) if redis is not None else None,
        pools={
            "p": PoolSpec(protocol="openai", model="m", endpoints=[engine.endpoint()]),
            "t": PoolSpec(protocol="triton", model="m", endpoints=[nobody], probe=slow),
        },
        routes={"m": RouteSpec(pool="p"), "other": RouteSpec(pool="p"), "triton": RouteSpec(pool="t")},
        tenants={
            "t": TenantSpec(keys=keys["t"], limits=limits, route_limits=routes),
            "free": TenantSpec(keys=keys["free"]),
        },
        gateway=GatewaySpec(grpc=":8001"),
    )


@contextlib.asynccontextmanager
async def limited(limits: LimitSpec, script: Any = answer, **routes: LimitSpec) -> AsyncIterator[RunningGateway]:
    """A gateway without Redis."""
    async with ScriptedEngine(script) as engine, running(fleet(engine, limits, None, **routes)) as gateway:
        yield gateway


async def ask(
    gateway: RunningGateway, body: Any = CHAT, key: str = KEY, path: str = "/v1/chat/completions"
) -> tuple[int, dict[str, str], Any]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(gateway.url + path, json=body, headers={"x-api-key": key}) as response,
    ):
        content = await response.read()
        headers = {name.lower(): value for name, value in response.headers.items()}
        return response.status, headers, msgspec.json.decode(content) if content.startswith(b"{") else content


def counted(gateway: RunningGateway, name: str, **labels: str) -> float:
    return gateway.gateway.registry.get_sample_value(name, labels) or 0.0


async def test_who_is_over_a_limit_is_told_which_and_when_to_come_back() -> None:
    async with limited(LimitSpec(requests_per_minute=2)) as gateway:
        statuses = [(await ask(gateway))[0] for _ in range(2)]
        status, headers, content = await ask(gateway)
        assert ([*statuses, status], headers["content-type"]) == ([200, 200, 429], "application/json")
        message = content["error"].pop("message")
        assert content["error"] == REFUSED
        seconds = int(headers["retry-after"])
        assert message == f"The limit is reached: tenant t may have 2 requests a minute. Try again in {seconds} s."
        assert 25 <= seconds <= 45
        assert headers["x-headrace-route"] == "m"
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert counted(gateway, "headrace_limit_refusals_total", route="m", limit="requests") == 1
        assert (await ask(gateway, key=FREE_KEY))[0] == 200


async def test_the_openai_sdk_raises_what_its_users_catch() -> None:
    async with limited(LimitSpec(requests_per_minute=0)) as gateway:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as sdk:
            with pytest.raises(openai.RateLimitError) as caught:
                await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")


async def test_answers_say_what_is_left_to_tenants_with_limits_and_to_no_others() -> None:
    limits = LimitSpec(requests_per_minute=600, completion_tokens_per_minute=6000)
    async with limited(limits) as gateway:
        _, headers, _ = await ask(gateway, {**CHAT, "max_tokens": 1000})
        said = {name: value for name, value in headers.items() if name.startswith("x-ratelimit-")}
        assert said.pop("x-ratelimit-reset-tokens") == "10s"
        assert said.pop("x-ratelimit-reset-requests") == "100ms"
        assert said == {
            "x-ratelimit-limit-requests": "600",
            "x-ratelimit-remaining-requests": "599",
            "x-ratelimit-limit-tokens": "6000",
            "x-ratelimit-remaining-tokens": "5000",
        }
        _, headers, _ = await ask(gateway, key=FREE_KEY)
        assert not any(name.startswith("x-ratelimit-") for name in headers)


async def test_what_the_engine_reports_counts_in_place_of_the_estimate() -> None:
    async with limited(LimitSpec(completion_tokens_per_minute=60_000)) as gateway:
        began = time.monotonic()
        for _ in range(10):
            assert (await ask(gateway, {**CHAT, "max_tokens": 30_000}))[0] == 200
        _, headers, _ = await ask(gateway, {**CHAT, "max_tokens": 1})
        left = int(headers["x-ratelimit-remaining-tokens"])
        assert 60_000 - 10 * 40 - 1 <= left <= min(60_000, 60_000 - 401 + (time.monotonic() - began) * 1000 + 1)


async def test_a_request_that_comes_to_nothing_counts_for_nothing() -> None:
    async def fails(connection: EngineConnection) -> None:
        await connection.head("content-length: 2", status="400 Bad Request")
        await connection.send(b"{}")

    async with limited(LimitSpec(requests_per_minute=1, streams=1), fails) as gateway:
        for _ in range(5):
            assert (await ask(gateway))[0] == 400
        for _ in range(5):
            assert (await ask(gateway, {**CHAT, "model": "triton"}))[0] != 429
        assert (await ask(gateway, {**CHAT, "model": "made-up"}))[0] == 404


async def test_a_client_that_leaves_pays_for_what_it_got() -> None:
    event = b'data: {"choices":[{"delta":{"content":"' + b"word " * 20 + b'"}}]}\n\n'

    async def talks(connection: EngineConnection) -> None:
        await connection.events(*[event] * 100)
        await connection.client_gone()

    async with limited(LimitSpec(completion_tokens_per_minute=6000), talks) as gateway:
        async with aiohttp.ClientSession() as client:
            for _ in range(3):
                async with client.post(
                    f"{gateway.url}/v1/chat/completions", json=STREAM, headers={"x-api-key": KEY}
                ) as response:
                    await response.content.readexactly(100 * len(event))
                    response.close()
                await gateway.until_idle()
        (meter,) = gateway.gateway._limiter._meters.values()
        paid = 100 * len(event) // 128
        assert meter.rates["completion_tokens"].held <= 6000 - 3 * paid + 200  # it has filled a little since
        assert meter.open == 0


async def test_streams_are_limited_while_they_last() -> None:
    go_on = asyncio.Event()

    async def waits(connection: EngineConnection) -> None:
        await go_on.wait()
        await answer(connection)

    async with limited(LimitSpec(streams=2), waits) as gateway:
        held = [asyncio.create_task(ask(gateway)) for _ in range(2)]
        await gateway.until(lambda: gateway.live_requests == 2, "two requests are under way")
        status, headers, content = await ask(gateway)
        assert (status, headers["retry-after"]) in ((429, "1"), (429, "2"))
        assert "2 requests at a time" in content["error"]["message"]
        go_on.set()
        assert [status for status, _, _ in await asyncio.gather(*held)] == [200, 200]
        assert (await ask(gateway))[0] == 200


async def test_a_routes_limit_holds_there_and_nowhere_else() -> None:
    async with limited(LimitSpec(requests_per_minute=600), m=LimitSpec(requests_per_minute=1)) as gateway:
        assert [(await ask(gateway))[0] for _ in range(2)] == [200, 429]
        assert "tenant t on m may have 1 request" in (await ask(gateway))[2]["error"]["message"]
        assert (await ask(gateway, {**CHAT, "model": "other"}))[0] == 200


async def test_a_changed_limit_holds_at_once() -> None:
    async with ScriptedEngine(answer) as engine, running(fleet(engine, LimitSpec())) as gateway:
        assert (await ask(gateway))[0] == 200
        gateway.apply(file_documents(fleet(engine, LimitSpec(requests_per_minute=0)), content_hash="h"))
        assert (await ask(gateway))[0] == 429
        gateway.apply(file_documents(fleet(engine, LimitSpec()), content_hash="h"))
        assert (await ask(gateway))[0] == 200


async def test_tritons_http_api_is_limited_in_its_own_shape() -> None:
    async with limited(LimitSpec(), triton=LimitSpec(requests_per_minute=0)) as gateway:
        for operation in ("infer", "generate", "generate_stream"):
            status, _, content = await ask(gateway, {"text_input": "hi"}, path=f"/v2/models/triton/{operation}")
            assert (status, list(content)) == (429, ["error"])
            assert "tenant t on triton may have 0 requests a minute" in content["error"]
        assert counted(gateway, "headrace_requests_total", api="kserve", route="triton", status="429") == 3


async def test_grpc_is_limited_too() -> None:
    async with limited(LimitSpec(), triton=LimitSpec(requests_per_minute=0)) as gateway:
        async with InferenceServerClient(gateway.grpc_address) as client:
            headers = {"x-api-key": KEY}
            with pytest.raises(InferenceServerException, match="tenant t on triton") as caught:
                await client.infer("triton", [], headers=headers)
            assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"

            async def one() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "triton", "inputs": [], "request_id": "1"}

            async for _, error in client.stream_infer(one(), headers=headers):
                assert "tenant t on triton" in str(error)
            with pytest.raises(InferenceServerException) as caught:
                await client.get_model_metadata("triton", headers=headers)  # what costs no engine anything is free
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert counted(gateway, "headrace_limit_refusals_total", route="triton", limit="requests") == 2


async def test_what_a_real_triton_answers_is_reserved_and_settled_once_in_each_of_its_apis() -> None:
    whole, decoupled = "ensemble_whole", "ensemble"
    apis = {**KSERVE, "completions": by_completion}
    ways = [(name, by, whole) for name, by in apis.items()]
    ways += [(name, apis[name], decoupled) for name in ("ModelStreamInfer", "generate_stream", "completions")]
    async with (
        triton_models(whole, decoupled) as server,
        running_gateway(fronts_spec((whole, decoupled), a=server)) as gateway,
        channel(gateway.grpc_address) as opened,
        aiohttp.ClientSession() as http,
    ):
        unlimited = gateway.gateway._live_fleet.view
        for name, by, model in ways:
            tenant = f"{name} {model}"
            limits = TenantLimits(tenant, Limits(requests=2, completion_tokens=10_000, streams=1), {})
            # Nobody has to be somebody here, so that the helpers of other tests, which send no key, can ask.
            gateway.gateway._live_fleet.view = dataclasses.replace(unlimited, tenant=tenant, limits=limits)
            answers = [await by(Side(gateway.url, opened, http), model, {"text": "hi"}) for _ in range(3)]
            assert [ok for ok, *_ in answers] == [True, True, False], (tenant, answers)
            await gateway.until_idle()
            meter = gateway.gateway._limiter._meters[tenant, ""]
            assert meter.open == 0 and meter.streams is not None and not meter.streams.open
            assert 0 <= meter.rates["requests"].held < 1
        gateway.gateway._live_fleet.view = unlimited


async def empty_bucket(server: ValkeyProcess, limit: int) -> None:
    """Take all out of the tenant's bucket that it holds."""
    store = LimitStore(server.url, "test", "the test")
    await store.grant([("t", Ask((("requests", RateAsk(limit, 0, limit, owed=limit)),), None))])
    await store.close()


async def flood(gateways: Sequence[RunningGateway], seconds: float) -> int:
    """How many requests are let through when each gateway is asked all the time."""
    statuses = Counter[int]()
    until = time.monotonic() + seconds

    async def client(gateway: RunningGateway) -> None:
        async with aiohttp.ClientSession(headers={"x-api-key": KEY}) as session:
            while time.monotonic() < until:
                async with session.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
                    await response.read()
                    statuses[response.status] += 1
                await asyncio.sleep(0.01)

    await asyncio.gather(*(client(gateway) for gateway in gateways))
    assert set(statuses) == {200, 429}
    return statuses[200]


@contextlib.asynccontextmanager
async def four_gateways(server: ValkeyProcess, limit: int) -> AsyncIterator[Sequence[RunningGateway]]:
    async with ScriptedEngine(answer) as engine, contextlib.AsyncExitStack() as stack:
        spec = fleet(engine, LimitSpec(requests_per_minute=limit), server.url)
        gateways = [await stack.enter_async_context(running(spec)) for _ in range(4)]
        limiters = [gateway.gateway._limiter for gateway in gateways]
        await gateways[0].until(lambda: all(one.gateways == 4 for one in limiters), "they know of one another", 10)
        yield gateways


async def test_four_gateways_let_through_what_the_limit_allows(tmp_path: Path) -> None:
    limit = 1200
    async with ValkeyProcess(servers_here()[0], tmp_path) as server, four_gateways(server, limit) as gateways:
        began = time.monotonic()
        await empty_bucket(server, limit)
        admitted = await flood(gateways, 6.0)
        yielded = (time.monotonic() - began) * limit / 60
        assert 0.5 * yielded < admitted <= 1.02 * yielded + 1
        asks = sum(counted(gateway, "headrace_lease_asks_total", outcome="granted") for gateway in gateways)
        assert 0 < asks < 100 * 6.0


async def test_gateways_whose_redis_is_gone_exceed_the_limit_by_a_lease_each(tmp_path: Path) -> None:
    limit = 1200
    lease = limit * LEASE_S / 60
    async with ValkeyProcess(servers_here()[0], tmp_path) as server, four_gateways(server, limit) as gateways:
        await empty_bucket(server, limit)
        await flood(gateways, 1.5)
        server.kill()
        began = time.monotonic()
        admitted = await flood(gateways, 5.0)
        yielded = (time.monotonic() - began) * limit / 60
        assert 0.5 * yielded < admitted <= yielded + 4 * lease
        assert all(counted(gateway, "headrace_lease_asks_total", outcome="failed") for gateway in gateways)

        await server.start()  # empty: what the gateways believe of the bucket counts, not a full one
        began = time.monotonic()
        admitted = await flood(gateways, 4.0)
        yielded = (time.monotonic() - began) * limit / 60
        assert admitted <= yielded + 4 * lease


async def test_a_frozen_redis_holds_requests_up_once_and_shortly(tmp_path: Path) -> None:
    async with ValkeyProcess(servers_here()[0], tmp_path) as server, four_gateways(server, 6000) as gateways:
        server.pause()
        try:
            assert {status for status, _, _ in await asyncio.gather(*map(ask, gateways))} == {200}
            await gateways[0].until(lambda: gateways[0].gateway._limiter._lost, "it is noticed")
            assert (await ask(gateways[0]))[0] == 200
        finally:
            server.resume()
        await gateways[0].until(lambda: not gateways[0].gateway._limiter._lost, "it is back", 10)


async def test_nothing_is_asked_of_redis_where_nobody_has_limits(tmp_path: Path) -> None:
    async with ValkeyProcess(servers_here()[0], tmp_path) as server, ScriptedEngine(answer) as engine:
        async with running(fleet(engine, LimitSpec(), server.url)) as gateway, server.client() as client:
            assert (await ask(gateway))[0] == 200
            await asyncio.sleep(0.3)
            assert await client.keys("*limit*") == []
