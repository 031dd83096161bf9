"""Who may call, over each API: with keys as clients' libraries send them, and without."""

import asyncio
import logging
from collections.abc import AsyncIterator
from hashlib import sha256

import aiohttp
import grpc
import msgspec
import openai
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.aio import InferenceServerClient

from router.spec.documents import file_documents
from router.spec.fleet import TenantSpec
from tests.contract.keyed_gateway import (
    EXPIRED,
    KEY,
    NEXT_KEY,
    OTHER_KEY,
    TENANTS,
    ask,
    fleet,
    hashed,
    running,
    status_of,
)
from tests.harness import CHAT, OPEN, RunningGateway, ScriptedEngine


@pytest_asyncio.fixture
async def gateway(engine: ScriptedEngine) -> AsyncIterator[RunningGateway]:
    async with running(fleet(engine)) as gateway:
        yield gateway


WAYS = [
    {"authorization": f"Bearer {KEY}"},
    {"authorization": f"bearer  {KEY} "},
    {"authorization": f"Bearer {NEXT_KEY}"},
    {"x_api_key": KEY},
    {"api_key": KEY},
    {"x_api_key": KEY, "authorization": "Bearer for-the-engine"},
]
REFUSED = [
    {},
    {"authorization": "Bearer hr-made-up"},
    {"authorization": f"Bearer {EXPIRED}"},
    {"authorization": f"Basic {KEY}"},
    {"authorization": f"Bearer {sha256(KEY.encode()).hexdigest()}"},
    {"x_api_key": "hr-made-up", "authorization": f"Bearer {KEY}"},
]
CLOSED = ["/v1/models", "/v1/models/m", "/v2", "/v2/models/triton", "/v2/models/stats", "/v2/models/triton/ready"]


@pytest.mark.parametrize("headers", WAYS)
async def test_a_key_is_taken_as_clients_of_each_library_send_it(
    gateway: RunningGateway, headers: dict[str, str]
) -> None:
    assert (await ask(gateway, "/v1/chat/completions", CHAT, **headers))[0] == 200
    assert (await ask(gateway, "/v2", **headers))[0] == 200


@pytest.mark.parametrize("headers", REFUSED)
async def test_who_has_no_key_that_counts_is_told_so_in_openais_shape_and_reaches_no_engine(
    gateway: RunningGateway, engine: ScriptedEngine, headers: dict[str, str]
) -> None:
    status, got, content = await ask(gateway, "/v1/chat/completions", CHAT, **headers)
    error = content["error"]
    assert (status, got["www-authenticate"]) == (401, "Bearer")
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert not any(word in error["message"] for word in ("hr-made-up", KEY, EXPIRED))
    assert engine.requests == []


@pytest.mark.parametrize("path", CLOSED)
async def test_nothing_but_health_is_answered_without_a_key(gateway: RunningGateway, path: str) -> None:
    status, got, content = await ask(gateway, path)
    assert (status, got["www-authenticate"]) == (401, "Bearer")
    assert "API key" in (content["error"] if path.startswith("/v2") else content["error"]["message"])
    for probe in ("/v2/health/live", "/v2/health/ready"):
        assert (await ask(gateway, probe))[0] in (200, 400)


async def test_a_request_is_refused_before_its_body_is_read(gateway: RunningGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_a_route_of_others_is_unknown_and_not_listed(gateway: RunningGateway) -> None:
    mine, theirs = {"x_api_key": KEY}, {"x_api_key": OTHER_KEY}
    hidden = {**CHAT, "model": "hidden"}
    status, _, content = await ask(gateway, "/v1/chat/completions", hidden, **mine)
    assert (status, content["error"]["code"]) == (404, "model_not_found")
    assert content["error"]["message"].endswith("Routes: m, triton.")
    assert (await ask(gateway, "/v1/chat/completions", hidden, **theirs))[0] == 200
    _, _, listed = await ask(gateway, "/v1/models", **mine)
    assert [model["id"] for model in listed["data"]] == ["m", "triton"]
    assert (await ask(gateway, "/v1/models/hidden", **mine))[0] == 404
    _, _, listed = await ask(gateway, "/v1/models", **theirs)
    assert {model["id"] for model in listed["data"]} == {"m", "hidden", "triton", "hidden-triton"}
    _, _, index = await ask(gateway, "/v2/repository/index", {}, **mine)
    assert [model["name"] for model in index] == ["triton"]
    status, _, content = await ask(gateway, "/v2/models/hidden-triton/infer", {}, **mine)
    assert (status, content["error"]) == (404, "Request for unknown model: 'hidden-triton' is not found")


async def test_the_openai_sdk_raises_what_its_users_catch(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="hr-made-up", max_retries=0) as sdk:
        with pytest.raises(openai.AuthenticationError, match="not known here"):
            await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as sdk:
        with pytest.raises(openai.NotFoundError):
            await sdk.chat.completions.create(model="hidden", messages=[{"role": "user", "content": "hi"}])
        made = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert made.choices[0].message.content == "hello"


async def test_no_key_reaches_an_engine_or_a_log(
    gateway: RunningGateway, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for headers in [*WAYS, *REFUSED]:
        await ask(gateway, "/v1/chat/completions", CHAT, **headers)
    assert len(engine.requests) == len(WAYS)
    for request in engine.requests:
        assert not request.headers.keys() & {"authorization", "x-api-key", "api-key"}
        assert b"hr-" not in request.body
    ours = [r.getMessage() for r in caplog.records if r.name.split(".")[0] in ("gateway", "router", "headrace")]
    assert not [line for line in ours if "hr-" in line or sha256(KEY.encode()).hexdigest() in line]


async def test_a_tenant_that_is_removed_or_loses_a_key_is_out_at_once(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    kept = {"search": TenantSpec(keys=[hashed(NEXT_KEY)])}
    gateway.apply(file_documents(fleet(engine, tenants=kept), content_hash="h"))
    assert (await ask(gateway, "/v1/chat/completions", CHAT, x_api_key=KEY))[0] == 401
    assert (await ask(gateway, "/v1/chat/completions", CHAT, x_api_key=OTHER_KEY))[0] == 401
    assert (await ask(gateway, "/v1/chat/completions", {**CHAT, "model": "hidden"}, x_api_key=NEXT_KEY))[0] == 200


async def test_a_key_taken_away_while_a_body_comes_buys_nothing(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    body = msgspec.json.encode(CHAT)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:10])
    await gateway.until(lambda: gateway.live_requests == 1, "the request is being read")
    gateway.apply(file_documents(fleet(engine, tenants={}), content_hash="h"))
    writer.write(body[10:])
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()
    assert engine.requests == []


async def test_an_isolated_tenants_prompts_carry_a_salt_of_its_own(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    for key in (KEY, NEXT_KEY, OTHER_KEY):
        await ask(gateway, "/v1/chat/completions", CHAT, x_api_key=key)
    await ask(gateway, "/v1/chat/completions", {**CHAT, "cache_salt": "mine"}, x_api_key=KEY)
    sent = [msgspec.json.decode(request.body).get("cache_salt") for request in engine.requests]
    assert sent == ["headrace:search:", "headrace:search:", None, "headrace:search:mine"]


async def test_the_anonymous_come_in_only_where_they_may(engine: ScriptedEngine) -> None:
    async with running(fleet(engine, OPEN)) as gateway:
        assert (await ask(gateway, "/v1/chat/completions", CHAT))[0] == 200
        assert (await ask(gateway, "/v1/chat/completions", CHAT, x_api_key=KEY))[0] == 200
        assert (await ask(gateway, "/v1/chat/completions", CHAT, x_api_key="hr-made-up"))[0] == 401
    async with running(fleet(engine, OPEN, tenants={})) as gateway:
        assert (await ask(gateway, "/v1/chat/completions", CHAT, x_api_key="a library's habit"))[0] == 200


async def test_refusals_are_counted_under_no_route(gateway: RunningGateway) -> None:
    await ask(gateway, "/v1/chat/completions", CHAT)
    labels = {"api": "chat.completions", "route": "unknown", "status": "401"}
    assert gateway.gateway.registry.get_sample_value("headrace_requests_total", labels) == 1


async def test_who_is_refused_is_counted_wherever_it_asked(
    engine: ScriptedEngine, client: aiohttp.ClientSession
) -> None:
    paths = {"/v1/models": "models", "/v1/models/m": "models", "/x": "other", "/v2/models/m": "kserve"}
    async with running(fleet(engine)) as gateway:

        def counted(api: str, status: str) -> float:
            labels = {"api": api, "route": "unknown", "status": status}
            return gateway.gateway.registry.get_sample_value("headrace_requests_total", labels) or 0.0

        for path in paths:
            async with client.get(f"{gateway.url}{path}") as response:
                assert response.status == 401
        assert {api: counted(api, "401") for api in paths.values()} == {"models": 2, "other": 1, "kserve": 1}
        for path, status in (("/v1/models", 200), ("/x", 404)):
            async with client.get(f"{gateway.url}{path}", headers={"x-api-key": KEY}) as response:
                assert response.status == status
        assert (counted("models", "200"), counted("other", "404")) == (1, 1)


@pytest.mark.parametrize("headers", [None, {"authorization": "Bearer hr-made-up"}, {"x-api-key": EXPIRED}])
async def test_grpc_answers_nothing_but_health_without_a_key(
    gateway: RunningGateway, headers: dict[str, str] | None
) -> None:
    async with InferenceServerClient(gateway.grpc_address) as client:
        assert await client.is_server_live()
        assert not await client.is_server_ready()  # there is no Triton, which anybody may learn
        for call in (
            client.get_server_metadata(headers=headers),
            client.get_model_repository_index(headers=headers),
            client.is_model_ready("triton", headers=headers),
            client.get_model_metadata("triton", headers=headers),
            client.get_inference_statistics(headers=headers),
            client.infer("triton", [], headers=headers),
        ):
            status, message = await status_of(call)
            assert status == "StatusCode.UNAUTHENTICATED"
            assert "API key" in message and "hr-" not in message


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}])
async def test_grpc_takes_a_key_and_shows_its_tenants_routes_only(
    gateway: RunningGateway, headers: dict[str, str]
) -> None:
    async with InferenceServerClient(gateway.grpc_address) as client:
        assert (await client.get_server_metadata(headers=headers)).name == "headrace"
        index = await client.get_model_repository_index(headers=headers)
        assert [model.name for model in index.models] == ["triton"]
        assert (await status_of(client.infer("triton", [], headers=headers)))[0] == "StatusCode.UNAVAILABLE"
        assert (await status_of(client.infer("hidden-triton", [], headers=headers)))[0] == "StatusCode.NOT_FOUND"
        assert not await client.is_model_ready("hidden-triton", headers=headers)


async def test_a_grpc_stream_needs_a_key_and_ends_to_be_served_when_that_is_gone(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelInferRequest(model_name="triton", id="1")
        refused = stub.ModelStreamInfer(iter([request]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

        stream = stub.ModelStreamInfer(metadata=(("x-api-key", KEY),))
        await stream.write(request)
        assert "is ready" in (await stream.read()).error_message
        gateway.apply(file_documents(fleet(engine, tenants={}), content_hash="h"))
        await stream.write(request)
        assert "not known" in (await stream.read()).error_message
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_a_gateway_that_nobody_may_call_says_so(engine: ScriptedEngine) -> None:
    async with running(fleet(engine)) as gateway:
        for tenants, said in (({}, ["auth"]), (TENANTS, [])):
            gateway.apply(file_documents(fleet(engine, tenants=tenants), content_hash="h"))
            async with aiohttp.ClientSession() as client, client.get(f"{gateway.admin_url}/readyz") as response:
                answer = await response.json()
            assert (answer["status"], [text.partition(":")[0] for text in answer["degraded"]]) == ("ready", said)
