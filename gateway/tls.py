"""Certificates of the listening addresses, and how a changed one comes into force.

The files are looked at every few seconds; what changed is read whole, tried, and then used for every connection that
begins from then on. What cannot be used (half-written, a key that fits another certificate) is told once, the last good
one stays, and it is tried again until it can be. Each certificate gets a context of its own instead of being loaded
into the one there is: OpenSSL would keep the old one beside it if its key is of another kind, and half of the new one
if the other half cannot be used.

Spoken are TLS 1.2 and 1.3, for HTTP/1.1. Of TLS 1.2 only suites with forward secrecy and authenticated encryption are
left, since what Python brings along depends on who has built it; of TLS 1.3 all are of that kind.
"""

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from router.spec.gateway import AdminTlsSpec, TlsSpec

HANDSHAKE_S = 10.0
"""How long a client may take to shake hands."""
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Suites of TLS 1.2, in OpenSSL's notation."""
_NOT_A_PAIR = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""What OpenSSL says of a key that is another certificate's, the last two if it is of another kind."""
_LOOK_EVERY_S = 5.0
_MOST_BYTES = 1024 * 1024
_WARN_DAYS = 14
_DAY_S = 86_400.0
_MARKS = {"cert": b"-----BEGIN CERTIFICATE-----", "key": b"PRIVATE KEY-----"}
"""What a file of PEM blocks holds at least."""

logger = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]


class CertificateError(Exception):
    """A certificate that cannot be used. The message is the end of a sentence, and quotes nothing of the files."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"`{field}`: {message}")


class Pem(NamedTuple):
    """The content of a certificate's files."""

    cert: bytes
    key: bytes
    client_ca: bytes | None


class Certificate:
    """A certificate, its key and the authorities of its clients, as the files are now."""

    def __init__(self, spec: TlsSpec) -> None:
        """Raises CertificateError."""
        self._files = {"cert": Path(spec.cert), "key": Path(spec.key)}
        if isinstance(spec, AdminTlsSpec) and spec.client_ca is not None:
            self._files["client_ca"] = Path(spec.client_ca)
        self._used, self.pem = self._read()
        self._refusal = ""
        """Why what is there now cannot be used, once that has been told."""
        self._warned = 0.0
        self.context = _Latest(_context(self.pem))
        """For servers: every connection is of the certificate that is the latest when it begins."""
        self._warn_of_end()

    async def follow(self) -> None:
        """Take over what changes, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Take over what has changed."""
        try:
            if self._stamp() != self._used:
                used, pem = self._read()
                self.context.latest = _context(pem)
                self._used, self.pem, self._warned = used, pem, 0.0
                logger.info("%s has changed: new connections get the new certificate", self._files["cert"])
            self._refusal = ""
        except CertificateError as error:
            if self._refusal != (refusal := str(error)):
                self._refusal = refusal
                logger.warning("a changed certificate cannot be used, the last one stays in force: %s", refusal)
        self._warn_of_end()

    def _warn_of_end(self) -> None:
        """Say, once a day, that the certificate has expired or will soon."""
        with contextlib.suppress(ValueError, IndexError):  # what cannot be read does not matter to who serves it
            left = not_after(self.pem.cert) - time.time()
            if left < _WARN_DAYS * _DAY_S and time.monotonic() >= self._warned:
                self._warned = time.monotonic() + _DAY_S
                when = f"expires in {left / _DAY_S:.1f} days" if left > 0 else "has expired: clients refuse it"
                logger.warning("the certificate %s %s", self._files["cert"], when)

    def _stamp(self) -> _Stamp:
        stamps = []
        for field, path in self._files.items():
            try:
                known = path.stat()
            except OSError as error:
                raise CertificateError(field, f"{path}: {(error.strerror or str(error)).lower()}") from None
            stamps.append((known.st_mtime_ns, known.st_ino, known.st_size))
        return tuple(stamps)

    def _read(self) -> tuple[_Stamp, Pem]:
        """The files, and what they will be known by. Raises CertificateError."""
        stamp = self._stamp()  # before: what changes while it is read is read again
        read: dict[str, bytes] = {}
        for field, path in self._files.items():
            try:
                with path.open("rb") as file:
                    read[field] = file.read(_MOST_BYTES)
            except OSError as error:
                raise CertificateError(field, f"{path}: {(error.strerror or str(error)).lower()}") from None
            mark = _MARKS.get(field, _MARKS["cert"])
            if mark not in read[field]:
                what = "private key" if field == "key" else "certificate"
                raise CertificateError(field, f"{path} holds no {what} in PEM")
        return stamp, Pem(read["cert"], read["key"], read.get("client_ca"))


class _Latest(ssl.SSLContext):
    """The context of a listening socket, which stays, over those of its certificates, which come and go. Event loops
    make a connection by `wrap_bio` and ask nothing else of it."""

    latest: ssl.SSLContext

    def __new__(cls, _: ssl.SSLContext) -> "_Latest":
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, latest: ssl.SSLContext) -> None:
        self.latest = latest

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.latest.wrap_bio(*args, **options)


def _context(pem: Pem) -> ssl.SSLContext:
    """Raises CertificateError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        with _as_file(pem.cert) as cert, _as_file(pem.key) as key:
            context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason in _NOT_A_PAIR:
            raise CertificateError("key", "the key is not that of the certificate") from None
        raise CertificateError("cert", f"OpenSSL cannot use it with its key ({error.reason or 'no reason'})") from None
    if pem.client_ca is not None:
        try:
            context.load_verify_locations(cadata=pem.client_ca.decode("ascii", "replace"))
        except ssl.SSLError as error:
            raise CertificateError("client_ca", f"OpenSSL cannot use it ({error.reason or 'no reason'})") from None
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _no_password() -> str:
    """OpenSSL would ask the terminal."""
    raise CertificateError("key", "the key is encrypted, and the gateway has no password for it")


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path of `data`, which Python has its contexts read by OpenSSL: in memory, so that certificate and key are those
    that were read together, and the key is on no disk."""
    descriptor = os.memfd_create("pem")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def not_after(cert: bytes) -> float:
    """The Unix time at which the first certificate in `cert`, PEM, expires (RFC 5280, section 4.1). Raises ValueError
    or IndexError for what cannot be read."""
    text = cert[cert.index(_MARKS["cert"]) :].decode("ascii")
    end = "-----END CERTIFICATE-----"
    der = ssl.PEM_cert_to_DER_cert(text[: text.index(end) + len(end)])
    _, at, _ = _element(der, 0)  # Certificate
    _, at, _ = _element(der, at)  # TBSCertificate
    tag, _, end_of_version = _element(der, at)
    if tag == 0xA0:
        at = end_of_version
    for _ in range(3):  # serialNumber, signature, issuer
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)  # Validity
    _, _, at = _element(der, at)  # notBefore
    tag, at, end_of_time = _element(der, at)
    form = "%y%m%d%H%M%SZ" if tag == 0x17 else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[at:end_of_time].decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag, beginning and end of the content of the DER element at `at`."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[at + 2 : begin])
    return tag, begin, begin + length
