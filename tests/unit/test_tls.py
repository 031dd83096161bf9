"""Certificates are followed as their files change, and never used by halves."""

import contextlib
import ssl
from pathlib import Path

import pytest

from gateway.tls import Certificate, CertificateError, not_after
from router.spec.gateway import AdminTlsSpec, TlsSpec
from tests.certificates import Kind, Made, encrypted, expired, make


def certificate_of(made: Made) -> Certificate:
    return Certificate(TlsSpec(cert=str(made.cert), key=str(made.key)))


def shake_hands(server: Certificate, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Client and server over one another, without a network. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    there = server.context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (here, there):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return here, there


def serial(made: Made) -> str:
    here, _ = shake_hands(certificate_of(made), made.client())
    shown = here.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


def served(server: Certificate, client: ssl.SSLContext) -> str:
    shown = shake_hands(server, client)[0].getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


@pytest.mark.parametrize("kinds", [("ec", "ec"), ("rsa", "ec"), ("ec", "rsa")])
def test_a_changed_certificate_is_served_alone_whatever_its_kind(tmp_path: Path, kinds: tuple[Kind, Kind]) -> None:
    before = make(tmp_path, kind=kinds[0])
    server, old_client, old = certificate_of(before), before.client(), serial(before)
    assert served(server, old_client) == old
    after = make(tmp_path, kind=kinds[1])
    server.look()
    assert served(server, after.client()) == serial(after) != old
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, old_client)


def test_what_cannot_be_used_is_told_once_and_the_last_certificate_stays_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(tmp_path)
    server, client, old = certificate_of(made), made.client(), serial(made)
    key = made.key.read_bytes()
    make(tmp_path)
    made.key.write_bytes(key)  # of the certificate before
    for _ in range(3):
        server.look()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the key is not that of the certificate" in caplog.text
    assert served(server, client) == old
    made.cert.unlink()
    server.look()
    assert served(server, client) == old
    new = make(tmp_path)
    server.look()
    assert served(server, new.client()) == serial(new)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_versions_and_suites_with_weaknesses_are_not_spoken(tmp_path: Path) -> None:
    made = make(tmp_path, kind="rsa")
    server = certificate_of(made)
    for suite in ("AES128-GCM-SHA256", "ECDHE-RSA-AES128-SHA256"):
        client = made.client()
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        client.set_ciphers(suite)
        with pytest.raises(ssl.SSLError):
            shake_hands(server, client)
    client = made.client()
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client)
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        client = made.client()
        client.minimum_version = client.maximum_version = version
        client.set_alpn_protocols(["h2", "http/1.1"])
        here, _ = shake_hands(server, client)
        assert here.selected_alpn_protocol() == "http/1.1"


def test_a_certificate_that_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path) -> None:
    made, other, kind = make(tmp_path), make(tmp_path, "other"), make(tmp_path, "kind", "rsa")
    garbage, broken = tmp_path / "garbage", tmp_path / "broken"
    garbage.write_bytes(b"\xff secret")
    broken.write_text("-----BEGIN CERTIFICATE-----\nsecret\n-----END CERTIFICATE-----\n")
    cases = {
        (tmp_path / "none", made.key): r"`cert`: .*/none: no such file or directory",
        (made.cert, tmp_path): r"`key`: .*: is a directory",
        (garbage, made.key): r"`cert`: .* holds no certificate in PEM",
        (made.cert, garbage): r"`key`: .* holds no private key in PEM",
        (broken, made.key): r"`cert`: OpenSSL cannot use it with its key",
        (made.cert, other.key): r"`key`: the key is not that of the certificate",
        (made.cert, kind.key): r"`key`: the key is not that of the certificate",
        (kind.cert, made.key): r"`key`: the key is not that of the certificate",
        (made.cert, encrypted(made)): r"`key`: the key is encrypted, and the gateway has no password for it",
    }
    for (cert, key), told in cases.items():
        with pytest.raises(CertificateError, match=told) as caught:
            certificate_of(Made(cert, key))
        assert "secret" not in str(caught.value)
    with pytest.raises(CertificateError, match="`client_ca`: OpenSSL cannot use it"):
        Certificate(AdminTlsSpec(cert=str(made.cert), key=str(made.key), client_ca=str(broken)))


def test_a_certificate_that_has_expired_is_served_with_a_warning_once_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = expired(tmp_path)
    server = certificate_of(made)
    server.look()
    assert [record.message for record in caplog.records] == [
        f"the certificate {made.cert} has expired: clients refuse it"
    ]
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(server, made.client())


def test_the_end_of_a_certificate_is_read_as_others_read_it(tmp_path: Path) -> None:
    for made in (make(tmp_path), make(tmp_path, "rsa", "rsa"), expired(tmp_path)):
        decoded = ssl._ssl._test_decode_cert(str(made.cert))  # type: ignore[attr-defined]
        assert not_after(made.cert.read_bytes()) == ssl.cert_time_to_seconds(decoded["notAfter"])


def test_reading_a_certificate_leaves_no_file_open(tmp_path: Path) -> None:
    made = make(tmp_path)
    before = len([*Path("/proc/self/fd").iterdir()])
    servers = [certificate_of(made) for _ in range(10)]
    for server in servers:
        server._used = ()
        server.look()
    assert len([*Path("/proc/self/fd").iterdir()]) == before
