"""Tokens for engines: where they come from, when they are looked at again, and that they are in no message."""

from pathlib import Path

import pytest

from gateway.credentials import Credentials
from gateway.upstream.base import UpstreamError
from headrace.config import load_fleet
from router.fleet import Endpoint, EndpointState, Pool
from router.spec.documents import EndpointFields
from router.spec.fleet import PoolSpec, ReplaceSpec, SecretSpec
from router.spec.strict import read_fleet

ENDPOINT = Endpoint("a", "p", EndpointFields(id="a", pool="p"), EndpointState(), b"a")


def pool(secret: SecretSpec | None = None) -> Pool:
    spec = PoolSpec(protocol="openai", model="m", credentials=ReplaceSpec(replace=secret) if secret else "none")
    return Pool.of("p", spec, ())


def sent(credentials: Credentials, pool: Pool) -> str:
    ((name, value),) = credentials.of(pool.spec, ENDPOINT, "Bearer clients")
    assert credentials.own(pool.spec) == ((name, value),)
    assert name == "authorization"
    return value


def test_a_file_is_read_again_when_it_changes_and_not_used_when_it_is_gone(tmp_path: Path) -> None:
    file, credentials = tmp_path / "token", Credentials()
    there = pool(SecretSpec(file=str(file)))
    assert "No such file" in str(credentials.refresh(there))
    file.write_text("first\n")
    assert credentials.refresh(there) is None
    assert sent(credentials, there) == "Bearer first"
    (tmp_path / "next").write_text("second\n")
    (tmp_path / "next").replace(file)  # as Kubernetes and careful people do it
    assert credentials.refresh(there) is None
    assert sent(credentials, there) == "Bearer second"
    file.unlink()
    assert str(file) in str(credentials.refresh(there))
    assert credentials.own(there.spec) == ()
    with pytest.raises(UpstreamError) as caught:
        credentials.of(there.spec, ENDPOINT, "Bearer clients")
    assert (caught.value.status, caught.value.code) == (503, "no_credentials")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"two words", b"line\nline", b"caf\xc3\xa9", b"a\x00b", b"x" * 20_000 + b" y"]
)
def test_what_could_not_be_sent_is_no_token_and_is_not_quoted(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    why = Credentials().refresh(pool(SecretSpec(file=str(tmp_path / "token"))))
    if len(content) > 16_384:
        assert why is None or "x" * 10 not in why
    else:
        assert why is not None and "holds no token" in why
        assert not content.strip() or content.decode("latin-1").strip() not in why


def test_a_variable_is_taken_but_none_of_the_gateways_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_TOKEN", "sesame")
    monkeypatch.setenv("HEADRACE_ADMIN_TOKEN", "admin-secret")
    credentials = Credentials()
    assert credentials.refresh(pool(SecretSpec(env="ENGINE_TOKEN"))) is None
    assert sent(credentials, pool(SecretSpec(env="ENGINE_TOKEN"))) == "Bearer sesame"
    for name, said in (("HEADRACE_ADMIN_TOKEN", "the gateway's own"), ("NO_SUCH_VARIABLE", "no variable")):
        why = credentials.refresh(pool(SecretSpec(env=name)))
        assert why is not None and said in why and "admin-secret" not in why
        assert credentials.own(pool(SecretSpec(env=name)).spec) == ()


def test_nothing_goes_to_an_engine_by_default() -> None:
    credentials = Credentials()
    assert credentials.refresh(pool()) is None
    assert credentials.of(pool().spec, ENDPOINT, "Bearer clients") == ()
    assert credentials.own(pool().spec) == ()


FILE = """\
fleet: demo
pools: {p: {protocol: openai, model: m, credentials: none, endpoints: [{id: a, http: "http://h:1"}]}}
routes: {r: {pool: p}}
gateway: {auth: {anonymous: allow}}
"""


@pytest.mark.parametrize(
    ("written", "path", "message"),
    [
        ("nothing", "credentials", "'nothing' is not one of"),
        ("[none]", "credentials", "expected a string, found a list"),
        ("{replace: {}}", "credentials.replace", "needs `env` or `file`"),
        ("{replace: {env: A, file: b}}", "credentials.replace", "has both `env` and `file`; keep one"),
        ("{replace: sesame}", "credentials.replace", "expected a mapping, found a string"),
        ("{forward: true}", "credentials.forward", "unknown key"),
    ],
)
def test_a_mistake_is_named_where_it_stands(written: str, path: str, message: str) -> None:
    found = read_fleet(FILE.replace("credentials: none", f"credentials: {written}")).problems
    assert any(one.path == f"pools.p.{path}" and message in one.message for one in found), found
    assert all("sesame" not in one.message for one in found)


def test_a_path_is_published_as_an_absolute_one_and_its_file_never(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    file = tmp_path / "fleet.yaml"
    file.write_text(FILE.replace("credentials: none", "credentials: {replace: {file: token}}"))
    spec = load_fleet(file, {}).spec
    assert spec.pools["p"].credentials == ReplaceSpec(replace=SecretSpec(file=str(tmp_path / "token")))
    assert "sesame" not in repr(spec)
