"""Tokens of issuers (JWT) in place of API keys, over each API: which are taken, how long, and what else is said."""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc
import msgspec
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives import serialization
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gateway.oidc import issuer as issuers
from router.spec.documents import file_documents
from tests.contract.jwt_gateway import ask, checked, status, trust, trusting
from tests.contract.keyed_gateway import KEY, TENANTS, fleet
from tests.harness import CHAT, RunningGateway, ScriptedEngine
from tests.issuer import LocalIssuer, claims, jwk, part, private_key, signed


@pytest_asyncio.fixture
async def gateway(engine: ScriptedEngine, issuer: LocalIssuer) -> AsyncIterator[RunningGateway]:
    async with trusting(engine, trust(issuer)) as gateway:
        yield gateway


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
        async with trusting(engine, trust(issuer), theirs) as gateway:
            assert await status(gateway, KEY) == 200
            assert await status(gateway, "hr-made-up") == 401
            assert await status(gateway, issuer.token()) == 200
            assert await status(gateway, second.token(sub="nobody", org={"team": "search"})) == 200
            # Who signs for one issuer cannot speak for another.
            assert await status(gateway, signed(claims(second.url, org={"team": "search"}), "PS256")) == 401


async def test_one_issuer_may_have_two_audiences_with_claims_of_their_own(
    engine: ScriptedEngine, issuer: LocalIssuer
) -> None:
    async with trusting(engine, trust(issuer), trust(issuer, audience="batch", tenant_claim="team")) as gateway:
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
    async with trusting(engine, trust(issuer, leeway="1ms")) as gateway:
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
