"""Issuers of tokens (JWT) that are away or talk nonsense: what becomes of the tokens they signed."""

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gateway.oidc import callers
from gateway.oidc import issuer as issuers
from tests.certificates import make
from tests.contract.jwt_gateway import ask, fetches, readyz, status, trust, trusting
from tests.contract.keyed_gateway import KEY
from tests.harness import RunningGateway, ScriptedEngine
from tests.issuer import LocalIssuer, claims, signed


@pytest_asyncio.fixture
async def gateway(engine: ScriptedEngine, issuer: LocalIssuer) -> AsyncIterator[RunningGateway]:
    async with trusting(engine, trust(issuer)) as gateway:
        yield gateway


async def test_without_its_issuer_a_gateway_starts_says_so_and_has_clients_come_again(
    engine: ScriptedEngine, issuer: LocalIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    await issuer.leave()
    async with trusting(engine, trust(issuer)) as gateway:
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
    async with trusting(engine, trust(issuer)) as gateway:
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
    async with trusting(engine, trust(issuer)) as gateway:
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
