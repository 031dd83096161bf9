"""Whether a token holds: its form, who made it for whom, its signature, its times, and which tenant it names.

What must be known before the signature can be checked is read from the token as it claims it to be: its issuer and
audience choose the entry of the configuration, its algorithm and key id choose a key among that issuer's. None of that
is believed: the library checks the signature with that key and for that algorithm alone, and all the claims after it.

Base64 can say the same in more than one way. The signature covers the text of what it signs but not its own, so that is
held to its one canonical form here: a token that was changed in any character is another token, and not taken.
"""

import base64
import re
from collections.abc import Iterable
from typing import Any

import jwt
import msgspec
from msgspec import Struct

from gateway.oidc.callers import EXPIRED, Bearer, Outcome, Signer
from gateway.oidc.issuer import Issuer

_FORM = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
_KINDS = frozenset({"jwt", "at+jwt", "application/at+jwt"})
"""Values of `typ` (RFC 8725, section 3.11): tokens of other kinds, as of a logout, are signed by the same keys."""
_REQUIRED = ["iss", "aud", "exp"]


class TokenError(Exception):
    """Why a token is not taken. The message is for its client and quotes nothing of it but the tenant's name."""

    def __init__(self, reason: Outcome, message: str, status: int = 401) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.status = status


class UnknownKeyError(Exception):
    """A token's key is not among those known of its issuer."""

    def __init__(self, issuer: Issuer) -> None:
        self.issuer = issuer


class _Head(Struct):
    alg: str
    kid: str | None = None
    typ: str | None = None
    crit: msgspec.Raw | None = None


class _Said(Struct):
    iss: str | None = None
    aud: str | list[str] | None = None


def looks_like_jwt(token: str) -> bool:
    """Whether it has the form of a signed token: three parts in base64url; an API key is of another."""
    return token.count(".") == 2 and _FORM.fullmatch(token) is not None


def verify(token: str, issuers: Iterable[Issuer]) -> Bearer:
    """Who has `token`, which looks like a JWT. Raises TokenError, UnknownKeyError."""
    head_part, said_part, signature = token.split(".")
    try:
        head = msgspec.json.decode(_decoded(head_part), type=_Head)
        said = msgspec.json.decode(_decoded(said_part), type=_Said)
        canonical = base64.urlsafe_b64encode(_decoded(signature)).rstrip(b"=").decode() == signature
    except (ValueError, RecursionError):  # msgspec's and base64's errors are ValueErrors
        raise _malformed() from None
    if not canonical or head.crit is not None or (head.typ or "JWT").lower() not in _KINDS:
        raise _malformed()
    issuer = _chosen(said, issuers)
    if head.alg not in issuer.spec.algorithms:
        raise TokenError("algorithm", "The token is not signed in a way that is taken here.")
    signer = _signer(issuer, head)
    claims = _checked(token, issuer, signer)
    return Bearer(_tenant(claims, issuer.spec.tenant_claim), int(claims["exp"]) + issuer.leeway, signer)


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _malformed() -> TokenError:
    return TokenError("malformed", "The token cannot be read: it is no JWT as an issuer signs them for calls.")


def _chosen(said: _Said, issuers: Iterable[Issuer]) -> Issuer:
    """The issuer that a token says it is of."""
    of_issuer = [one for one in issuers if one.spec.issuer == said.iss]
    if not of_issuer:
        raise TokenError("issuer", "The token's issuer (`iss`) is not one that is trusted here.")
    audiences = said.aud if isinstance(said.aud, list) else [said.aud]
    for one in of_issuer:
        if one.spec.audience in audiences:
            return one
    raise TokenError("audience", "The token was made for others: its audience (`aud`) is not that of this gateway.")


def _signer(issuer: Issuer, head: _Head) -> Signer:
    signers = issuer.signers(head.alg)
    if head.kid is None and len(signers) > 1:
        raise TokenError("unknown_key", "The token does not say by which of its issuer's keys it is signed (`kid`).")
    signer = signers.get(head.kid) if head.kid is not None else next(iter(signers.values()), None)
    if signer is None:
        raise UnknownKeyError(issuer)
    return signer


def _checked(token: str, issuer: Issuer, signer: Signer) -> dict[str, Any]:
    """The claims of a token that holds."""
    spec = issuer.spec
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            signer.key,
            algorithms=[signer.algorithm],
            issuer=spec.issuer,
            audience=spec.audience,
            leeway=issuer.leeway,
            options={"require": _REQUIRED},
        )
    except jwt.ExpiredSignatureError:
        raise TokenError("expired", EXPIRED) from None
    except jwt.ImmatureSignatureError:
        message = "The token is not valid yet (`nbf`, `iat`): use it later, or have the clocks of both sides looked at."
        raise TokenError("not_yet_valid", message) from None
    except jwt.InvalidSignatureError:
        raise TokenError("signature", "The token's signature is not by the key that it names.") from None
    except jwt.MissingRequiredClaimError as error:
        raise TokenError("malformed", f"The token lacks the claim `{error.claim}`.") from None
    except (jwt.InvalidTokenError, RecursionError):
        raise _malformed() from None
    return claims


def _tenant(claims: dict[str, Any], path: str) -> str:
    """The tenant that a token names."""
    found: Any = claims.get(path)
    if found is None:
        found = claims
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, str) or not found:
        raise TokenError("tenant", f"The token names no tenant: it has no text in its claim `{path}`.", 403)
    return found
