"""Fetching what an issuer publishes: its keys, and where they are.

An issuer is asked as anybody would ask it, over TLS with the system's certificates (`SSL_CERT_FILE` names others). What
it sends is bounded in size and time, and a redirection is not followed: it could lead off TLS, or to where nobody but
the gateway may go.
"""

import asyncio

import aiohttp
import msgspec
from msgspec import Struct

FETCH_S = 5.0
"""How long it may take in all."""
_MOST_BYTES = 512 * 1024
_HEADERS = {"accept": "application/json", "accept-encoding": "identity"}


class FetchError(Exception):
    """Why an issuer's keys could not be had. The message is a clause without an end."""


class _Configuration(Struct):
    """OpenID Connect Discovery 1.0, section 3."""

    issuer: str
    jwks_uri: str


async def fetch_keys(issuer: str, jwks: str | None) -> bytes:
    """The JWK set of `issuer`, which is at `jwks` or where its configuration says. Raises FetchError."""
    try:
        no_cookies = aiohttp.DummyCookieJar()
        async with (
            asyncio.timeout(FETCH_S),
            aiohttp.ClientSession(headers=_HEADERS, auto_decompress=False, cookie_jar=no_cookies) as session,
        ):
            if jwks is None:
                url = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
                jwks = _place_of_keys(await _get(session, url), issuer, url)
            return await _get(session, jwks)
    except TimeoutError:
        raise FetchError(f"{jwks or issuer} did not answer within {FETCH_S:g} s") from None


async def _get(session: aiohttp.ClientSession, url: str) -> bytes:
    try:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise FetchError(f"{url} answered {response.status}")
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > _MOST_BYTES:
                    raise FetchError(f"{url} sent more than {_MOST_BYTES} bytes")
            return bytes(body)
    except (aiohttp.ClientError, ValueError) as error:  # ValueError: a URL that is none, of a configuration's
        raise FetchError(f"{url} could not be read: {str(error) or type(error).__name__}") from None


def _place_of_keys(body: bytes, issuer: str, url: str) -> str:
    """The URL of the keys, from the issuer's configuration."""
    try:
        said = msgspec.json.decode(body, type=_Configuration)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FetchError(f"{url} is no configuration of OpenID Connect") from None
    if said.issuer != issuer:  # section 4.3: it must be the same, to the letter
        raise FetchError(f"{url} is of another issuer, {said.issuer[:200]!r}")
    if not said.jwks_uri.startswith("https://") and issuer.startswith("https://"):
        raise FetchError(f"{url} has its keys elsewhere than at an https:// URL")
    return said.jwks_uri
