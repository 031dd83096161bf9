"""`headrace routes`: list, set and remove public model names through the admin API."""

import json
from typing import Annotated, Any

import typer
from rich.text import Text

from gateway.admin import ROUTES
from headrace.cli.admin_client import (
    DEFAULT_ADMIN,
    AdminClient,
    AdminError,
    AdminGroup,
    AdminOption,
    JsonOption,
    TokenOption,
    escaped,
    tell_problems,
)
from headrace.cli.style import PLAIN
from headrace.cli.table import print_table

routes_app = typer.Typer(
    cls=AdminGroup, no_args_is_help=True, help="The public model names and the pools behind them.", **PLAIN
)

HEADINGS = ("NAME", "POOLS", "FALLBACK", "READY ENDPOINTS", "FROM", "PROBLEM")

_SAYS = {"file": "the file", "discovery": "discovery", "operator": "the custom resource"}

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The route: the model name that clients ask for.")]


@routes_app.command("list")
def list_routes(
    admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None, as_json: JsonOption = False
) -> None:
    """Show every route and its pools.

    PROBLEM says why a route that documents describe is not served.
    """
    answer = AdminClient(admin, admin_token).get(ROUTES, "routes")
    if as_json:
        typer.echo(json.dumps(answer["routes"], indent=2))
        return
    print_table(HEADINGS, map(_cells, answer["routes"]), right=frozenset({"READY ENDPOINTS"}))
    tell_problems(answer)


@routes_app.command("set")
def set_route(
    name: NameArgument,
    pool: Annotated[
        list[str], typer.Option("--pool", metavar="POOL[=WEIGHT]", help="A pool, repeated with weights for a split.")
    ],
    fallback: Annotated[
        list[str] | None,
        typer.Option("--fallback", metavar="POOL", help="A pool tried when they cannot serve; repeat it in order."),
    ] = None,
    admin: AdminOption = DEFAULT_ADMIN,
    admin_token: TokenOption = None,
) -> None:
    """Set what a route leads to, whole, in every gateway of the fleet. Needs Redis.

    \b
    Examples:
      headrace routes set llama --pool llama-vllm --fallback llama-triton
      headrace routes set llama --pool llama-triton=2 --pool llama-vllm=1
    """
    AdminClient(admin, admin_token).put(f"{ROUTES}/{escaped(name)}", {**_split(pool), "fallback": fallback or []})
    otherwise = f", and to {', then '.join(fallback)} when they cannot serve" if fallback else ""
    typer.echo(f"Route {name} leads to {', '.join(pool)}{otherwise}.")


@routes_app.command("remove")
def remove(name: NameArgument, admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None) -> None:
    """Remove a route that was set with `set`; one of the same name in the fleet file counts again."""
    say_removed(f"Route {name}", AdminClient(admin, admin_token).delete(f"{ROUTES}/{escaped(name)}"))


def say_removed(what: str, answer: Any) -> None:
    """Say what became of a document that was removed: another source's may count again."""
    still = answer["still_from"]
    typer.echo(f"{what} is again as {_SAYS[still[-1]]} says." if still else f"{what} is removed.")


def _split(pools: list[str]) -> dict[str, Any]:
    """The `pool` or `pools` of a route. Raises `AdminError` for a weight that is none."""
    if len(pools) == 1 and "=" not in pools[0]:
        return {"pool": pools[0]}
    shares: list[dict[str, Any]] = []
    for text in pools:
        name, equals, number = text.partition("=")
        if not name:
            raise AdminError(f"--pool {text}: names no pool; write --pool NAME or --pool NAME=WEIGHT.")
        try:
            weight = float(number) if equals else 1.0
        except ValueError:
            weight = 0.0
        if not 0 < weight < float("inf"):
            raise AdminError(f"--pool {text}: the weight must be a number above 0, as in --pool {name}=2.")
        shares.append({"pool": name, "weight": weight})
    return {"pools": shares}


def _cells(row: dict[str, Any]) -> list[Text]:
    pools = ", ".join(f"{share['pool']}={share['weight']:g}" for share in row["pools"]) or "-"
    texts = [row["name"], pools, ", ".join(row["fallback"]) or "-", row["ready_endpoints"], ",".join(row["sources"])]
    texts.append(row["problem"] or "-")
    return [Text(str(text)) for text in texts]
