"""Who a request is from: API keys, known by their hashes, and the tenants they belong to, with their limits.

A key is 256 random bits, so its plain SHA-256 gives nothing away and needs no salt: whoever reads the fleet's documents
cannot call with what is in them. A presented key is hashed and its digest looked up. What the time of that could tell
is about digests, from which no key can be made; the last comparison takes the same time for any digest all the same.

The index is compiled whenever the documents change. A key that two tenants list would make one of them the other, so
it is nobody's, and a problem names both.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from router.admission.limits import Limits, TenantLimits
from router.errors import ApiError
from router.spec.fleet import LimitSpec, TenantSpec
from router.spec.units import end_of_day

try:  # The interpreter's own: for what is as short as a key, OpenSSL takes several times as long to get ready.
    from _sha2 import sha256  # type: ignore[import-not-found]
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found]
    except ImportError:
        from hashlib import sha256

Digest = bytes
"""The SHA-256 of a key, 32 bytes."""

_UNLIMITED = LimitSpec()
_SALT_MARK = "headrace:"
"""How the salts of tenants begin; no client's own may."""


class HeldKey(msgspec.Struct, frozen=True):
    """A key of the index."""

    digest: Digest
    tenant: str
    expires: float
    """Unix time from which it is not taken any more; infinity for never."""


def digest_of(key: str) -> Digest:
    """The digest of a key as it came in a header, whose characters stand for bytes (Latin-1)."""
    digest: Digest = sha256(key.encode("latin-1", "replace")).digest()
    return digest


def key_refused(message: str) -> ApiError:
    """The 401 for a request without a key that counts. `message` never quotes one."""
    return ApiError(401, message, code="invalid_api_key")


@dataclass(slots=True, frozen=True)
class KeyIndex:
    """Which tenant a key belongs to."""

    _keys: Mapping[Digest, HeldKey] = field(default_factory=dict)

    def tenant_of(self, digest: Digest, now: float) -> str:
        """The tenant whose key has `digest`, at the Unix time `now`. Raises a 401 ApiError if there is none."""
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise key_refused("The API key is not known here. Check it, or ask whoever runs this gateway for one.")
        if now >= key.expires:
            raise key_refused("The API key has expired. Ask whoever runs this gateway for a new one.")
        return key.tenant


def index_keys(tenants: Mapping[str, TenantSpec]) -> tuple[KeyIndex, list[str]]:
    """The index of the keys of `tenants`, and the problems with them."""
    keys: dict[Digest, HeldKey] = {}
    problems: list[str] = []
    shared: set[Digest] = set()
    for name, tenant in sorted(tenants.items()):
        for spec in tenant.keys:
            digest = bytes.fromhex(spec.sha256)
            try:
                expires = end_of_day(spec.expires) if spec.expires is not None else float("inf")
            except ValueError:
                problems.append(f"tenant {name}: the key {spec.sha256[:12]}... expires on no day of the calendar")
                continue
            held = keys.setdefault(digest, HeldKey(digest, name, expires))
            if held.tenant != name:
                shared.add(digest)
                what = f"the key {spec.sha256[:12]}... is tenant {held.tenant}'s too, so it is taken for neither"
                problems.append(f"tenant {name}: {what}")
    return KeyIndex({digest: key for digest, key in keys.items() if digest not in shared}), problems


def limits_of(name: str, tenant: TenantSpec) -> TenantLimits | None:
    """The limits of a tenant; None if there are none."""
    routes = {route: _limits(spec) for route, spec in tenant.route_limits.items() if spec != _UNLIMITED}
    whole = _limits(tenant.limits) if tenant.limits != _UNLIMITED else None
    return TenantLimits(name, whole, routes) if routes or whole is not None else None


def _limits(spec: LimitSpec) -> Limits:
    return Limits(
        spec.requests_per_minute, spec.prompt_tokens_per_minute, spec.completion_tokens_per_minute, spec.streams
    )


def own_salt(tenant: str) -> str:
    """What the `cache_salt` of every request of an isolated tenant begins with."""
    return f"{_SALT_MARK}{tenant}:"


def is_own_salt(salt: str) -> bool:
    """Whether a client's salt could be one of `own_salt`: with it the client would share that tenant's cache."""
    return salt.startswith(_SALT_MARK)
