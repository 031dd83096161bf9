"""Tokens and the keys that they are checked with: nothing gets in that an issuer has not signed for this gateway."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.metrics import Metrics
from gateway.oidc import tokens
from gateway.oidc.callers import Bearer, Refused
from gateway.oidc.issuer import Issuer
from gateway.oidc.keys import Keys, KeySetError, read_keys
from gateway.oidc.tokens import Tokens
from gateway.oidc.verify import TokenError, UnknownKeyError, looks_like_jwt, verify
from router.errors import ApiError
from router.spec.gateway import JwtSpec
from router.spec.strict import read_fleet
from router.tenants import digest_of
from tests.issuer import AUDIENCE, claims, jwk, jwk_set, private_key, signed

ISSUER = "https://login.example.com"
ALGORITHMS = ("RS256", "ES256", "EdDSA")
SET = jwk_set(*(jwk(name, private_key(name)) for name in ALGORITHMS))


def trust(**changed: Any) -> JwtSpec:
    return msgspec.convert({"issuer": ISSUER, "audience": AUDIENCE, **changed}, JwtSpec)


def issuer(body: bytes = SET, **changed: Any) -> Issuer:
    """One whose keys are here."""
    made = Issuer(trust(**changed), Metrics(), lambda: None)
    made.take(body)
    return made


def checker(metrics: Metrics, **changed: Any) -> Tokens:
    made = Tokens([trust(**changed)], metrics)
    made._issuers[0].take(SET)
    return made


def token(algorithm: str = "RS256", **changed: Any) -> str:
    return signed(claims(ISSUER, **changed), algorithm, kid=algorithm)


def why(said: str, issuers: Sequence[Issuer]) -> tuple[str, int]:
    with pytest.raises(TokenError) as caught:
        verify(said, issuers)
    return caught.value.reason, caught.value.status


TRUSTED = [issuer()]
GOOD = [*(token(name) for name in ALGORITHMS), token(sub="other"), token("ES256", sub="other")]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A good token with something changed in it: characters, their order, or parts of another good token."""
    said = draw(st.sampled_from(GOOD))
    place = draw(st.integers(0, len(said) - 1) | st.integers(len(said) - 4, len(said) - 1))
    kind = draw(st.sampled_from(["exchange", "leave out", "put in", "cut", "turn", "mix"]))
    if kind == "exchange":
        changed = said[:place] + draw(st.sampled_from(LETTERS)) + said[place + 1 :]
    elif kind == "leave out":
        changed = said[:place] + said[place + 1 :]
    elif kind == "put in":
        changed = said[:place] + draw(st.sampled_from(LETTERS + "=+/ \n\u20ac")) + said[place:]
    elif kind == "cut":
        changed = said[:place]
    elif kind == "turn":
        changed = said[:place] + said[place : place + 2][::-1] + said[place + 2 :]
    else:
        other = draw(st.sampled_from(GOOD))
        pairs = zip(said.split("."), other.split("."), strict=True)
        changed = ".".join(draw(st.sampled_from(pair)) for pair in pairs)
    return changed


@given(mutated())
@settings(max_examples=500, deadline=None)
def test_no_mutated_token_gets_in(said: str) -> None:
    if said in GOOD or not looks_like_jwt(said):
        return
    with pytest.raises((TokenError, UnknownKeyError)):
        verify(said, TRUSTED)


@given(st.text(LETTERS, max_size=80) | st.text(max_size=40) | st.from_regex(r"[\w-]{0,40}\.[\w-]{0,40}\.[\w-]{0,40}"))
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_without_ado(said: str) -> None:
    if looks_like_jwt(said):
        assert why(said, TRUSTED) == ("malformed", 401)


KEYS = ["hr-0123456789abcdef", "", "a.b", "a.b.c.d", "a..c", ".b.c", "a.b. c", "a.b.c=", "a.b.\n"]


@pytest.mark.parametrize("said", KEYS)
def test_what_has_not_the_form_of_a_token_is_a_key(said: str) -> None:
    assert not looks_like_jwt(said)
    assert checker(Metrics()).caller(digest_of(said), said) == digest_of(said)


def test_a_token_holds_until_it_ends_and_the_leeway_after_it() -> None:
    end = int(time.time()) + 100
    bearer = verify(token(exp=end), TRUSTED)
    assert bearer.tenant_at(end + 29.9) == "search"
    with pytest.raises(ApiError, match="has expired"):
        bearer.tenant_at(end + 30)


@pytest.mark.parametrize(
    ("path", "said", "tenant"),
    [
        ("team", {"team": "a"}, "a"),
        ("org.team", {"org": {"team": "a"}}, "a"),
        ("https://example.com/team", {"https://example.com/team": "a"}, "a"),
        ("org.team", {"org.team": "a", "org": {"team": "b"}}, "a"),
        ("org.team", {"org": "team"}, None),
        ("org.team", {"org": ["team"]}, None),
        ("team", {"team": ["a"]}, None),
        ("team", {"team": 7}, None),
        ("team", {"team": ""}, None),
        ("team", {}, None),
    ],
)
def test_the_tenant_is_the_text_at_the_end_of_its_claims_path(
    path: str, said: dict[str, Any], tenant: str | None
) -> None:
    of_path = [issuer(tenant_claim=path)]
    if tenant is None:
        assert why(token(**said), of_path) == ("tenant", 403)
    else:
        assert verify(token(**said), of_path).tenant == tenant


def test_a_token_without_a_key_id_is_by_the_only_key_there_is() -> None:
    said = signed(claims(ISSUER), "RS256", kid=None)
    assert verify(said, TRUSTED).tenant == "search"
    two = jwk_set(jwk("a", private_key("RS256")), jwk("b", private_key("RS256", 1)))
    assert why(said, [issuer(two)]) == ("unknown_key", 401)
    assert verify(said, [issuer(jwk_set(jwk(None, private_key("RS256"))))]).tenant == "search"


def test_an_algorithm_that_is_not_asked_for_is_not_taken_whatever_the_issuer_publishes() -> None:
    assert why(token("RS256"), [issuer(algorithms=["ES256"])]) == ("algorithm", 401)
    assert verify(token("ES256"), [issuer(algorithms=["ES256"])]).tenant == "search"


def kids(keys: Keys) -> dict[str, set[str]]:
    return {algorithm: set(signers) for algorithm, signers in keys.items()}


def test_only_what_can_check_signatures_is_taken_from_a_set_of_keys() -> None:
    key = private_key("RS256")
    small = rsa.generate_private_key(65537, 1024)
    body = jwk_set(
        jwk("good", key),
        jwk("for-encryption", key, use="enc"),
        jwk("to-sign", key, key_ops=["sign"]),
        jwk("of-another-algorithm", key, alg="PS256"),
        jwk("small", small),
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0"},
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0", "alg": "RS256"},
        {"kty": "RSA", "kid": "half", "n": "AQAB"},
        {"kty": "RSA", "kid": "none", "n": "!", "e": "AQAB"},
        {"kty": "OKP", "kid": "x", "crv": "X25519", "x": "AAAA"},
        {"kty": "new", "kid": "n"},
        {"kty": ["RSA"], "kid": 7},
        jwk("curve", private_key("ES384")),
    )
    assert kids(read_keys(body, ALGORITHMS, {})) == {"RS256": {"good"}}
    assert kids(read_keys(body, ["PS256"], {})) == {"PS256": {"good", "of-another-algorithm"}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JWK set"),
        (b"[]", "no JWK set"),
        (b'{"keys":{}}', "no JWK set"),
        (b"\xff", "no JWK set"),
        (b"[" * 100_000, "no JWK set"),
        (b'{"keys":[]}', "no key for RS256, ES256, EdDSA"),
        (jwk_set({"kty": "oct", "k": "AAAA"}), "no key for"),
        (jwk_set(*[jwk("RS256", private_key("RS256"))] * 101), "more than 100"),
    ],
)
def test_a_set_without_a_usable_key_is_an_error_and_withdraws_nothing(body: bytes, said: str) -> None:
    of_issuer = issuer()
    bearer = verify(token(), [of_issuer])
    with pytest.raises(KeySetError, match=said):
        of_issuer.take(body)
    assert bearer.tenant_at(time.time()) == "search"
    assert verify(token(jti="2"), [of_issuer]).tenant == "search"


def test_a_key_that_stays_is_the_same_and_one_that_goes_or_changes_is_withdrawn() -> None:
    before = read_keys(SET, ALGORITHMS, {})
    left = jwk_set(jwk("RS256", private_key("RS256")), jwk("ES256", private_key("ES256", 1)))
    after = read_keys(left, ALGORITHMS, before)
    assert after["RS256"]["RS256"] is before["RS256"]["RS256"]
    assert after["ES256"]["ES256"] is not before["ES256"]["ES256"]
    withdrawn = {name: signers[name].withdrawn for name, signers in before.items()}
    assert withdrawn == {"RS256": False, "ES256": True, "EdDSA": True}


def test_what_is_remembered_of_tokens_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_KNOWN", 3)
    monkeypatch.setattr(tokens, "MOST_REFUSED", 2)
    metrics = Metrics()
    remembering = checker(metrics)
    good = [token("EdDSA", jti=str(number)) for number in range(5)]
    bad = [token("EdDSA", jti=str(number), aud="x") for number in range(5)]
    for said in good:
        assert isinstance(remembering.caller(digest_of(said), said), Bearer)
    for said in bad:
        assert isinstance(remembering.caller(digest_of(said), said), Refused)
    assert (len(remembering._known), len(remembering._refused)) == (3, 2)
    for said in (*good[2:], *bad[3:]):
        remembering.caller(digest_of(said), said)
    assert metrics.jwt_checks.values == {("accepted",): 5, ("audience",): 5}


def test_a_refusal_is_forgotten_after_a_while_and_when_keys_come() -> None:
    metrics = Metrics()
    remembering = checker(metrics)
    said = signed(claims(ISSUER), "RS256", private_key("RS256", 1), kid="RS256")
    digest = digest_of(said)
    assert isinstance(remembering.caller(digest, said), Refused)
    remembering._refused[digest] = Refused(401, "", time.monotonic() - 1)
    remembering.caller(digest, said)
    assert metrics.jwt_checks.values["signature",] == 2
    remembering._issuers[0].take(jwk_set(jwk("RS256", private_key("RS256", 1))))
    assert isinstance(remembering.caller(digest, said), Bearer)


def test_a_token_that_comes_too_early_is_taken_the_moment_it_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    remembering = checker(Metrics(), leeway="1ms")
    said = token(nbf=int(time.time()) + 1)
    assert isinstance(remembering.caller(digest_of(said), said), Refused)
    time.sleep(1.1)
    assert isinstance(remembering.caller(digest_of(said), said), Bearer)


FILE = """
fleet: demo
pools: {p: {protocol: openai, model: m, endpoints: [{id: a, http: "http://127.0.0.1:1"}]}}
routes: {r: {pool: p}}
tenants: {search: {}}
gateway:
  auth:
    jwt:
      - {issuer: "https://login.example.com", audience: headrace}
"""


def test_with_an_issuer_tenants_need_no_keys() -> None:
    reading = read_fleet(FILE)
    assert (reading.problems, reading.warnings) == ([], [])
    assert reading.fleet is not None
    (only,) = reading.fleet.gateway.auth.jwt
    assert (only.tenant_claim, only.algorithms, only.leeway) == ("sub", ["RS256", "ES256", "EdDSA"], "30s")


JWT = "gateway.auth.jwt[0]"


@pytest.mark.parametrize(
    ("old", "new", "path", "words"),
    [
        ("audience: headrace", "", f"{JWT}.audience", "is missing"),
        ("headrace}", '""}', f"{JWT}.audience", "is empty"),
        ("headrace}", "headrace, algorithms: []}", f"{JWT}.algorithms", "is empty: no token would be taken"),
        ("headrace}", "headrace, algorithms: [HS256]}", f"{JWT}.algorithms[0]", "'HS256' is not one of "),
        ("headrace}", "headrace, algorithms: [none]}", f"{JWT}.algorithms[0]", "'none' is not one of"),
        ("https://login.example.com", "login.example.com", f"{JWT}.issuer", "expected an https:// URL"),
        ("https://login.example.com", "https://user@login.example.com", f"{JWT}.issuer", "without user name"),
        ("https://login.example.com", "https://login.example.com:99999", f"{JWT}.issuer", "port 99999 is not between"),
        (
            "headrace}",
            'headrace}\n      - {issuer: "https://login.example.com", audience: headrace}',
            "gateway.auth.jwt[1].audience",
            "are jwt[0]'s already",
        ),
    ],
)
def test_a_mistake_in_an_issuer_is_named(old: str, new: str, path: str, words: str) -> None:
    (problem,) = read_fleet(FILE.replace(old, new)).problems
    assert (problem.path, words in problem.message) == (path, True), problem.message


@pytest.mark.parametrize(
    ("old", "new", "path", "words"),
    [
        ("https://login", "http://login", f"{JWT}.issuer", "over plain http://"),
        ("headrace}", 'headrace, jwks: "http://10.0.0.1/keys?p=1"}', f"{JWT}.jwks", "over plain http://"),
        ("tenants: {search: {}}", "", "gateway", "list the `tenants` that tokens may name"),
    ],
)
def test_what_is_dangerous_or_useless_about_an_issuer_is_a_warning(old: str, new: str, path: str, words: str) -> None:
    (warning,) = read_fleet(FILE.replace(old, new)).warnings
    assert (warning.path, words in warning.message) == (path, True), warning.message


@pytest.mark.parametrize("url", ["http://127.0.0.1:5556/dex", "http://localhost/dex", "http://[::1]:5556"])
def test_plain_http_on_the_same_machine_is_nothing_to_warn_of(url: str) -> None:
    assert read_fleet(FILE.replace("https://login.example.com", url)).warnings == []
