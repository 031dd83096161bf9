"""An issuer of tokens on loopback: a real HTTP server with real keys, which publishes and signs what a test wants."""

import base64
import ssl
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import jwt
import msgspec
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

AUDIENCE = "headrace-test"
Private = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

_MAKE: dict[str, Callable[[], Private]] = {
    "RS256": lambda: rsa.generate_private_key(65537, 2048),
    "PS256": lambda: rsa.generate_private_key(65537, 2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


@cache
def private_key(algorithm: str, number: int = 0) -> Private:
    """The key of that number for an algorithm: the same in all tests, since RSA's take long to make."""
    return _MAKE[algorithm]()


def jwk(kid: str | None, key: Private, **members: object) -> dict[str, object]:
    """The public key, as a JWK set holds it."""
    public = key.public_key()
    if isinstance(public, rsa.RSAPublicKey):
        made = jwt.algorithms.RSAAlgorithm.to_jwk(public, as_dict=True)
    elif isinstance(public, ec.EllipticCurvePublicKey):
        made = jwt.algorithms.ECAlgorithm.to_jwk(public, as_dict=True)
    else:
        made = jwt.algorithms.OKPAlgorithm.to_jwk(public, as_dict=True)
    made.pop("key_ops", None)
    return {**made, **({"kid": kid} if kid is not None else {}), **members}


def jwk_set(*keys: dict[str, object]) -> bytes:
    return msgspec.json.encode({"keys": keys})


def claims(issuer: str, **changed: object) -> dict[str, object]:
    """The claims of a good token; a claim that is changed to None is left out."""
    now = int(time.time())
    said = {"iss": issuer, "aud": AUDIENCE, "sub": "search", "iat": now, "exp": now + 600, **changed}
    return {name: value for name, value in said.items() if value is not None}


def signed(
    said: dict[str, object], algorithm: str = "RS256", key: Private | None = None, kid: str | None = "k", **head: object
) -> str:
    named = {"kid": kid} if kid is not None else {}
    return jwt.encode(
        said, key if key is not None else private_key(algorithm), algorithm=algorithm, headers={**named, **head}
    )


def part(value: object) -> str:
    """A part of a token that somebody writes by hand."""
    raw = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


class LocalIssuer:
    """The issuer. It starts with one key for each of its algorithms, the algorithm's name being the key's id."""

    def __init__(self, *algorithms: str, tls: ssl.SSLContext | None = None) -> None:
        self.published = {name: jwk(name, private_key(name)) for name in algorithms or ("RS256", "ES256", "EdDSA")}
        self.fetched = 0
        """How often its keys were asked for."""
        self.answer: Callable[[], Any] | None = None
        """What it does instead of giving its keys."""
        self.configuration: dict[str, object] = {}
        self.port = 0
        self._tls = tls
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls is not None else ''}://127.0.0.1:{self.port}"

    def token(self, algorithm: str = "RS256", **changed: object) -> str:
        return signed(claims(self.url, **changed), algorithm, kid=algorithm)

    async def __aenter__(self) -> "LocalIssuer":
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def listen(self) -> None:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._configuration)
        app.router.add_get("/keys", self._keys)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def leave(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _configuration(self, _: web.Request) -> web.Response:
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.configuration})

    async def _keys(self, _: web.Request) -> web.StreamResponse:
        self.fetched += 1
        if self.answer is not None:
            answer: web.StreamResponse = await self.answer()
            return answer
        return web.Response(body=jwk_set(*self.published.values()), content_type="application/json")
