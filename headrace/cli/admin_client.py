"""Calls to a gateway's admin API from the command line.

The commands talk to the admin API and never to Redis, so they work from wherever the admin port can be reached and
obey the rules the gateway sets. Whatever goes wrong becomes one sentence (`AdminError`) that says what to do.
"""

import contextlib
import json
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection, RemoteDisconnected
from typing import Annotated, Any
from urllib.parse import quote, unquote, urlsplit

import typer
from typer.core import TyperGroup

from gateway.admin import MISSING_TOKEN, TOKEN_HEADER, UNKNOWN_NAMES, WRONG_TOKEN

TIMEOUT_S = 10.0
TOKEN_HINTS = {
    MISSING_TOKEN: " Give it with --admin-token or HEADRACE_ADMIN_TOKEN.",
    WRONG_TOKEN: " Check --admin-token or HEADRACE_ADMIN_TOKEN.",
}
_POLICY_HINT = "a network policy must let the API server reach the admin port (`network.admin` of the chart)"
_CLUSTER_HINTS = {
    403: "; it takes the verbs get, to look, and create, to drain, on services/proxy",
    503: f"; a gateway must be ready, and {_POLICY_HINT}",
}
_TLS_HINT = ", with https:// if it has a certificate"
DEFAULT_ADMIN = "http://127.0.0.1:9090"
UNIX_SCHEME = "http+unix"
"""Of URLs whose host is the escaped path of a socket: of kubectl's proxy, so what is behind it is in a cluster."""
CA, CERT = "HEADRACE_ADMIN_CA", "HEADRACE_ADMIN_CERT"
"""Variables that name files in PEM: of the authorities whose gateways are trusted instead of the system's, and of a
client certificate with its key."""

AdminOption = Annotated[
    str,
    typer.Option(
        "--admin",
        envvar="HEADRACE_ADMIN",
        metavar="URL",
        help=f"Admin address of a gateway; for https, {CA} and {CERT} name files.",
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option("--admin-token", envvar="HEADRACE_ADMIN_TOKEN", metavar="TOKEN", help="Token of the admin API."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class AdminError(Exception):
    """A call that was not answered as hoped, as one sentence for people."""


@contextlib.contextmanager
def failing_in_words() -> Iterator[None]:
    """Where an `AdminError` ends the command, with its sentence on standard error."""
    try:
        yield
    except AdminError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


class AdminGroup(TyperGroup):
    """A group of commands that fail in words."""

    def invoke(self, ctx: Any) -> Any:
        with failing_in_words():
            return super().invoke(ctx)


@dataclass(slots=True, frozen=True)
class AdminClient:
    """The admin API at `url`. Every call is one request on a connection of its own."""

    url: str
    token: str | None = None
    timeout_s: float = TIMEOUT_S

    def get(self, path: str, wanted: str) -> dict[str, Any]:
        """The answer, which has the keys `wanted` and `problems`."""
        answer = self._call("GET", path)
        if not isinstance(answer.get(wanted), list) or not isinstance(answer.get("problems"), list):
            raise self._not_an_admin_api("its answer is not a gateway's")
        return answer

    def readiness(self) -> dict[str, Any]:
        """What `/readyz` says, be the gateway ready or not."""
        answer = self._call("GET", "/readyz", also=503)
        if not all(isinstance(answer.get(key), list) for key in ("reasons", "degraded")) or "status" not in answer:
            raise self._not_an_admin_api("its answer is not a gateway's")
        return answer

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._call("POST", path, body)

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("PUT", path, body)

    def delete(self, path: str) -> dict[str, Any]:
        return self._call("DELETE", path)

    @property
    def _place(self) -> str:
        """The URL, for people: nobody can do anything with that of a socket that is gone after the command."""
        return urlsplit(self.url).path.removeprefix("/api/v1/") if self._in_cluster else self.url

    @property
    def _in_cluster(self) -> bool:
        return self.url.startswith(f"{UNIX_SCHEME}:")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, *, also: int = 0) -> dict[str, Any]:
        """The JSON object that was answered, with a status below 400 or `also`. Raises `AdminError`."""
        connection, prefix = self._connection()
        headers = {"accept": "application/json", "content-type": "application/json"}
        if self.token:
            headers[TOKEN_HEADER] = self.token
        try:
            connection.request(method, prefix + path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            content = response.read()
        except ssl.SSLCertVerificationError as error:
            raise AdminError(
                f"The certificate of {self.url} is not trusted ({error.verify_message}): {CA} names the file of the "
                "authority to trust."
            ) from None
        except ssl.SSLError as error:
            raise AdminError(f"No TLS with {self.url} ({_reason(error)}): check --admin and {CERT}.") from None
        except OSError as error:
            if self._in_cluster:
                raise AdminError(
                    f"No gateway answers at {self._place} ({error.strerror or error}): {_POLICY_HINT}."
                ) from None
            raise AdminError(
                f"No gateway answers at {self.url} ({error.strerror or error}): check that one is running and "
                "that --admin (or HEADRACE_ADMIN) names its admin address, `gateway.admin` in its fleet file"
                f"{_TLS_HINT if isinstance(error, RemoteDisconnected) else ''}."
            ) from None
        except HTTPException:  # it would quote what was answered, whatever bytes that was
            raise self._not_an_admin_api("it does not speak HTTP") from None
        except ValueError as error:  # a token or name that no header or request line can carry
            raise AdminError(f"This cannot be sent to {self._place}: {error}.") from None
        finally:
            connection.close()
        return self._read(response.status, content, also)

    def _connection(self) -> tuple[HTTPConnection, str]:
        parts = urlsplit(self.url)
        if parts.scheme == UNIX_SCHEME:
            return _SocketConnection(unquote(parts.netloc), self.timeout_s), parts.path
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise AdminError(f"{self.url!r} is not an address like {DEFAULT_ADMIN}; set --admin or HEADRACE_ADMIN.")
        path = parts.path.rstrip("/")
        if parts.scheme == "http":
            return HTTPConnection(parts.hostname, port, timeout=self.timeout_s), path
        return HTTPSConnection(parts.hostname, port, timeout=self.timeout_s, context=_tls()), path

    def _read(self, status: int, content: bytes, also: int) -> dict[str, Any]:
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if self._in_cluster and isinstance(answer, dict) and answer.get("kind") == "Status":
            raise AdminError(
                f"The API server refuses: {answer.get('message') or status}{_CLUSTER_HINTS.get(status, '')}."
            )
        error = answer.get("error") if isinstance(answer, dict) else None
        message, code = (error.get("message"), error.get("code")) if isinstance(error, dict) else (None, None)
        # A path that is not there is no refusal: the admin API has all paths that are asked for here.
        unknown_path = status == 404 and code not in UNKNOWN_NAMES
        failed = status >= 400 and status != also
        if not isinstance(answer, dict) or unknown_path or (failed and not isinstance(message, str)):
            raise self._not_an_admin_api(f"status {status}")
        if failed:
            raise AdminError(f"{message}{TOKEN_HINTS.get(str(code), '')}")
        return answer

    def _not_an_admin_api(self, why: str) -> AdminError:
        return AdminError(
            f"What answers at {self._place} is not a gateway's admin API ({why}): "
            f"check {'--service' if self._in_cluster else '--admin'}; "
            "the admin port is not the one clients use."
        )


class _SocketConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def tell_problems(answer: dict[str, Any]) -> None:
    """Print what an answer says is wrong with the fleet's documents."""
    for problem in answer["problems"]:
        typer.echo(f"problem: {problem}", err=True)


def _tls() -> ssl.SSLContext:
    """What HTTPS is spoken with. Raises `AdminError` for files that cannot be used."""
    variable = CA
    try:
        context = ssl.create_default_context(cafile=os.environ.get(CA) or None)
        variable = CERT
        if own := os.environ.get(CERT):
            context.load_cert_chain(own, password=lambda: "")  # else OpenSSL asks the terminal
    except OSError as error:
        why = _reason(error) if isinstance(error, ssl.SSLError) else error.strerror
        raise AdminError(f"The file {os.environ[variable]!r} of {variable} cannot be used: {why}.") from None
    return context


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no reason given").lower().replace("_", " ")


def escaped(name: str) -> str:
    """A name as one segment of a path. Raises `AdminError` for an empty one."""
    if not name:
        raise AdminError("The name is empty.")
    return quote(name, safe="")
