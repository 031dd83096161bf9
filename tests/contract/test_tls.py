"""TLS on every listening address, with certificates that change, over real sockets."""

import asyncio
import json
import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner, Result

from gateway import tls
from headrace.cli.endpoints import endpoints_app
from router.spec.fleet import FleetSpec
from router.spec.gateway import AdminTlsSpec, GatewaySpec, TlsSpec
from tests.certificates import Made, expired, make
from tests.fault.worker_command import command
from tests.harness import (
    CHAT,
    DONE,
    ONE,
    STREAM,
    TWO,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    answering,
    free_port,
    one_pool,
    running_gateway,
    streaming,
)

answer = answering()


stream = streaming(ONE, TWO, DONE)


def spec_of(engine: ScriptedEngine, made: Made, admin: AdminTlsSpec | None = None) -> FleetSpec:
    gateway = GatewaySpec(grpc=":8001", tls=TlsSpec(cert=str(made.cert), key=str(made.key)), admin_tls=admin)
    return msgspec.structs.replace(one_pool(engine.endpoint()), gateway=gateway)


def secure(running: RunningGateway) -> str:
    return running.url.replace("http:", "https:")


async def status(url: str, trusting: ssl.SSLContext, **options: Any) -> int:
    """Of a request on a connection of its own."""
    async with aiohttp.ClientSession() as http, http.request("POST", url, ssl=trusting, **options) as response:
        await response.read()
        return response.status


async def live(address: str, made: Made) -> bool:
    """What a gateway says over gRPC, on a connection of its own, to who trusts `made`. Raises AioRpcError."""
    credentials = grpc.ssl_channel_credentials(made.cert.read_bytes())
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool((await stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=5)).live)


async def test_whole_and_streamed_answers_come_over_tls_on_kept_connections(tmp_path: Path) -> None:
    made = make(tmp_path)
    async with ScriptedEngine(stream) as engine, running_gateway(spec_of(engine, made)) as running:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=made.client(), limit=1)) as http:
            for _ in range(3):
                async with http.post(f"{secure(running)}/v1/chat/completions", json=STREAM) as response:
                    assert (response.status, await response.read()) == (200, ONE + TWO + DONE)
            clients = running.gateway._clients
            assert clients is not None
            assert len(clients.connections) == 1
            (connection,) = clients.connections
            assert connection.address == "127.0.0.1"
        assert await live(running.grpc_address, made)


async def test_a_large_request_and_a_large_answer_come_whole(tmp_path: Path) -> None:
    made, size = make(tmp_path), 20_000_000

    async def large(connection: EngineConnection) -> None:
        await connection.json(b"x" * len(connection.body))

    async with ScriptedEngine(large) as engine, running_gateway(spec_of(engine, made)) as running:
        body = json.dumps({**CHAT, "user": "x" * size}).encode()
        async with aiohttp.ClientSession() as http:
            url = f"{secure(running)}/v1/chat/completions"
            async with http.post(url, data=body, ssl=made.client()) as response:
                assert len(await response.read()) == len(engine.requests[0].body) > size


async def test_a_changed_certificate_is_what_new_connections_get_over_http_and_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_LOOK_EVERY_S", 0.05)
    caplog.set_level(logging.INFO)
    before = make(tmp_path)
    old_client = before.client()
    old = Made(tmp_path / "old.pem", tmp_path / "old.key")
    old.cert.write_bytes(before.cert.read_bytes())
    async with ScriptedEngine(answer) as engine, running_gateway(spec_of(engine, before)) as running:
        url = f"{secure(running)}/v1/chat/completions"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=old_client)) as kept:
            async with kept.post(url, json=CHAT) as response:
                assert response.status == 200
            assert await live(running.grpc_address, old)
            after = make(tmp_path, kind="rsa")
            await running.until(lambda: "new connections get the new certificate" in caplog.text, "it is taken over")
            assert await status(url, after.client(), json=CHAT) == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await status(url, old_client, json=CHAT)
            assert await live(running.grpc_address, after)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await live(running.grpc_address, old)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            async with kept.post(url, json=CHAT) as response:  # what stands goes on
                assert response.status == 200


async def test_an_expired_certificate_is_told_to_clients_as_that(tmp_path: Path) -> None:
    made = expired(tmp_path)
    async with ScriptedEngine(answer) as engine, running_gateway(spec_of(engine, made)) as running:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="expired"):
            await status(f"{secure(running)}/v1/chat/completions", made.client(), json=CHAT)


async def call(arguments: str, *, environ: dict[str, str]) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, endpoints_app, arguments.split(), env=environ)


async def test_the_admin_port_wants_client_certificates_for_what_is_not_for_probes(tmp_path: Path) -> None:
    made, authority, stranger = make(tmp_path), make(tmp_path, "authority"), make(tmp_path, "stranger")
    operator = make(tmp_path, "operator", issuer=authority)
    files = AdminTlsSpec(cert=str(made.cert), key=str(made.key), client_ca=str(authority.cert))
    async with ScriptedEngine(answer) as engine, running_gateway(spec_of(engine, made, files)) as running:
        base = running.admin_url.replace("http:", "https:")

        async def get(path: str, own: Made | None) -> int:
            async with aiohttp.ClientSession() as http, http.get(base + path, ssl=made.client(own)) as response:
                return response.status

        for path in ("/healthz", "/readyz", "/metrics"):
            assert await get(path, None) == 200
        assert await get("/admin/v1/endpoints", None) == 401
        assert await get("/%61dmin/v1/endpoints", None) == 401
        assert await get("/admin/v1/endpoints", operator) == 200
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await get("/healthz", stranger)

        both = tmp_path / "operator.both"
        both.write_bytes(operator.cert.read_bytes() + operator.key.read_bytes())
        trusted = {"HEADRACE_ADMIN_CA": str(made.cert)}
        listed = await call(f"list --admin {base}", environ={**trusted, "HEADRACE_ADMIN_CERT": str(both)})
        assert (listed.exit_code, "engine" in listed.output) == (0, True)
        for environ, told in [
            (trusted, "needs a client certificate (HEADRACE_ADMIN_CERT)"),
            ({}, "is not trusted (self-signed certificate): HEADRACE_ADMIN_CA names the file"),
            ({"HEADRACE_ADMIN_CA": "/nowhere"}, "'/nowhere' of HEADRACE_ADMIN_CA cannot be used: No such file"),
            ({**trusted, "HEADRACE_ADMIN_CERT": str(made.cert)}, "of HEADRACE_ADMIN_CERT cannot be used"),
        ]:
            refused = await call(f"list --admin {base}", environ=environ)
            assert (refused.exit_code, told in refused.output) == (1, True), refused.output
        refused = await call(f"list --admin {running.admin_url}", environ={})
        assert "with https:// if it has a certificate" in refused.output


async def test_workers_serve_with_tls_from_the_sockets_of_their_supervisor(tmp_path: Path) -> None:
    made = make(tmp_path)
    files = {"cert": "server.pem", "key": "server.key"}  # relative to the fleet file, which is in the same folder
    addresses = GatewaySpec(
        http=f"127.0.0.1:{free_port()}",
        admin=f"127.0.0.1:{free_port()}",
        grpc=f"127.0.0.1:{free_port()}",
        tls=msgspec.convert(files, TlsSpec),
    )
    async with ScriptedEngine(stream) as engine:
        async with command(tmp_path, one_pool(engine.endpoint()), addresses, workers=2) as running:
            await running.until_ready(2)
            url = f"https://{addresses.http}/v1/chat/completions"
            assert {await status(url, made.client(), json=STREAM) for _ in range(8)} == {200}
            assert addresses.grpc is not None
            assert await live(addresses.grpc, made)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("field", ["tls", "admin_tls"])
async def test_a_certificate_that_is_not_there_stops_the_start_with_a_sentence(
    tmp_path: Path, workers: int, field: str
) -> None:
    addresses = GatewaySpec(
        http=f"127.0.0.1:{free_port()}",
        admin=f"127.0.0.1:{free_port()}",
        **{field: AdminTlsSpec(cert="none.pem", key="none.key")},  # type: ignore[arg-type]
    )
    async with ScriptedEngine(answer) as engine:
        async with command(tmp_path, one_pool(engine.endpoint()), addresses, workers=workers) as running:
            assert await running.ends() == 1
            last = running.log.read_text().splitlines()[-1]
    path = tmp_path / "none.pem"
    assert last == f"The certificate of gateway.{field} cannot be used: `cert`: {path}: no such file or directory."
