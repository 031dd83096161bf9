"""`headrace endpoints`: list, add, drain, undrain and remove endpoints through the admin API."""

import json
from typing import Annotated, Any

import typer
from rich.text import Text

from gateway.admin import ENDPOINTS
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

endpoints_app = typer.Typer(cls=AdminGroup, no_args_is_help=True, help="The serving replicas of the fleet.", **PLAIN)

HEADINGS = ("ID", "POOL", "PROTOCOL", "PHASE", "DRAIN", "IN FLIGHT", "CAPACITY", "ZONE", "FROM", "URL", "DETAIL")
PHASE_STYLE = {"ready": "green", "unhealthy": "red", "unusable": "red", "draining": "yellow", "preempting": "yellow"}

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The endpoint.")]


@endpoints_app.command("list")
def list_endpoints(
    admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None, as_json: JsonOption = False
) -> None:
    """Show every endpoint, its phase and its load in this gateway.

    DRAIN says `drained` when this gateway has nothing in flight there any more. PHASE says `unusable` of what documents
    speak of but no endpoint can be made of, and DETAIL why.
    """
    answer = AdminClient(admin, admin_token).get(ENDPOINTS, "endpoints")
    if as_json:
        typer.echo(json.dumps(answer["endpoints"], indent=2))
        return
    print_table(HEADINGS, map(_cells, answer["endpoints"]), right=frozenset({"IN FLIGHT"}))
    tell_problems(answer)


@endpoints_app.command("add")
def add(
    id_: IdArgument,
    pool: Annotated[str, typer.Option("--pool", metavar="POOL", help="The pool it joins.")],
    http: Annotated[str | None, typer.Option(metavar="URL", help="Base URL of its HTTP API.")] = None,
    grpc: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of its gRPC API.")] = None,
    metrics: Annotated[str | None, typer.Option(metavar="URL", help="URL of its Prometheus metrics.")] = None,
    zone: Annotated[str | None, typer.Option(metavar="ZONE", help="Its zone.")] = None,
    capacity: Annotated[str | None, typer.Option(metavar="CAPACITY", help="spot or on-demand (default).")] = None,
    admin: AdminOption = DEFAULT_ADMIN,
    admin_token: TokenOption = None,
) -> None:
    """Add an endpoint to a pool, in every gateway of the fleet. Needs Redis.

    \b
    Examples:
      headrace endpoints add vllm-b --pool llama-vllm --http http://10.0.0.4:8000
      headrace endpoints add triton-c --pool llama-triton --grpc 10.0.0.3:8001 --capacity spot
    """
    fields = {
        "id": id_, "pool": pool, "http": http, "grpc": grpc, "metrics": metrics, "zone": zone, "capacity": capacity,
    }  # fmt: skip
    AdminClient(admin, admin_token).post(ENDPOINTS, {key: value for key, value in fields.items() if value is not None})
    typer.echo(f"Endpoint {id_} is added to pool {pool}; it takes traffic once its probes say it is ready.")


@endpoints_app.command("drain")
def drain(id_: IdArgument, admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None) -> None:
    """Send an endpoint no new requests; those it has go on.

    It can be stopped when `headrace endpoints list` says so on every gateway.
    """
    AdminClient(admin, admin_token).post(f"{ENDPOINTS}/{escaped(id_)}/drain")
    typer.echo(f"Endpoint {id_} drains: it gets no new requests, those in flight go on.")


@endpoints_app.command("undrain")
def undrain(id_: IdArgument, admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None) -> None:
    """Let a drained endpoint take requests again."""
    AdminClient(admin, admin_token).post(f"{ENDPOINTS}/{escaped(id_)}/undrain")
    typer.echo(f"Endpoint {id_} takes requests again.")


@endpoints_app.command("remove")
def remove(id_: IdArgument, admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None) -> None:
    """Remove an endpoint that was added with `add`, also one that cannot be used."""
    AdminClient(admin, admin_token).delete(f"{ENDPOINTS}/{escaped(id_)}")
    typer.echo(f"Endpoint {id_} is removed.")


def _cells(row: dict[str, Any]) -> list[Text]:
    phase = Text(row["phase"], style=PHASE_STYLE.get(row["phase"], ""))
    known = {key: Text("-" if value is None else str(value)) for key, value in row.items()}
    before, after = ("id", "pool", "protocol"), ("drain", "in_flight", "capacity", "zone")
    cells = [*(known[key] for key in before), phase, *(known[key] for key in after)]
    return [*cells, Text(",".join(row["sources"])), known["url"], known["detail"]]
