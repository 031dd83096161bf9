"""What may come of a token: somebody's, nobody's, or not to be told yet.

Like the digest of a key, a caller is asked for its tenant whenever the request needs the fleet: a token that expires
while a body comes or in the middle of a stream, or whose key its issuer withdraws, buys nothing more.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from router.errors import ApiError, unavailable

if TYPE_CHECKING:
    import jwt

Outcome = Literal[
    "accepted", "malformed", "issuer", "audience", "algorithm", "unknown_key", "signature", "expired", "not_yet_valid",
    "tenant",
]  # fmt: skip
"""What may come of a check, for metrics."""

WAIT_S = 2.0
"""How long a request waits for the keys of its token's issuer, while they are being fetched."""
EXPIRED = "The token has expired. Get a new one from its issuer."
UNKNOWN_KEY = "The token is signed with a key that its issuer does not publish. Get a new one from its issuer."
_RETRY_AFTER_S = 2


class Signer:
    """A public key of an issuer's, for one algorithm."""

    __slots__ = ("algorithm", "key", "material", "withdrawn")

    def __init__(self, algorithm: str, key: "jwt.PyJWK", material: dict[str, str]) -> None:
        """`key` is what the library makes of `material`, which tells it from other keys."""
        self.algorithm = algorithm
        self.key = key
        self.material = material
        self.withdrawn = False
        """The issuer publishes it no more."""


class Bearer(Struct, frozen=True):
    """Who has a token that holds."""

    tenant: str
    """As the token has it; whether there is one of that name is for the fleet to say."""
    expires: float
    """Unix time from which the token is not taken any more."""
    signer: Signer

    def tenant_at(self, now: float) -> str:
        """The tenant at the Unix time `now`. Raises a 401 ApiError once the token does not hold any more."""
        if now >= self.expires:
            raise _refused(401, EXPIRED)
        if self.signer.withdrawn:
            raise _refused(401, UNKNOWN_KEY)
        return self.tenant


class Refused(Struct, frozen=True):
    """Who has a token that does not hold. No text quotes the token."""

    status: int
    message: str
    until: float
    """Time of `time.monotonic` until which that is remembered."""
    may_change: bool = False
    """Looked at again then, it may hold."""

    def tenant_at(self, _: float) -> str:
        """Raises an ApiError."""
        raise _refused(self.status, self.message, self.until - time.monotonic() if self.may_change else None)


class Pending(Struct, frozen=True):
    """Who has a token of which cannot be told yet whether it holds: its key may be among those that its issuer
    publishes by now. That is worth a short wait, since an issuer may sign with a new key the moment it has one, and
    clients give up at a 401. Were the wait over without keys, a client is told to come again, not that its token is
    bad."""

    fetched: asyncio.Future[None] | None
    """Done when they have been fetched; None if nobody does that now."""
    again: Callable[[], "Caller"]
    """Looks at the token again."""

    async def settled(self) -> "Caller":
        """What has come of it when the keys are here, or after `WAIT_S`. A fetch that was under way before the token
        came may have missed the key that a second one finds."""
        now = asyncio.get_running_loop().time
        until = now() + WAIT_S
        caller: Caller = self
        while isinstance(caller, Pending) and caller.fetched is not None and now() < until:
            await asyncio.wait([caller.fetched], timeout=until - now())
            caller = caller.again()
        return caller

    def tenant_at(self, _: float) -> str:
        """Raises a 503 ApiError."""
        message = "The keys of the token's issuer cannot be had now, so it cannot be checked. Try again in a moment."
        raise unavailable(message, code="issuer_unavailable", retry_after=_RETRY_AFTER_S)


Caller = bytes | Bearer | Refused | Pending
"""What a request's caller is known by: the digest of a key, or what has come of a token."""


def _refused(status: int, message: str, wait: float | None = None) -> ApiError:
    retry_after = max(1, math.ceil(wait)) if wait is not None else None
    return ApiError(status, message, code="invalid_token", retry_after=retry_after)
