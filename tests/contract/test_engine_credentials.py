"""What engines get as credentials, by what their pool says, and whose fault it is when they refuse them."""

import logging
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from tritonclient.grpc.aio import InferenceServerClient

from router.spec.fleet import EndpointSpec, FleetSpec, ReplaceSpec, SecretSpec
from tests.contract.keyed_gateway import KEY, ask, fleet, running, status_of
from tests.harness import CHAT, ScriptedEngine, answering, free_port


def with_credentials(spec: FleetSpec, credentials: Any) -> FleetSpec:
    pools = {name: msgspec.structs.replace(pool, credentials=credentials) for name, pool in spec.pools.items()}
    return msgspec.structs.replace(spec, pools=pools)


async def test_a_pool_that_forwards_sends_on_the_clients_authorization_and_no_other_key(engine: ScriptedEngine) -> None:
    async with running(with_credentials(fleet(engine), "forward")) as gateway:
        for headers in ({"x_api_key": KEY, "authorization": "Bearer for-the-engine"}, {"x_api_key": KEY}):
            assert (await ask(gateway, "/v1/chat/completions", CHAT, **headers))[0] == 200
    assert [request.headers.get("authorization") for request in engine.requests] == ["Bearer for-the-engine", None]
    assert not any("x-api-key" in request.headers for request in engine.requests)


async def test_a_pools_own_token_takes_the_place_of_the_clients_and_follows_its_file(
    engine: ScriptedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "token"
    file.write_text("engine-token-1\n")
    secret = ReplaceSpec(replace=SecretSpec(file=str(file)))
    async with running(with_credentials(fleet(engine), secret)) as gateway:

        async def asked(status: int = 200) -> None:
            assert (await ask(gateway, "/v1/chat/completions", CHAT, authorization=f"Bearer {KEY}"))[0] == status

        await asked()
        file.write_text("another-engine-token\n")
        await gateway.until(lambda: "Bearer another-engine-token" in engine.probed_with, "probes send the new token")
        await asked()
        file.unlink()
        await gateway.until_phase("engine", "unhealthy")
        await asked(503)
        assert str(file) in gateway.gateway.fleet.endpoints["engine"].detail
    given = [request.headers.get("authorization") for request in engine.requests]
    assert given == ["Bearer engine-token-1", "Bearer another-engine-token"]
    assert not [record for record in caplog.records if "engine-token" in record.getMessage()]


class SeenMetadata:
    """A gRPC server that knows one thing only: with which `authorization` it was called, by method."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str | None]] = {}
        self.refuses = grpc.StatusCode.UNIMPLEMENTED
        self.port = 0

    async def __aenter__(self) -> "SeenMetadata":
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def service_name(self) -> None:
        return None

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        given = dict(details.invocation_metadata).get("authorization")
        self.seen.setdefault(method, []).append(given)
        ready = {"ServerReady": b"\x08\x01", "ModelReady": b"\x08\x01"}

        async def answer(_: bytes, context: Any) -> bytes:
            if method not in ready:
                await context.abort(self.refuses, "not here")
            return ready[method]

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.mark.parametrize(
    ("credentials", "infer", "probe"),
    [
        ("none", None, None),
        ("forward", f"Bearer {KEY}", None),
        (ReplaceSpec(replace=SecretSpec(env="ENGINE_TOKEN")), "Bearer sesame", "Bearer sesame"),
    ],
)
async def test_over_grpc_too_an_engine_gets_what_its_pool_says(
    engine: ScriptedEngine, credentials: Any, infer: str | None, probe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_TOKEN", "sesame")
    async with SeenMetadata() as triton:
        spec = fleet(engine)
        endpoint = EndpointSpec(id="seen", grpc=f"127.0.0.1:{triton.port}")
        pool = msgspec.structs.replace(spec.pools["t"], endpoints=[endpoint], credentials=credentials)
        async with running(msgspec.structs.replace(spec, pools={**spec.pools, "t": pool})) as gateway:
            await gateway.until(lambda: "ServerReady" in triton.seen, "the engine is probed")
            gateway.gateway.fleet.endpoints["seen"].state.phase = "ready"
            async with InferenceServerClient(gateway.grpc_address) as client:
                await status_of(client.infer("triton", [], headers={"authorization": f"Bearer {KEY}"}))
    assert triton.seen["ModelInfer"] == [infer]
    assert set(triton.seen["ServerReady"]) == {probe}


@pytest.mark.parametrize("engines", ["401 Unauthorized", "403 Forbidden"])
@pytest.mark.parametrize("credentials", ["none", "replace", "forward"])
async def test_an_engine_that_refuses_its_pools_credentials_is_not_the_clients_fault(
    engines: str, credentials: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_TOKEN", "sesame")
    given: Any = ReplaceSpec(replace=SecretSpec(env="ENGINE_TOKEN")) if credentials == "replace" else credentials

    refuse = answering(engines, b'{"error":"no"}')

    async with ScriptedEngine(refuse) as engine:
        spec = with_credentials(fleet(engine), given)
        endpoint = EndpointSpec(id="raw", grpc=f"127.0.0.1:{free_port()}", http=f"http://127.0.0.1:{engine.port}")
        triton = msgspec.structs.replace(spec.pools["t"], endpoints=[endpoint])
        async with running(msgspec.structs.replace(spec, pools={**spec.pools, "t": triton})) as gateway:
            gateway.gateway.fleet.endpoints["raw"].state.phase = "ready"
            plain = await ask(gateway, "/v1/chat/completions", CHAT, authorization=f"Bearer {KEY}")
            stream = await ask(gateway, "/v1/chat/completions", {**CHAT, "stream": True}, authorization=f"Bearer {KEY}")
            kserve = await ask(gateway, "/v2/models/triton/infer", {}, authorization=f"Bearer {KEY}")
    told = [plain[2]["error"], stream[2]["error"], kserve[2]["error"]]
    if credentials == "forward":
        assert {plain[0], stream[0], kserve[0]} == {int(engines[:3])}
        assert told == ["no", "no", "no"]
        return
    assert (plain[0], stream[0], kserve[0]) == (502, 502, 502)
    assert told[0]["code"] == "engine_credentials"
    for text, pool in ((told[0]["message"], "p"), (told[1]["message"], "p"), (told[2], "t")):
        assert f"pool {pool} sends" in text and "`credentials`" in text
        assert "sesame" not in text
    assert len(engine.requests) == 3  # every replica would say the same


async def test_over_grpc_too_an_engine_that_refuses_its_pools_credentials_is_not_the_clients_fault(
    engine: ScriptedEngine,
) -> None:
    async with SeenMetadata() as triton:
        spec = fleet(engine)
        endpoint = EndpointSpec(id="seen", grpc=f"127.0.0.1:{triton.port}")
        for credentials, status in (("none", "StatusCode.INTERNAL"), ("forward", "StatusCode.UNAUTHENTICATED")):
            pool = msgspec.structs.replace(spec.pools["t"], endpoints=[endpoint], credentials=credentials)
            async with running(msgspec.structs.replace(spec, pools={**spec.pools, "t": pool})) as gateway:
                await gateway.until(lambda: "ServerReady" in triton.seen, "the engine is probed")
                gateway.gateway.fleet.endpoints["seen"].state.phase = "ready"
                triton.refuses = grpc.StatusCode.UNAUTHENTICATED
                async with InferenceServerClient(gateway.grpc_address) as client:
                    said = await status_of(client.infer("triton", [], headers={"authorization": f"Bearer {KEY}"}))
            assert said[0] == status
            assert ("pool t sends" in said[1]) == (credentials == "none")
