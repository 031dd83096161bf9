"""Keys, tenants and what each of them sees of a fleet."""

from datetime import UTC, date, datetime, timedelta
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access import Access
from gateway.fleet import LiveFleet
from gateway.metrics import Metrics
from router.admission.limits import Limits, TenantLimits
from router.errors import ApiError
from router.fleet import FleetView, compile_view
from router.merge import merge
from router.prompt import isolate, read_fields, read_prompt
from router.spec.documents import Document, Source, file_documents
from router.spec.fleet import EndpointSpec, FleetSpec, KeySpec, LimitSpec, PoolSpec, RouteSpec, TenantSpec
from router.spec.strict import read_fleet
from router.tenants import digest_of, index_keys, is_own_salt, own_salt

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
ONE, TWO = sha256(b"one").hexdigest(), sha256(b"two").hexdigest()
FILE = f"""\
fleet: demo
pools: {{p: {{protocol: openai, model: m, endpoints: [{{id: a, http: "http://h:1"}}]}}}}
routes: {{r: {{pool: p}}, s: {{pool: p}}}}
tenants:
  search:
    keys:
      - {{sha256: "{ONE}", name: old, expires: 2027-01-31}}
      - {{sha256: "{TWO}"}}
    routes: [r]
"""


def hashed(key: str, expires: str | None = None) -> KeySpec:
    return KeySpec(sha256=sha256(key.encode()).hexdigest(), expires=expires)


def fleet(**tenants: TenantSpec) -> FleetSpec:
    pool = PoolSpec(protocol="openai", model="m", endpoints=[EndpointSpec(id="a", http="http://h:1")])
    routes = {"r": RouteSpec(pool="p"), "s": RouteSpec(pool="p")}
    return FleetSpec(fleet="demo", pools={"p": pool}, routes=routes, tenants=tenants)


def view_of(**tenants: TenantSpec) -> FleetView:
    return compile_view(merge(file_documents(fleet(**tenants), content_hash="h")), FleetView())


def refusal(view: FleetView, key: str, now: float = NOW) -> ApiError:
    with pytest.raises(ApiError) as caught:
        view.keys.tenant_of(digest_of(key), now)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert key not in caught.value.message
    return caught.value


def test_any_number_of_keys_lead_to_their_tenant_and_no_other_does() -> None:
    view = view_of(one=TenantSpec(keys=[hashed("k1"), hashed("k2")]), two=TenantSpec(keys=[hashed("k3")]))
    assert [view.keys.tenant_of(digest_of(key), NOW) for key in ("k1", "k2", "k3")] == ["one", "one", "two"]
    assert "not known" in refusal(view, "k4").message
    refusal(view, hashed("k1").sha256)  # the hash in the file is no key


@given(st.dates(date(1971, 1, 1), date(9999, 12, 30)))
def test_a_key_is_taken_through_its_last_day_and_then_no_more(last: date) -> None:
    index, problems = index_keys({"t": TenantSpec(keys=[hashed("k", last.isoformat())])})
    end = datetime(last.year, last.month, last.day, tzinfo=UTC) + timedelta(days=1)
    assert index.tenant_of(digest_of("k"), end.timestamp() - 0.001) == "t"
    with pytest.raises(ApiError, match="expired"):
        index.tenant_of(digest_of("k"), end.timestamp())
    assert problems == []


def test_a_key_that_expires_on_no_day_is_not_taken() -> None:
    view = view_of(t=TenantSpec(keys=[hashed("hr-k", "2027-02-30")]))
    refusal(view, "hr-k")
    assert any("tenant t: " in problem and "calendar" in problem for problem in view.problems)


def test_a_key_of_two_tenants_is_taken_for_neither_and_a_problem_names_both() -> None:
    view = view_of(one=TenantSpec(keys=[hashed("hr-k"), hashed("own")]), two=TenantSpec(keys=[hashed("hr-k")]))
    refusal(view, "hr-k")
    assert view.keys.tenant_of(digest_of("own"), NOW) == "one"
    (problem,) = view.problems
    assert "tenant two: " in problem and "tenant one's" in problem


def test_a_tenant_sees_the_routes_it_may_call_and_no_others() -> None:
    view = view_of(some=TenantSpec(keys=[hashed("k")], routes=["r"]), every=TenantSpec(keys=[hashed("l")]))
    assert set(view.tenants["some"].routes) == {"r"}
    assert set(view.tenants["every"].routes) == {"r", "s"} == set(view.routes)
    with pytest.raises(ApiError) as caught:
        view.tenants["some"].route("s")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert caught.value.message.endswith("Routes: r.")


def test_a_tenant_whose_only_route_is_gone_may_call_nothing() -> None:
    view = view_of(t=TenantSpec(keys=[hashed("k")], routes=["gone"]))
    assert view.tenants["t"].routes == {}
    assert view.problems == ("tenant t: there is no route 'gone'",)


def test_tenants_are_documents_with_sources_and_overlays_like_the_others() -> None:
    def document(source: Source, spec: TenantSpec) -> Document:
        raw = msgspec.Raw(msgspec.json.encode(spec))
        return Document(family="tenants", id="t", source=source, generation=1, spec=raw)

    of_file = file_documents(fleet(t=TenantSpec(keys=[hashed("old")], routes=["r"])), content_hash="h")
    merged = merge([*of_file, document("cli", TenantSpec(keys=[hashed("new")]))])
    assert merged.tenants["t"] == TenantSpec(keys=[hashed("new")], routes=["r"])
    assert merged.sources["tenants", "t"] == ("file", "cli")
    unusable = msgspec.structs.replace(document("cli", TenantSpec()), spec=msgspec.Raw(b'{"keys":[{"sha256":"x"}]}'))
    broken = merge([*of_file, unusable])
    assert broken.tenants == {}, "what cannot be read lets nobody in"
    assert "tenant t (from file, cli) is left out" in broken.problems[0]


def test_a_file_with_tenants_is_read_whole() -> None:
    reading = read_fleet(FILE)
    assert (reading.problems, reading.warnings) == ([], [])
    assert reading.fleet is not None
    assert reading.fleet.tenants["search"].keys[0].expires == "2027-01-31"


@pytest.mark.parametrize(
    ("old", "new", "path", "message"),
    [
        (TWO, "hr-secret", "keys[1].sha256", "never the key itself"),
        (TWO, TWO.upper(), "keys[1].sha256", "lower case"),
        (TWO, ONE, "keys[1].sha256", "listed twice"),
        ("2027-01-31", "2027-02-29", "keys[0].expires", "2027-02-29 is in no calendar"),
        ("2027-01-31", "31.1.2027", "keys[0].expires", "'31.1.2027' is not a day: write it like 2027-01-31"),
    ],
)
def test_a_mistake_in_a_tenant_is_named_and_quotes_no_key(old: str, new: str, path: str, message: str) -> None:
    (problem,) = read_fleet(FILE.replace(old, new)).problems
    assert problem.path == f"tenants.search.{path}"
    assert message in problem.message
    assert "secret" not in problem.message


def test_a_key_of_two_tenants_in_one_file_is_an_error_that_names_the_other() -> None:
    other = f'  other: {{keys: [{{sha256: "{TWO}"}}]}}\n'
    (problem,) = read_fleet(FILE + other).problems
    assert (problem.path, problem.message) == ("tenants.other.keys[0].sha256", "this key is tenant search's already")


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        (FILE.replace("routes: [r]", "routes: [rr]"), "tenants.search.routes[0]", "no route is named rr"),
        (FILE + "  idle: {routes: [r]}\n", "tenants.idle", "no keys: nobody can call"),
        (FILE.partition("tenants:")[0], "gateway", "nobody may call it"),
    ],
)
def test_who_could_call_nothing_is_a_warning(text: str, path: str, words: str) -> None:
    reading = read_fleet(text)
    assert reading.fleet is not None
    (warning,) = reading.warnings
    assert (warning.path, words in warning.message) == (path, True)


def test_whoever_lets_everybody_in_needs_no_tenants() -> None:
    text = FILE.partition("tenants:")[0] + "gateway: {auth: {anonymous: allow}}\n"
    assert read_fleet(text).warnings == []


def test_callers_without_a_key_get_what_the_tenant_anonymous_may_where_they_may_call() -> None:
    limited = LimitSpec(requests_per_minute=60)
    live = LiveFleet(Metrics())
    live.view = view_of(anonymous=TenantSpec(routes=["r"], limits=limited))
    allowing, denying = (Access(live, None, anonymous=anonymous) for anonymous in (True, False))
    for headers in ({}, {"x-api-key": "any"}):  # there is nobody whose key it could be
        seen = allowing.view(allowing.caller(headers))
        assert (seen.tenant, list(seen.routes)) == ("anonymous", ["r"])
        assert seen.limits is not None and seen.limits.whole is not None and seen.limits.whole.requests == 60
        with pytest.raises(ApiError, match=r"needs an API key|not known"):
            denying.view(denying.caller(headers))
    live.view = view_of(anonymous=TenantSpec(), other=TenantSpec(keys=[hashed("k")]))
    assert allowing.view(allowing.caller({})).tenant == "anonymous"
    assert allowing.view(allowing.caller({"x-api-key": "k"})).tenant == "other"
    with pytest.raises(ApiError, match="not known"):
        allowing.view(allowing.caller({"x-api-key": "any"}))


def test_a_tenant_anonymous_that_nobody_can_be_is_a_warning() -> None:
    text = "fleet: f\ntenants: {anonymous: {}}\ngateway: {auth: {anonymous: %s}}\n"
    said = {one: [w.message for w in read_fleet(text % one).warnings if w.path] for one in ("allow", "deny")}
    assert said == {"allow": [], "deny": ["has no effect: `gateway.auth.anonymous` denies callers without a key"]}


def chat(salt: str | None, tenants_salt: str) -> tuple[object, int]:
    body: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    fields = read_fields(msgspec.json.encode(body if salt is None else {**body, "cache_salt": salt}))
    isolate(fields, tenants_salt)
    sent = msgspec.json.decode(fields["cache_salt"]) if "cache_salt" in fields else None
    return sent, read_prompt("chat.completions", fields).seed


name = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,10}", fullmatch=True)
salts = st.none() | st.text(max_size=12)


@given(name, name, salts, salts)
def test_isolated_tenants_never_share_a_salt_whatever_their_clients_choose(
    one: str, two: str, salt: str | None, other: str | None
) -> None:
    mine, theirs = chat(salt, own_salt(one)), chat(other, own_salt(two))
    assert (mine == theirs) == (one == two and (salt or "") == (other or ""))


def test_who_is_not_isolated_has_the_salt_that_it_chose_but_none_of_a_tenants() -> None:
    assert chat(None, "")[0] is None
    assert chat("mine", "")[0] == "mine"
    stolen, _ = chat("mine", own_salt("search"))
    assert is_own_salt(str(stolen))
    with pytest.raises(ApiError) as caught:
        chat(str(stolen), "")
    assert (caught.value.status, caught.value.param) == (400, "cache_salt")


def test_limits_are_those_of_the_tenant_and_of_its_routes_and_none_cost_nothing() -> None:
    few, none = LimitSpec(prompt_tokens_per_minute=5), LimitSpec()
    view = view_of(
        whole=TenantSpec(keys=[hashed("1")], limits=LimitSpec(requests_per_minute=60, streams=2)),
        routed=TenantSpec(keys=[hashed("2")], route_limits={"r": few, "s": none}),
        free=TenantSpec(keys=[hashed("3")]),
    )
    found = {name: tenant.limits for name, tenant in view.tenants.items()}
    assert found == {
        "whole": TenantLimits("whole", Limits(requests=60, streams=2), {}),
        "routed": TenantLimits("routed", None, {"r": Limits(prompt_tokens=5)}),
        "free": None,
    }


def test_a_limit_on_a_route_that_is_not_there_or_not_to_be_called_is_a_warning() -> None:
    limits = "    route_limits: {t: {streams: 1}, s: {streams: 1}, r: {streams: 1}}\n"
    reading = read_fleet(FILE + limits)
    assert reading.problems == []
    assert [(found.path, found.message) for found in reading.warnings] == [
        ("tenants.search.route_limits.t", "no route is named t"),
        ("tenants.search.route_limits.s", "the tenant may not call this route"),
    ]
