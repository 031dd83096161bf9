"""Who may come in: from the headers of a request to the fleet as its tenant sees it.

It is decided from the head alone, before any of a body is read. A key comes as clients of OpenAI (`Authorization:
Bearer`), Anthropic (`x-api-key`) and Azure (`api-key`) send it; the first of `KEY_HEADERS` that is there counts, so
that a client of engines which ask for an Authorization of their own can send both. What is kept of a key is its digest,
which is looked up again whenever the request needs the fleet: a tenant that was removed or whose key expired while its
body came, or in the middle of a stream of requests, gets nothing more.
"""

import time
from collections.abc import Mapping
from typing import Final

from gateway.fleet import LiveFleet
from router.fleet import FleetView
from router.tenants import Digest, digest_of, key_refused

AUTHORIZATION: Final = "authorization"
KEY_HEADERS: Final = ("x-api-key", "api-key", AUTHORIZATION)
_SCHEME = "bearer "
ANONYMOUS: Final = b""
"""In place of a digest, of a request without a key."""


class Access:
    """The one place that says who may come in. `anonymous`: whoever has no key may, too."""

    def __init__(self, fleet: LiveFleet, *, anonymous: bool) -> None:
        self._fleet = fleet
        self._anonymous = anonymous

    def caller(self, headers: Mapping[str, str]) -> Digest:
        """What a caller is known by, from headers or metadata: whether it may come in is for `view` to say."""
        key = _key(headers)
        return digest_of(key) if key else ANONYMOUS

    def view(self, caller: Digest) -> FleetView:
        """The fleet as a caller sees it now. Raises a 401 ApiError for one who may not come in."""
        whole = self._fleet.view
        if self._anonymous and (not caller or not whole.tenants):  # without tenants, a key is a library's habit
            return whole
        if caller:
            return whole.tenants[whole.keys.tenant_of(caller, time.time())]
        raise key_refused("This gateway needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.")


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
