"""Who may come in: from the headers of a request to the fleet as its tenant sees it.

It is decided from the head alone, before any of a body is read. A key comes as clients of OpenAI (`Authorization:
Bearer`), Anthropic (`x-api-key`) and Azure (`api-key`) send it; the first of `KEY_HEADERS` that is there counts, so
that a client of engines which ask for an Authorization of their own can send both. What is kept of a key is its digest,
which is looked up again whenever the request needs the fleet: a tenant that was removed or whose key expired while its
body came, or in the middle of a stream of requests, gets nothing more.

Where issuers are trusted (`gateway.auth.jwt`), what has the form of a signed token is one of theirs (`gateway.oidc`),
in whichever of these headers it comes; anything else is a key.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gateway.credentials import AUTHORIZATION
from gateway.fleet import LiveFleet
from gateway.oidc.callers import Caller
from router.errors import ApiError
from router.fleet import FleetView
from router.spec.references import ANONYMOUS as ANONYMOUS_TENANT
from router.tenants import digest_of, key_refused

if TYPE_CHECKING:
    from gateway.oidc.tokens import Tokens

KEY_HEADERS: Final = ("x-api-key", "api-key", AUTHORIZATION)
_SCHEME = "bearer "
_NEEDS_KEY = "This gateway needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
_NEEDS_KEY_OR_TOKEN = "This gateway needs an API key or a token (JWT): send it as `Authorization: Bearer KEY`."
ANONYMOUS: Final = b""
"""In place of a digest, of a request without a key."""


class Access:
    """The one place that says who may come in. `anonymous`: whoever has no key may, too; `tokens`: None where no issuer
    is trusted."""

    def __init__(self, fleet: LiveFleet, tokens: "Tokens | None", *, anonymous: bool) -> None:
        self._fleet = fleet
        self._tokens = tokens
        self._anonymous = anonymous

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """What a caller is known by, from headers or metadata: whether it may come in is for `view` to say. One who is
        `Pending` should be let settle first."""
        key = _key(headers)
        if not key:
            return ANONYMOUS
        digest = digest_of(key)
        return digest if self._tokens is None else self._tokens.caller(digest, key)

    def view(self, caller: Caller) -> FleetView:
        """The fleet as a caller sees it now. Raises an ApiError for one who may not come in: 401, 403 for one with a
        good token of nobody's, 503 for one whose token cannot be checked now."""
        whole = self._fleet.view
        if self._anonymous and (not caller or whole.any_key):  # without tenants, a key is a library's habit
            return whole.tenants.get(ANONYMOUS_TENANT, whole)
        if not caller:
            raise key_refused(_NEEDS_KEY if self._tokens is None else _NEEDS_KEY_OR_TOKEN)
        if isinstance(caller, bytes):
            return whole.tenants[whole.keys.tenant_of(caller, time.time())]
        tenant = caller.tenant_at(time.time())
        view = whole.tenants.get(tenant)
        if view is None:
            message = f"The token is good, but there is no tenant {tenant[:128]!r} here. Ask whoever runs this gateway."
            raise ApiError(403, message, code="unknown_tenant")
        return view


def _key(headers: Mapping[str, str]) -> str:
    """The key that was sent; empty if there is none."""
    for name in KEY_HEADERS:
        value = headers.get(name)
        if value:
            if name != AUTHORIZATION:
                return value
            if value[: len(_SCHEME)].lower() == _SCHEME:
                return value[len(_SCHEME) :].strip()
    return ""
