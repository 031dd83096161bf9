"""An issuer's keys as it publishes them: a JWK set (RFC 7517) becomes the keys that its tokens may be signed with.

Each key is filed under the algorithms that its kind can be used with, and a token is checked with a key of its own
algorithm only. So no choice of a token's has a key used for what it is not: shared secrets, keys for encryption and
kinds that nobody asked for are not there at all. Of a private key that an issuer publishes by mistake, its public part
is taken.
"""

from collections.abc import Collection, Mapping

import jwt
import msgspec
from msgspec import Struct

from gateway.oidc.callers import Signer

Keys = Mapping[str, Mapping[str, Signer]]
"""By algorithm, then by the key's id (`kid`); empty for a key without one."""

_MOST_KEYS = 100
_LEAST_RSA_BITS = 2048
_OF_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_OF_CURVE = {
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
_PUBLIC = {"RSA": ("kty", "n", "e"), "EC": ("kty", "crv", "x", "y"), "OKP": ("kty", "crv", "x")}


class KeySetError(Exception):
    """What was published is no set of keys that tokens could be checked with. The message ends a sentence."""


class _Jwk(Struct):
    kty: str
    crv: str | None = None
    n: str | None = None
    e: str | None = None
    x: str | None = None
    y: str | None = None
    kid: str = ""
    use: str = "sig"
    alg: str | None = None
    key_ops: list[str] | None = None


class _Set(Struct):
    keys: list[msgspec.Raw]


def read_keys(body: bytes, algorithms: Collection[str], before: Keys) -> Keys:
    """The keys of a JWK set for `algorithms`. One that was among those `before` is the same object; those that are not
    there any more are marked as withdrawn. Raises KeySetError, for a set without any such key as well, and then
    withdraws none."""
    try:
        published = msgspec.json.decode(body, type=_Set).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise KeySetError("sent what is no JWK set") from None
    if len(published) > _MOST_KEYS:
        raise KeySetError(f"publishes more than {_MOST_KEYS} keys")
    keys: dict[str, dict[str, Signer]] = {}
    for raw in published:
        try:
            one = msgspec.json.decode(raw, type=_Jwk)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # of a kind that nobody here knows, as RFC 7517 (section 5) wants it
        for algorithm in _fitting(one):
            if algorithm in algorithms:
                known = before.get(algorithm, {}).get(one.kid)
                signer = _signer(one, algorithm, known)
                if signer is not None:
                    keys.setdefault(algorithm, {}).setdefault(one.kid, signer)
    if not keys:
        raise KeySetError(f"publishes no key for {', '.join(algorithms)}")
    for algorithm, of_algorithm in before.items():
        for kid, signer in of_algorithm.items():
            signer.withdrawn = keys.get(algorithm, {}).get(kid) is not signer
    return keys


def _fitting(one: _Jwk) -> Collection[str]:
    """The algorithms that a key may be used with to check signatures."""
    if one.use != "sig" or (one.key_ops is not None and "verify" not in one.key_ops):
        return ()
    fitting = _OF_RSA if one.kty == "RSA" else _OF_CURVE.get((one.kty, one.crv or ""), ())
    return fitting if one.alg is None else [name for name in fitting if name == one.alg]


def _signer(one: _Jwk, algorithm: str, known: Signer | None) -> Signer | None:
    """The key, the one that is `known` if it is the same; None for one that cannot be used."""
    material = {name: value for name in _PUBLIC[one.kty] if (value := getattr(one, name)) is not None}
    if known is not None and known.material == material:
        return known
    try:
        key = jwt.PyJWK(dict(material), algorithm)
    except Exception:  # the library's own errors and cryptography's: whatever is wrong with one key, the others count
        return None
    if one.kty == "RSA" and key.key.key_size < _LEAST_RSA_BITS:
        return None
    return Signer(algorithm, key, material)
