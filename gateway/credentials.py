"""What engines are sent as `Authorization`, by what their pools say.

`none` is the default: nothing of a client's credentials ever goes on. `forward` sends on what the client sent.
`replace` sends a token that every gateway has for itself, in its environment or in a file; fleet documents only say
where. The probes of a pool look at its file each time, so a token that is changed is in force within seconds, and a
request reads nothing. An engine whose token cannot be had is sent no request: it would refuse it, or worse, take it.

Tokens are in no message and no log line: what is said of one is where it should have come from.
"""

import os
from pathlib import Path

from gateway.upstream.base import Failure, Headers, UpstreamError
from router.fleet import Endpoint, Pool
from router.spec.fleet import PoolSpec, SecretSpec

AUTHORIZATION = "authorization"
_MOST_BYTES = 16 * 1024
_OWN = "HEADRACE_"
"""The gateway's own variables, its admin token among them: no fleet document may have them sent anywhere."""

_Stamp = tuple[int, int, int]


class Credentials:
    """The tokens of this process."""

    def __init__(self) -> None:
        self._tokens: dict[SecretSpec, Headers] = {}
        self._stamps: dict[str, _Stamp] = {}

    def of(self, pool: PoolSpec, endpoint: Endpoint, clients: str) -> Headers:
        """What to send with a request to `endpoint`, whose client sent `clients` as its Authorization, if anything.
        Raises UpstreamError if it needs a token that is not there."""
        wanted = pool.credentials
        if wanted == "none":
            return ()
        if isinstance(wanted, str):
            return ((AUTHORIZATION, clients),) if clients else ()
        headers = self._tokens.get(wanted.replace)
        if headers is None:
            message = f"Engine {endpoint.id} has no credentials here; `headrace endpoints list` shows why."
            raise UpstreamError(Failure.BUSY, message, 503, "no_credentials")
        return headers

    def own(self, pool: PoolSpec) -> Headers:
        """What to send with a question of the gateway's own."""
        wanted = pool.credentials
        return () if isinstance(wanted, str) else self._tokens.get(wanted.replace, ())

    def refresh(self, pool: Pool) -> str | None:
        """Look for the pool's token again. Says why it cannot be had; None if there is nothing to say."""
        wanted = pool.spec.credentials
        if isinstance(wanted, str):
            return None
        secret = wanted.replace
        try:
            self._read(secret)
        except _NoTokenError as error:
            self._tokens.pop(secret, None)
            return f"its credentials cannot be had: {error}"
        return None

    def _read(self, secret: SecretSpec) -> None:
        """Raises _NoTokenError."""
        if secret.file is not None:
            path = Path(secret.file)
            try:
                known = path.stat()
                stamp = (known.st_mtime_ns, known.st_ino, known.st_size)
                if secret in self._tokens and self._stamps.get(secret.file) == stamp:
                    return
                if not path.is_file():
                    raise _NoTokenError(f"{path} is not a file")
                with path.open("rb") as file:
                    text = file.read(_MOST_BYTES).decode("latin-1")
            except OSError as error:
                raise _NoTokenError(f"{path}: {error.strerror or error}") from None
            self._stamps[secret.file] = stamp
            self._tokens[secret] = _bearer(text, f"the file {path}")
        elif secret not in self._tokens:
            name = secret.env or ""
            if name.startswith(_OWN):
                raise _NoTokenError(f"the variable {name} is the gateway's own")
            if name not in os.environ:
                raise _NoTokenError(f"the environment has no variable {name!r}")
            self._tokens[secret] = _bearer(os.environ[name], f"the variable {name}")


class _NoTokenError(Exception):
    """Why there is no token, without a word of it."""


def _bearer(text: str, where: str) -> Headers:
    token = text.strip()
    if not token or not all("!" <= character <= "~" for character in token):
        raise _NoTokenError(f"{where} holds no token, which is one word of visible ASCII characters")
    return ((AUTHORIZATION, f"Bearer {token}"),)
