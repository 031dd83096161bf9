"""`headrace log-level`: how much a gateway's loggers say, shown and changed while it runs."""

import json
from typing import Annotated

import typer
from rich.text import Text

from gateway.admin import LOG_LEVELS
from headrace.cli.admin_client import (
    DEFAULT_ADMIN,
    AdminClient,
    AdminGroup,
    AdminOption,
    JsonOption,
    TokenOption,
    escaped,
)
from headrace.cli.style import PLAIN
from headrace.cli.table import print_table

log_level_app = typer.Typer(cls=AdminGroup, no_args_is_help=True, help="How much a gateway's log says.", **PLAIN)

HEADINGS = ("LOGGER", "LEVEL", "CHANGED")

LoggerArgument = Annotated[
    str, typer.Argument(metavar="LOGGER", help="root for all, a package (gateway.upstream), a module or a library.")
]


@log_level_app.command("list")
def list_log_levels(
    admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None, as_json: JsonOption = False
) -> None:
    """Show the loggers that have a level of their own; the others say what the package around them does."""
    answer = AdminClient(admin, admin_token).get(LOG_LEVELS, "loggers")
    if as_json:
        typer.echo(json.dumps(answer["loggers"], indent=2))
        return
    rows = ((row["name"], row["level"], "yes" if row["changed"] else "-") for row in answer["loggers"])
    print_table(HEADINGS, ([Text(text) for text in row] for row in rows))


@log_level_app.command("set")
def set_log_level(
    logger: LoggerArgument,
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="debug, info, warning or error.")],
    admin: AdminOption = DEFAULT_ADMIN,
    admin_token: TokenOption = None,
) -> None:
    """Have a logger say what is of LEVEL and above, in all workers, until it is reset or the gateway ends.

    \b
    Example:
      headrace log-level set gateway.upstream debug
    """
    AdminClient(admin, admin_token).put(f"{LOG_LEVELS}/{escaped(logger)}", {"level": level})
    typer.echo(f"{logger} says what is {level} and above.")


@log_level_app.command("reset")
def reset(logger: LoggerArgument, admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None) -> None:
    """Have a logger say what it said when the gateway was started."""
    AdminClient(admin, admin_token).delete(f"{LOG_LEVELS}/{escaped(logger)}")
    typer.echo(f"{logger} says what it said at the start.")
