"""Calls to a gateway's admin API from the command line.

The commands talk to the admin API and never to Redis, so they work from wherever the admin port can be reached and
obey the rules the gateway sets. Whatever goes wrong becomes one sentence (`AdminError`) that says what to do.
"""

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer
from typer.core import TyperGroup

from gateway.admin import TOKEN_HEADER

TIMEOUT_S = 10.0
DEFAULT_ADMIN = "http://127.0.0.1:9090"

AdminOption = Annotated[
    str, typer.Option("--admin", envvar="HEADRACE_ADMIN", metavar="URL", help="Admin address of a gateway.")
]
TokenOption = Annotated[
    str | None,
    typer.Option("--admin-token", envvar="HEADRACE_ADMIN_TOKEN", metavar="TOKEN", help="Token of the admin API."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class AdminError(Exception):
    """A call that was not answered as hoped, as one sentence for people."""


class AdminGroup(TyperGroup):
    """A group of commands that end with the sentence of an `AdminError` on standard error."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AdminError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None


@dataclass(slots=True, frozen=True)
class AdminClient:
    """The admin API at `url`. Every call is one request on a connection of its own."""

    url: str
    token: str | None = None

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._call("POST", path, body)

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("PUT", path, body)

    def delete(self, path: str) -> dict[str, Any]:
        return self._call("DELETE", path)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that was answered. Raises `AdminError`."""
        connection, prefix = self._connection()
        headers = {"accept": "application/json", "content-type": "application/json"}
        if self.token:
            headers[TOKEN_HEADER] = self.token
        try:
            connection.request(method, prefix + path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, HTTPException) as error:
            raise AdminError(
                f"No gateway answers at {self.url} ({error or type(error).__name__}): check that one is running and "
                "that --admin (or HEADRACE_ADMIN) names its admin address, `gateway.admin` in its fleet file."
            ) from None
        except ValueError as error:  # a token or name that no header or request line can carry
            raise AdminError(f"This cannot be sent to {self.url}: {error}.") from None
        finally:
            connection.close()
        return self._read(response.status, content)

    def _connection(self) -> tuple[HTTPConnection, str]:
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise AdminError(f"{self.url!r} is not an address like {DEFAULT_ADMIN}; set --admin or HEADRACE_ADMIN.")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.hostname, port, timeout=TIMEOUT_S), parts.path.rstrip("/")

    def _read(self, status: int, content: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise AdminError(
                f"What answers at {self.url} is not a gateway's admin API (status {status}): check --admin; "
                "the admin port is not the one clients use."
            )
        if status >= 400:
            error = answer.get("error")
            message = error.get("message") if isinstance(error, dict) else None
            hint = " Give it with --admin-token or HEADRACE_ADMIN_TOKEN." if status == 401 else ""
            raise AdminError(f"{message or f'The gateway refused with status {status}.'}{hint}")
        return answer


def escaped(name: str) -> str:
    """An endpoint's or route's name as one segment of a path."""
    return quote(name, safe="")
