"""Tokens of issuers (JWT) in place of API keys, over each API, with a real issuer that rotates keys and goes away."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gateway.oidc import callers
from gateway.oidc import issuer as issuers
from router.spec.documents import file_documents
from router.spec.fleet import (
    AuthSpec,
    EndpointSpec,
    FleetSpec,
    GatewaySpec,
    JwtSpec,
    KeySpec,
    PoolSpec,
    ProbeSpec,
    RouteSpec,
    TenantSpec,
)
from router.tenants import digest_of
from tests.certificates import make
from tests.harness import (
    CHAT,
    RunningGateway,
    ScriptedEngine,
    answering,
    free_port,
    one_pool,
    running_gateway,
)
from tests.issuer import AUDIENCE, LocalIssuer, claims, jwk, part, private_key, signed

KEY = "hr-search-key"
ANSWER = b'{"choices":[{"message":{"content":"hello"}}]}'
TENANTS = {
    "search": TenantSpec(keys=[KeySpec(sha256=digest_of(KEY).hex())], routes=["m", "triton"]),
    "other": TenantSpec(),
}

answer = answering(body=ANSWER)


def fleet(engine: ScriptedEngine, *trusted: JwtSpec, tenants: dict[str, TenantSpec] = TENANTS) -> FleetSpec:
    """The routes `m` to a scripted engine, `hidden`, which only `other` may call, and `triton`, where nobody is."""
    spec = one_pool(engine.endpoint())
    nobody = EndpointSpec(id="nobody", grpc=f"127.0.0.1:{free_port()}", http=f"http://127.0.0.1:{free_port()}")
    triton = PoolSpec(protocol="triton", model="m", endpoints=[nobody], probe=ProbeSpec(interval="60s"))
    return msgspec.structs.replace(
        spec,
        pools={**spec.pools, "t": triton},
        routes={"m": RouteSpec(pool="p"), "hidden": RouteSpec(pool="p"), "triton": RouteSpec(pool="t")},
        tenants=tenants,
        gateway=GatewaySpec(grpc=":8001", auth=AuthSpec(jwt=list(trusted))),
    )


@contextlib.asynccontextmanager
async def running(engine: ScriptedEngine, *trusted: JwtSpec) -> AsyncIterator[RunningGateway]:
    async with running_gateway(fleet(engine, *trusted), wait_ready=False) as gateway:
        await gateway.until_phase("engine", "ready")
        yield gateway


def trust(issuer: LocalIssuer, **changed: Any) -> JwtSpec:
    return msgspec.convert({"issuer": issuer.url, "audience": AUDIENCE, **changed}, JwtSpec)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(answer) as engine:
        yield engine


@pytest_asyncio.fixture
async def issuer() -> AsyncIterator[LocalIssuer]:
    async with LocalIssuer() as issuer:
        yield issuer


@pytest_asyncio.fixture
async def gateway(engine: ScriptedEngine, issuer: LocalIssuer) -> AsyncIterator[RunningGateway]:
    async with running(engine, trust(issuer)) as gateway:
        yield gateway


async def ask(gateway: RunningGateway, token: str, path: str = "/v1/chat/completions") -> tuple[int, Any, Any]:
    """Status, headers and content of the answer to whoever has `token`."""
    body = CHAT if path.startswith("/v1/chat") else None
    async with (
        aiohttp.ClientSession() as client,
        client.request(
            "POST" if body else "GET", gateway.url + path, json=body, headers={"authorization": f"Bearer {token}"}
        ) as response,
    ):
        content = await response.read()
        return response.status, response.headers, msgspec.json.decode(content) if content else None


async def status(gateway: RunningGateway, token: str) -> int:
    return (await ask(gateway, token))[0]


async def readyz(gateway: RunningGateway) -> Any:
    async with aiohttp.ClientSession() as client, client.get(f"{gateway.admin_url}/readyz") as response:
        return await response.json()


def checked(gateway: RunningGateway, outcome: str) -> float:
    return gateway.gateway.registry.get_sample_value("headrace_jwt_checks_total", {"outcome": outcome}) or 0.0


def fetches(gateway: RunningGateway, issuer: LocalIssuer, outcome: str) -> float:
    labels = {"issuer": issuer.url, "outcome": outcome}
    return gateway.gateway.registry.get_sample_value("headrace_jwks_fetches_total", labels) or 0.0


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
async def test_a_token_lets_its_tenant_in_over_every_api(
    gateway: RunningGateway, engine: ScriptedEngine, issuer: LocalIssuer, algorithm: str
) -> None:
    token = issuer.token(algorithm)
    assert await status(gateway, token) == 200
    assert msgspec.json.decode(engine.requests[-1].body)["cache_salt"] == "headrace:search:"
    assert [model["id"] for model in (await ask(gateway, token, "/v1/models"))[2]["data"]] == ["m", "triton"]
    assert (await ask(gateway, token, "/v2"))[0] == 200
    assert (await ask(gateway, token, "/v2/models/hidden/ready"))[0] == 400
    async with InferenceServerClient(gateway.grpc_address) as client:
        headers = {"authorization": f"Bearer {token}"}
        assert (await client.get_server_metadata(headers=headers)).name == "headrace"
        assert not await client.is_model_ready("triton", headers=headers)
        index = await client.get_model_repository_index(headers=headers)
        assert [model.name for model in index.models] == ["triton"]
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("triton", [], headers=headers)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"


async def test_keys_and_several_issuers_count_side_by_side(engine: ScriptedEngine, issuer: LocalIssuer) -> None:
    async with LocalIssuer() as second:
        theirs = trust(second, tenant_claim="org.team", jwks=f"{second.url}/keys")
        async with running(engine, trust(issuer), theirs) as gateway:
            assert await status(gateway, KEY) == 200
            assert await status(gateway, "hr-made-up") == 401
            assert await status(gateway, issuer.token()) == 200
            assert await status(gateway, second.token(sub="nobody", org={"team": "search"})) == 200
            # Who signs for one issuer cannot speak for another.
            assert await status(gateway, signed(claims(second.url, org={"team": "search"}), "PS256")) == 401


async def test_one_issuer_may_have_two_audiences_with_claims_of_their_own(
    engine: ScriptedEngine, issuer: LocalIssuer
) -> None:
    async with running(engine, trust(issuer), trust(issuer, audience="batch", tenant_claim="team")) as gateway:
        assert await status(gateway, issuer.token()) == 200
        assert await status(gateway, issuer.token(aud=["x", "batch"], sub="nobody", team="other")) == 200
        assert await status(gateway, issuer.token(aud="batch")) == 403


def public_pem(issuer: LocalIssuer) -> bytes:
    key = private_key("RS256").public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def with_hmac(issuer: LocalIssuer) -> str:
    """Signed with the public key as if it were a shared secret."""
    text = f"{part({'alg': 'HS256', 'typ': 'JWT', 'kid': 'RS256'})}.{part(claims(issuer.url))}"
    return f"{text}.{part(hmac.digest(public_pem(issuer), text.encode(), hashlib.sha256))}"


def unsigned(issuer: LocalIssuer, alg: str = "none", signature: str = "") -> str:
    return f"{part({'alg': alg, 'typ': 'JWT', 'kid': 'RS256'})}.{part(claims(issuer.url))}.{signature}"


def later(seconds: float) -> int:
    return int(time.time() + seconds)


REFUSED: dict[str, tuple[Callable[[LocalIssuer], str], str]] = {
    "for others": (lambda i: i.token(aud="somebody-else"), "was made for others"),
    "for nobody": (lambda i: i.token(aud=None), "was made for others"),
    "of another issuer": (lambda i: i.token(iss="https://elsewhere.example"), "not one that is trusted"),
    "of an issuer that sounds like it": (lambda i: i.token(iss=i.url + "/"), "not one that is trusted"),
    "of no issuer": (lambda i: i.token(iss=None), "not one that is trusted"),
    "expired": (lambda i: i.token(exp=later(-31)), "has expired"),
    "without an end": (lambda i: i.token(exp=None), "lacks the claim `exp`"),
    "with an end that is none": (lambda i: i.token(exp="soon"), "cannot be read"),
    "not valid yet": (lambda i: i.token(nbf=later(60)), "not valid yet"),
    "of the future": (lambda i: i.token(iat=later(60)), "not valid yet"),
    "signed by nobody": (unsigned, "not signed in a way"),
    "signed by NoNe": (lambda i: unsigned(i, "NoNe"), "not signed in a way"),
    "signed by a secret that is no secret": (with_hmac, "not signed in a way"),
    "with a signature left out": (lambda i: unsigned(i, "RS256"), "signature is not by the key"),
    "of a key that is another's": (
        lambda i: signed(claims(i.url), "RS256", private_key("RS256", 9), kid="RS256"),
        "signature is not by the key",
    ),
    "with the algorithm of another key": (
        lambda i: signed(claims(i.url), "PS256", private_key("RS256"), kid="RS256"),
        "not signed in a way",
    ),
    "with a key id of another kind of key": (
        lambda i: signed(claims(i.url), "ES256", kid="RS256"),
        "does not publish",
    ),
    "a logout": (lambda i: signed(claims(i.url), kid="RS256", typ="logout+jwt"), "cannot be read"),
    "with demands nobody knows": (lambda i: signed(claims(i.url), kid="RS256", crit=["x"], x=1), "cannot be read"),
    "changed": (lambda i: i.token().replace(".", "." + part({"sub": "other"})[:-1], 1), "cannot be read"),
    "huge": (lambda i: i.token(pad="x" * 4500, aud="somebody-else"), "was made for others"),
    "garbage": (lambda _: "a.b.c", "cannot be read"),
    "nested without end": (lambda _: f"{part(b'[' * 1500)}.{part(b'[' * 1500)}.", "cannot be read"),
    "not text": (lambda _: f"{part(bytes(range(256)))}.{part(bytes(range(256)))}.AAAA", "cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_token_that_does_not_hold_lets_nobody_in_and_the_answer_says_why_without_quoting_it(
    gateway: RunningGateway, engine: ScriptedEngine, issuer: LocalIssuer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    make, why = REFUSED[name]
    token = make(issuer)
    for _ in range(2):  # judged, then remembered
        code, headers, content = await ask(gateway, token)
        assert (code, headers["www-authenticate"], content["error"]["code"]) == (401, "Bearer", "invalid_token")
        assert why in content["error"]["message"]
    code, _, content = await ask(gateway, token, "/v2")
    assert (code, why in content["error"]) == (401, True)
    async with InferenceServerClient(gateway.grpc_address) as client:
        for call in (partial(client.infer, inputs=[]), client.is_model_ready, client.get_model_metadata):
            with pytest.raises(InferenceServerException, match=why) as caught:
                await call("triton", headers={"authorization": f"Bearer {token}"})
            assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
    assert engine.requests == []
    told = [content["error"], *(record.getMessage() for record in caplog.records if record.name.startswith("gateway"))]
    assert not [text for text in told for piece in token.split(".") if len(piece) > 8 and piece in text]
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_token_of_nobody_here_is_forbidden_not_unknown(gateway: RunningGateway, issuer: LocalIssuer) -> None:
    for changed, why in (({"sub": "x" * 5000}, "there is no tenant"), ({"sub": None}, "names no tenant")):
        token = issuer.token(**changed)
        code, _, content = await ask(gateway, token)
        assert (code, why in content["error"]["message"]) == (403, True)
        assert len(content["error"]["message"]) < 300
        async with InferenceServerClient(gateway.grpc_address) as client:
            with pytest.raises(InferenceServerException, match=why) as caught:
                await client.is_model_ready("triton", headers={"authorization": f"Bearer {token}"})
            assert caught.value.status() == "StatusCode.PERMISSION_DENIED"


async def test_no_token_reaches_an_engine(gateway: RunningGateway, engine: ScriptedEngine, issuer: LocalIssuer) -> None:
    token = issuer.token()
    assert await status(gateway, token) == 200
    (request,) = engine.requests
    assert "authorization" not in request.headers
    assert token.encode() not in request.body


async def test_a_tenant_that_is_removed_takes_its_tokens_with_it(
    gateway: RunningGateway, engine: ScriptedEngine, issuer: LocalIssuer
) -> None:
    token = issuer.token()
    assert await status(gateway, token) == 200
    left = {name: tenant for name, tenant in TENANTS.items() if name != "search"}
    gateway.apply(file_documents(fleet(engine, tenants=left), content_hash="h"))
    assert await status(gateway, token) == 403


async def test_a_new_key_counts_from_its_first_token_on_and_a_withdrawn_one_no_more(
    gateway: RunningGateway, issuer: LocalIssuer
) -> None:
    old = issuer.token()
    assert await status(gateway, old) == 200
    fresh = private_key("RS256", 1)
    issuer.published = {"new": jwk("new", fresh)}
    tokens = [signed(claims(issuer.url, jti=str(number)), key=fresh, kid="new") for number in range(5)]
    assert await asyncio.gather(*(status(gateway, token) for token in tokens)) == [200] * 5
    assert issuer.fetched == 2
    assert await status(gateway, old) == 401  # though it was remembered as good


async def test_a_grpc_stream_ends_to_be_served_when_its_tokens_key_is_withdrawn(
    gateway: RunningGateway, issuer: LocalIssuer
) -> None:
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelInferRequest(model_name="triton", id="1")
        stream = stub.ModelStreamInfer(metadata=(("authorization", f"Bearer {issuer.token()}"),))
        await stream.write(request)
        assert "is ready" in (await stream.read()).error_message
        fresh = private_key("RS256", 1)
        issuer.published = {"new": jwk("new", fresh)}
        other = stub.ServerMetadata(
            service_pb2.ServerMetadataRequest(),
            metadata=(("authorization", f"Bearer {signed(claims(issuer.url), key=fresh, kid='new')}"),),
        )
        assert (await other).name == "headrace"
        await stream.write(request)
        assert "does not publish" in (await stream.read()).error_message
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_a_token_that_expires_while_its_body_comes_buys_nothing(
    engine: ScriptedEngine, issuer: LocalIssuer
) -> None:
    body = msgspec.json.encode(CHAT)
    async with running(engine, trust(issuer, leeway="1ms")) as gateway:
        token = issuer.token(exp=later(2))
        assert await status(gateway, token) == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:10])
        await gateway.until(lambda: gateway.live_requests == 1, "the request is being read")
        while await status(gateway, token) == 200:  # noqa: ASYNC110 - time is no event
            await asyncio.sleep(0.1)
        writer.write(body[10:])
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_tokens_with_made_up_keys_are_refused_and_do_not_have_the_issuer_asked_again_and_again(
    gateway: RunningGateway, issuer: LocalIssuer
) -> None:
    tokens = [signed(claims(issuer.url), kid=f"made-up-{number}") for number in range(30)]
    assert {await status(gateway, token) for token in tokens} == {401}
    assert issuer.fetched == 2  # when the gateway started, and for the first of these
    code, headers, content = await ask(gateway, tokens[-1])
    assert (code, "does not publish" in content["error"]["message"]) == (401, True)
    assert 1 <= int(headers["retry-after"]) <= issuers.OUT_OF_TURN_S
    assert await status(gateway, issuer.token()) == 200


async def test_what_came_of_a_token_is_remembered(gateway: RunningGateway, issuer: LocalIssuer) -> None:
    good, bad = issuer.token(), issuer.token(aud="somebody-else")
    for _ in range(5):
        assert await status(gateway, good) == 200
        assert await status(gateway, bad) == 401
    assert (checked(gateway, "accepted"), checked(gateway, "audience")) == (1, 1)


async def test_without_its_issuer_a_gateway_starts_says_so_and_has_clients_come_again(
    engine: ScriptedEngine, issuer: LocalIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    await issuer.leave()
    async with running(engine, trust(issuer)) as gateway:
        code, headers, content = await ask(gateway, issuer.token())
        assert (code, content["error"]["code"]) == (503, "issuer_unavailable")
        assert int(headers["retry-after"]) >= 1
        assert await status(gateway, KEY) == 200
        async with InferenceServerClient(gateway.grpc_address) as client:
            with pytest.raises(InferenceServerException) as caught:
                await client.get_server_metadata(headers={"authorization": f"Bearer {issuer.token()}"})
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
        ready = await readyz(gateway)
        (said,) = [text for text in ready["degraded"] if text.startswith("jwt:")]
        assert ready["status"] == "ready"
        assert issuer.url in said and "none of its tokens is taken" in said
        assert fetches(gateway, issuer, "failed") >= 1
        assert len([record for record in caplog.records if issuer.url in record.getMessage()]) == 1
        await issuer.listen()
        await gateway.until(lambda: not gateway.gateway.degraded(), "the issuer is found", 15)
        assert await status(gateway, issuer.token()) == 200
        assert (await readyz(gateway))["degraded"] == []


async def bad_gateway() -> web.StreamResponse:
    return web.Response(status=502)


async def no_json() -> web.StreamResponse:
    return web.Response(body=b"<html>")


async def no_keys() -> web.StreamResponse:
    return web.json_response({"keys": []})


async def too_much() -> web.StreamResponse:
    return web.Response(body=b" " * 2_000_000)


async def elsewhere() -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:9/")


@pytest.mark.parametrize("broken", [bad_gateway, no_json, no_keys, too_much, elsewhere, None])
async def test_while_its_issuer_is_away_or_out_of_its_mind_the_keys_that_are_known_go_on_counting(
    engine: ScriptedEngine, issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    async with running(engine, trust(issuer)) as gateway:
        known = issuer.token()
        assert await status(gateway, known) == 200
        monkeypatch.setattr(issuers, "OUT_OF_TURN_S", 0.3)
        if broken is None:
            await issuer.leave()
        issuer.answer = broken
        unknown = signed(claims(issuer.url), kid="new")
        assert await status(gateway, unknown) == 503  # it may be new: nobody can tell
        (said,) = (await readyz(gateway))["degraded"]
        assert issuer.url in said and "go on counting" in said
        assert await status(gateway, known) == 200
        assert await status(gateway, issuer.token("ES256")) == 200
        issuer.answer = None
        if broken is None:
            await issuer.listen()
        await asyncio.sleep(0.3)
        assert await status(gateway, unknown) == 401
        assert (await readyz(gateway))["degraded"] == []


async def test_a_request_waits_shortly_for_keys_on_their_way_and_nobody_else_waits_with_it(
    gateway: RunningGateway, issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "WAIT_S", 0.2)
    assert await status(gateway, issuer.token()) == 200
    going_on = asyncio.Event()

    async def slow() -> web.StreamResponse:
        await going_on.wait()
        return web.Response(body=b"")

    issuer.answer = slow
    waiting = asyncio.create_task(status(gateway, signed(claims(issuer.url), kid="new")))
    await gateway.until(lambda: issuer.fetched == 2, "the issuer is asked")
    assert await status(gateway, issuer.token(jti="another")) == 200
    assert not waiting.done()
    assert await waiting == 503
    going_on.set()


async def test_keys_of_a_configuration_that_is_another_issuers_are_not_taken(
    engine: ScriptedEngine, issuer: LocalIssuer
) -> None:
    issuer.configuration = {"issuer": "https://elsewhere.example"}
    async with running(engine, trust(issuer)) as gateway:
        assert await status(gateway, issuer.token()) == 503
        assert "of another issuer" in gateway.gateway.degraded()[0]
    assert issuer.fetched == 0


FETCH = "import asyncio, sys; from gateway.oidc.fetch import fetch_keys; asyncio.run(fetch_keys(sys.argv[1], None))"


async def test_an_issuers_certificate_is_checked_and_its_keys_come_over_tls_or_not_at_all(tmp_path: Path) -> None:
    made = make(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.cert, made.key)

    async def fetched(issuer: LocalIssuer, **environment: str) -> bytes:
        """What a process of its own says of it: the certificates that are trusted are read when it starts."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FETCH, issuer.url),
            env={**os.environ, **environment},
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
        assert (process.returncode == 0) == (said == b""), said
        return said

    async with LocalIssuer(tls=context) as issuer:
        assert b"CERTIFICATE_VERIFY_FAILED" in await fetched(issuer)
        assert await fetched(issuer, SSL_CERT_FILE=str(made.cert)) == b""
        issuer.configuration = {"jwks_uri": "http://127.0.0.1:9/keys"}
        assert b"elsewhere than at an https:// URL" in await fetched(issuer, SSL_CERT_FILE=str(made.cert))
