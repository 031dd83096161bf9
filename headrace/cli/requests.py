"""`headrace requests`: list and cancel the open requests of a gateway through the admin API."""

import json
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.text import Text

from gateway.admin import REQUESTS
from headrace.cli.admin_client import (
    DEFAULT_ADMIN,
    AdminClient,
    AdminGroup,
    AdminOption,
    JsonOption,
    TokenOption,
    escaped,
    tell_problems,
)
from headrace.cli.style import PLAIN
from headrace.cli.table import print_table

requests_app = typer.Typer(cls=AdminGroup, no_args_is_help=True, help="The open requests of a gateway.", **PLAIN)

HEADINGS = ("ID", "AGE", "STATE", "TENANT", "ROUTE", "ENDPOINT", "MODEL", "ENGINE", "BYTES", "CLIENT", "REQUEST")
STATE_STYLE = {"queued": "yellow", "decode": "green"}


@requests_app.command("list")
def list_requests(
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Those of this tenant only.", show_default=False)] = "",
    route: Annotated[str, typer.Option(metavar="ROUTE", help="Those to this route only.", show_default=False)] = "",
    endpoint: Annotated[str, typer.Option(metavar="ID", help="Those at this endpoint only.", show_default=False)] = "",
    state: Annotated[
        str,
        typer.Option(
            metavar="STATE", help="Those in this state only: reading, queued, prefill or decode.", show_default=False
        ),
    ] = "",
    older_than: Annotated[float, typer.Option(metavar="SECONDS", help="Those that came so long ago, or longer.")] = 0.0,
    limit: Annotated[int, typer.Option(metavar="ROWS", help="The oldest so many, 1000 at most.")] = 100,
    admin: AdminOption = DEFAULT_ADMIN,
    admin_token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the requests that are open in this gateway, the oldest first, without prompts.

    STATE says `reading` while a request has not all come, `queued` while every endpoint is full, `prefill` until its
    endpoint answers and `decode` from then on. REQUEST is its x-request-id and path.

    \b
    Example:
      headrace requests list --route llama --older-than 60
    """
    query: dict[str, object] = {"tenant": tenant, "route": route, "endpoint": endpoint, "state": state}
    query |= {"older_than_s": older_than, "limit": limit}
    answer = AdminClient(admin, admin_token).get(f"{REQUESTS}?{urlencode(query)}", "requests")
    if as_json:
        typer.echo(json.dumps(answer["requests"], indent=2))
    else:
        print_table(HEADINGS, map(_cells, answer["requests"]), right=frozenset({"AGE", "BYTES"}))
    if (more := answer["matching"] - len(answer["requests"])) > 0:
        typer.echo(f"{more} more are not shown: filter, or raise --limit.", err=True)
    tell_problems(answer)


@requests_app.command("cancel")
def cancel(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The request's, as `list` shows it.")],
    admin: AdminOption = DEFAULT_ADMIN,
    admin_token: TokenOption = None,
) -> None:
    """End one request: its engine is told to stop, and its client that the operator has ended it."""
    AdminClient(admin, admin_token).delete(f"{REQUESTS}/{escaped(id_)}")
    typer.echo(f"Request {id_} is ended.")


def _cells(row: dict[str, Any]) -> list[Text]:
    texts = [row["id"], f"{row['age_s']:.1f} s", row["state"]]
    texts += [row[key] for key in ("tenant", "route", "endpoint", "model", "engine", "bytes", "client")]
    texts.append(f"{row['request_id']} {row['path']}")
    cells = [Text("-" if text is None else str(text)) for text in texts]
    cells[2].stylize(STATE_STYLE.get(row["state"], ""))
    return cells
