"""`headrace config`: the configuration that a gateway has in force, and where each value comes from."""

import json
from typing import Annotated
from urllib.parse import urlencode

import typer
from rich.text import Text

from gateway.admin import CONFIGURATION
from headrace.cli.admin_client import (
    DEFAULT_ADMIN,
    AdminClient,
    AdminOption,
    JsonOption,
    TokenOption,
    failing_in_words,
    tell_problems,
)
from headrace.cli.table import print_table

HEADINGS = ("PATH", "VALUE", "ORIGIN", "FROM")


def config(
    prefix: Annotated[
        str, typer.Argument(metavar="[PATH]", help="What paths begin with: gateway.overload.", show_default=False)
    ] = "",
    without_defaults: Annotated[bool, typer.Option("--set", help="Only what somebody has said.")] = False,
    admin: AdminOption = DEFAULT_ADMIN,
    admin_token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the configuration in force in a gateway, value by value.

    ORIGIN says where a value comes from: a `flag`, the `environment`, the gateway's own `file`, a `document` of the
    shared state (FROM says whose: another gateway's file, discovery, an operator, cli), the `admin` API, or a
    `default`. Passwords and tokens are masked.

    \b
    Examples:
      headrace config --set
      headrace config gateway.overload
      headrace config routes
    """
    query = {"prefix": prefix, "defaults": "false" if without_defaults else "true"}
    with failing_in_words():
        answer = AdminClient(admin, admin_token).get(f"{CONFIGURATION}?{urlencode(query)}", "settings")
    if as_json:
        typer.echo(json.dumps(answer["settings"], indent=2))
    else:
        cells = ((one["path"], json.dumps(one["value"]), one["origin"], one["where"]) for one in answer["settings"])
        print_table(HEADINGS, ([Text(text or "-") for text in row] for row in cells))
    if (more := answer["matching"] - len(answer["settings"])) > 0:
        typer.echo(f"{more} more are not shown: give what their path begins with.", err=True)
    tell_problems(answer)
