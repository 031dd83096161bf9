"""Certificates made by openssl, and what clients need to trust them."""

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["ec", "rsa"]

_NEW_KEY = {"ec": ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"), "rsa": ("rsa:2048",)}
_DATED = """\
[ca]
default_ca = it
[it]
database = {folder}/index.txt
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = names
unique_subject = no
[any]
commonName = supplied
[names]
subjectAltName = IP:127.0.0.1
"""


@dataclass(frozen=True)
class Made:
    """A certificate and its key."""

    cert: Path
    key: Path

    def client(self, own: "Made | None" = None) -> ssl.SSLContext:
        """Of a client that trusts this certificate, and shows its `own`."""
        context = ssl.create_default_context(cafile=str(self.cert))
        if own is not None:
            context.load_cert_chain(own.cert, own.key)
        return context


def make(folder: Path, name: str = "server", kind: Kind = "ec", issuer: Made | None = None) -> Made:
    """A certificate for 127.0.0.1, by `issuer` or by itself, in place of one of the same name."""
    made = Made(folder / f"{name}.pem", folder / f"{name}.key")
    signed = ("-CA", str(issuer.cert), "-CAkey", str(issuer.key)) if issuer is not None else ()
    _openssl(
        *("req", "-x509", "-newkey", *_NEW_KEY[kind], "-nodes", "-days", "30", "-subj", f"/CN={name}"),
        *("-addext", "subjectAltName=IP:127.0.0.1", *signed, "-keyout", str(made.key), "-out", str(made.cert)),
    )
    return made


def expired(folder: Path) -> Made:
    """A certificate that was good in January 2020."""
    made = Made(folder / "expired.pem", folder / "expired.key")
    request, settings = folder / "expired.csr", folder / "ca.conf"
    settings.write_text(_DATED.format(folder=folder))
    (folder / "index.txt").touch()
    _openssl(
        *("req", "-new", "-newkey", *_NEW_KEY["ec"], "-nodes", "-subj", "/CN=expired"),
        *("-keyout", str(made.key), "-out", str(request)),
    )
    _openssl(
        *("ca", "-batch", "-selfsign", "-notext", "-config", str(settings), "-in", str(request)),
        *("-keyfile", str(made.key), "-startdate", "20200101000000Z", "-enddate", "20200201000000Z"),
        *("-out", str(made.cert)),
    )
    return made


def encrypted(made: Made) -> Path:
    """The certificate's key behind a password."""
    path = made.key.with_suffix(".locked")
    _openssl("pkey", "-in", str(made.key), "-aes256", "-passout", "pass:secret", "-out", str(path))
    return path


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
