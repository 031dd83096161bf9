"""From a token to its caller, remembered by the token's digest.

A check takes 0.1 to 0.2 ms, and a client sends the same token for minutes, so what came of a token is kept:
that it holds, until it expires or its key is withdrawn; that it does not, for a few seconds, which makes the thousandth
try as cheap as a wrong API key. Both maps are bounded and let go of their oldest entry. A token itself is never kept.

Nothing here waits. Only for a token whose key is not known a caller may be asked to, once and shortly (`Pending`).
"""

import logging
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TypeVar

from gateway.metrics import Metrics
from gateway.oidc.callers import UNKNOWN_KEY, Bearer, Caller, Outcome, Pending, Refused
from gateway.oidc.issuer import Issuer
from gateway.oidc.verify import TokenError, UnknownKeyError, looks_like_jwt, verify
from router.spec.gateway import JwtSpec
from router.tenants import Digest

MOST_KNOWN = 16 * 1024
MOST_REFUSED = 4 * 1024
REFUSED_S = 10.0

_Caller = TypeVar("_Caller")

logger = logging.getLogger(__name__)


class Tokens:
    """The tokens of the issuers that the gateway trusts. Their keys are fetched while `keepers` run."""

    def __init__(self, trusted: Sequence[JwtSpec], metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: dict[Digest, Bearer] = {}
        self._refused: dict[Digest, Refused] = {}
        self._issuers = [Issuer(one, metrics, self._refused.clear) for one in trusted]

    def keepers(self) -> list[Coroutine[None, None, None]]:
        """What is to run as long as tokens are taken."""
        return [issuer.keep() for issuer in self._issuers]

    def degraded(self) -> list[str]:
        """What is wrong with the issuers, for the operator."""
        return [text for issuer in self._issuers if (text := issuer.degraded()) is not None]

    def caller(self, digest: Digest, token: str) -> Caller:
        """Whose `token` is; its digest for what has not the form of a token, which may be a key."""
        known = self._known.get(digest)
        if known is not None and not known.signer.withdrawn:
            return known
        refused = self._refused.get(digest)
        if refused is not None and time.monotonic() < refused.until:
            return refused
        if not looks_like_jwt(token):
            return digest
        return self._judged(digest, token)

    def _judged(self, digest: Digest, token: str) -> Caller:
        try:
            bearer = verify(token, self._issuers)
        except TokenError as error:
            self._count(error.reason)
            refused = Refused(error.status, error.message, time.monotonic() + REFUSED_S)
            if error.reason != "not_yet_valid":  # that is true from one moment to the next
                _keep(self._refused, MOST_REFUSED, digest, refused)
            return refused
        except UnknownKeyError as error:
            return self._without_key(digest, token, error.issuer)
        except Exception:  # a token must not be able to do more harm than not to be taken
            logger.exception("a token could not be checked")
            self._count("malformed")
            return Refused(401, "The token cannot be checked.", 0.0)
        self._count("accepted")
        _keep(self._known, MOST_KNOWN, digest, bearer)
        return bearer

    def _without_key(self, digest: Digest, token: str, issuer: Issuer) -> Caller:
        """The caller with a token whose key is not among its issuer's, as far as they are known."""
        fetched = issuer.ask()
        if fetched is not None or issuer.stale:
            return Pending(fetched, partial(self.caller, digest, token))
        self._count("unknown_key")
        refused = Refused(401, UNKNOWN_KEY, time.monotonic() + issuer.wait(), may_change=True)
        _keep(self._refused, MOST_REFUSED, digest, refused)
        return refused

    def _count(self, outcome: Outcome) -> None:
        self._metrics.jwt_checks.values[outcome,] += 1


def _keep(kept: dict[Digest, _Caller], most: int, digest: Digest, caller: _Caller) -> None:
    """Remember a caller in place of the oldest."""
    kept.pop(digest, None)
    if len(kept) >= most:
        del kept[next(iter(kept))]
    kept[digest] = caller
