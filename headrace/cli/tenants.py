"""`headrace tenants`: list, set and remove those who may call, through the admin API."""

import json
import time
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text

from gateway.admin import TENANTS
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
from headrace.cli.routes import say_removed
from headrace.cli.style import PLAIN
from headrace.cli.table import print_table
from router.spec.units import has_expired

tenants_app = typer.Typer(cls=AdminGroup, no_args_is_help=True, help="Those who may call, and what for.", **PLAIN)

HEADINGS = ("NAME", "KEYS", "ROUTES", "ISOLATED", "PRIORITY", "WEIGHT", "LIMITS", "FROM", "PROBLEM")
_LIMITS = {
    "requests_per_minute": "requests/min",
    "prompt_tokens_per_minute": "prompt tokens/min",
    "completion_tokens_per_minute": "completion tokens/min",
    "streams": "at a time",
}
_SHOWN_DIGITS = 8

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")]


@tenants_app.command("list")
def list_tenants(
    admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None, as_json: JsonOption = False
) -> None:
    """Show every tenant, its keys by name or the start of their hash, and the routes it may call."""
    answer = AdminClient(admin, admin_token).get(TENANTS, "tenants")
    if as_json:
        typer.echo(json.dumps(answer["tenants"], indent=2))
        return
    print_table(HEADINGS, map(_cells, answer["tenants"]))
    tell_problems(answer)


@tenants_app.command("set")
def set_tenant(
    name: NameArgument,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="KEY", help="A key as `headrace keys new` prints it, or its hash; repeatable."),
    ] = None,
    route: Annotated[
        list[str] | None, typer.Option("--route", metavar="ROUTE", help="A route it may call; default: all.")
    ] = None,
    isolated: Annotated[
        bool, typer.Option("--isolated/--shared", help="Whether its prompts share no cached prefix with others'.")
    ] = True,
    limits: Annotated[
        str | None, typer.Option(metavar="LIMITS", help="Its limits as in the fleet file; default: none.")
    ] = None,
    route_limits: Annotated[
        str | None, typer.Option(metavar="LIMITS", help="Its limits by route: {ROUTE: LIMITS}; default: none.")
    ] = None,
    priority: Annotated[
        str, typer.Option(metavar="CLASS", help="Its class where requests wait: interactive, standard or batch.")
    ] = "standard",
    weight: Annotated[
        float, typer.Option(help="Its share of tokens beside others of its class, where they wait.")
    ] = 1.0,
    admin: AdminOption = DEFAULT_ADMIN,
    admin_token: TokenOption = None,
) -> None:
    """Set a tenant, whole, in every gateway of the fleet. Needs Redis.

    \b
    Example:
      headrace tenants set search --key '{sha256: "...", name: ci}' --route llama \\
        --limits '{requests_per_minute: 600, streams: 8}'
    """
    keys = [_key(text) for text in key or []]
    body = {
        "keys": keys,
        "routes": route or [],
        "isolated": isolated,
        "limits": _mapping("--limits", limits),
        "route_limits": _mapping("--route-limits", route_limits),
        "priority": priority,
        "weight": weight,
    }
    AdminClient(admin, admin_token).put(f"{TENANTS}/{escaped(name)}", body)
    may = f"may call {', '.join(route)}" if route else "may call every route"
    over = [key["expires"] for key in keys if isinstance(key, dict) and key.get("expires") and _is_over(key["expires"])]
    for last_day in over:
        typer.echo(f"Warning: a key whose last day was {last_day} is not taken any more.", err=True)
    by = f"has {len(keys)} key{'s' if len(keys) != 1 else ''}" if keys else "is known by tokens only"
    typer.echo(f"Tenant {name} {by} and {may}.")


@tenants_app.command("remove")
def remove(name: NameArgument, admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None) -> None:
    """Remove a tenant that was set with `set`; one of the same name in the fleet file counts again."""
    say_removed(f"Tenant {name}", AdminClient(admin, admin_token).delete(f"{TENANTS}/{escaped(name)}"))


def _key(text: str) -> object:
    """The key that an option describes: a mapping, or a hash alone. What is in it is for the admin API to judge."""
    try:
        value = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        value = None
    if isinstance(value, str):
        value = {"sha256": value}
    if not isinstance(value, dict):
        raise AdminError('--key: is no key as `headrace keys new` prints it: {sha256: "..."}.')
    return value


def _mapping(option: str, text: str | None) -> object:
    """The limits that an option describes. What is in them is for the admin API to judge."""
    try:
        value = yaml.safe_load(text) if text is not None else {}
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise AdminError(f"{option}: is no mapping: {{requests_per_minute: 600, streams: 8}}.")
    return value


def _cells(row: dict[str, Any]) -> list[Text]:
    keys = [_shown(key) for key in row["keys"]]
    texts = [row["name"], ", ".join(keys) or "-", ", ".join(row["routes"]) or "all", "yes" if row["isolated"] else "no"]
    texts += [row["priority"], f"{row['weight']:g}"]
    limits = [_limits(row["limits"])] + [f"{name}: {_limits(said)}" for name, said in row["route_limits"].items()]
    texts.append("; ".join(filter(None, limits)) or "-")
    return [Text(text) for text in (*texts, ",".join(row["sources"]), row["problem"] or "-")]


def _limits(limits: dict[str, int]) -> str:
    return ", ".join(f"{limit} {_LIMITS.get(name, name)}" for name, limit in limits.items())


def _shown(key: dict[str, str]) -> str:
    name = key.get("name") or key["sha256"][:_SHOWN_DIGITS]
    if not key.get("expires"):
        return name
    return f"{name} (expired {key['expires']})" if _is_over(key["expires"]) else f"{name} (to {key['expires']})"


def _is_over(last_day: str) -> bool:
    return has_expired(last_day, time.time())
