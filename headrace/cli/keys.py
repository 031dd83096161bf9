"""`headrace keys`: make API keys, and the hashes by which a fleet knows them.

Nothing is sent or kept anywhere: a key is shown once, to be handed to its user, and its hash goes into the fleet file
or to `headrace tenants set`.
"""

import hashlib
import secrets
import sys
import time
from typing import Annotated

import typer

from headrace.cli.style import PLAIN
from router.spec.fleet import KeySpec
from router.spec.strict import read_part
from router.spec.units import Name, has_expired
from router.spec.wording import pattern_of, text_fault

keys_app = typer.Typer(no_args_is_help=True, help="API keys and their hashes.", **PLAIN)

PREFIX = "hr-"
"""By which people, and programs that look for leaked secrets, know a key of headrace's."""
_RANDOM_BYTES = 32
_GUESSABLE = 20
"""Characters; what is shorter could be found by trying, from its hash."""

NameOption = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Tells the tenant's keys apart.")]
ExpiresOption = Annotated[
    str | None, typer.Option("--expires", metavar="DATE", help="The last day on which it is taken: 2027-01-31.")
]


@keys_app.command("new")
def new(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is to be.")],
    name: NameOption = None,
    expires: ExpiresOption = None,
) -> None:
    """Make a key. It is shown this once; the fleet file gets its hash only.

    \b
    Example:
      headrace keys new search --name ci --expires 2027-01-31
    """
    if fault := text_fault(tenant, pattern_of(Name)):
        _refuse(f"TENANT: {fault}.")
    key = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    line = _line(key, name, expires)
    typer.echo(key)
    _warn_of_past(expires)
    typer.echo(
        f"\nThis is the only time the key is shown. Under `tenants: {tenant}: keys:` in the fleet file, add:\n\n"
        f"  - {line}\n\nor set the tenant in a running fleet. That replaces all of it: give its other keys, routes and "
        "limits, too.\n\n"
        f"  headrace tenants set {tenant} --key '{line}'",
        err=True,
    )


@keys_app.command("hash")
def hash_(name: NameOption = None, expires: ExpiresOption = None) -> None:
    """Print the hash of a key that is read from standard input, as the fleet file takes it.

    \b
    Example:
      headrace keys hash < key.txt
    """
    key = sys.stdin.readline().strip()
    if not key:
        _refuse("There is no key on standard input.")
    typer.echo(_line(key, name, expires))
    _warn_of_past(expires)
    if len(key) < _GUESSABLE:
        typer.echo(
            f"The key has fewer than {_GUESSABLE} characters: it can be found from its hash. `headrace keys new` makes "
            "one that cannot.",
            err=True,
        )


def _line(key: str, name: str | None, expires: str | None) -> str:
    """A key of a tenant, as YAML."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    fields = {"sha256": digest, "name": name, "expires": expires}
    given = {field: text for field, text in fields.items() if text is not None}
    _, problems = read_part(given, KeySpec)
    if problems:
        _refuse(" ".join(f"--{problem.path}: {problem.message}." for problem in problems))
    # An all-digit word is a number to YAML, if it is not quoted.
    quoted = {field: f'"{text}"' if field == "sha256" or text.isdigit() else text for field, text in given.items()}
    return "{" + ", ".join(f"{field}: {text}" for field, text in quoted.items()) + "}"


def _warn_of_past(expires: str | None) -> None:
    if expires is not None and has_expired(expires, time.time()):
        typer.echo(f"Warning: {expires} is over (UTC), so the key will never be taken: give a later day.", err=True)


def _refuse(sentence: str) -> None:
    typer.echo(sentence, err=True)
    raise typer.Exit(1)
