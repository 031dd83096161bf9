"""`kubectl headrace`: what operators ask and tell a fleet in a cluster, with the rights that kubectl gives them.

The commands are those of `headrace`, at an address that `cluster` makes, besides `status`.
"""

import contextlib
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.text import Text

from gateway.admin import ENDPOINTS
from headrace.cli import endpoints as endpoint_commands
from headrace.cli import routes as route_commands
from headrace.cli.admin_client import AdminClient, AdminError, AdminGroup, JsonOption, TokenOption, tell_problems
from headrace.cli.cluster import AdminService, Cluster
from headrace.cli.style import HELP_OPTIONS, PLAIN
from headrace.cli.table import print_table

app = typer.Typer(
    cls=AdminGroup, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS, **PLAIN
)

NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Where the fleet is, if not where the context is.", show_default=False
    ),
]
KubeconfigOption = Annotated[
    str, typer.Option("--kubeconfig", metavar="FILE", help="As of kubectl.", show_default=False)
]
ContextOption = Annotated[str, typer.Option("--context", metavar="NAME", help="As of kubectl.", show_default=False)]
ServiceOption = Annotated[
    str,
    typer.Option(
        "--service", metavar="NAME", help="The Service of the gateways' admin ports, if not found.", show_default=False
    ),
]
AddressOption = Annotated[
    str,
    typer.Option(
        "--address", metavar="URL", help="Admin address of a gateway, without the cluster.", show_default=False
    ),
]

HEADINGS = ("POOL", "PHASE", "ENDPOINTS", "IN FLIGHT")


@app.callback()
def _kubectl_headrace() -> None:
    """See and drain the engines behind headrace's gateways in a cluster.

    The API server passes requests on to one gateway, which it chooses anew each time: loads are that gateway's.
    A drained endpoint is drained for all of them.

    \b
    Examples:
      kubectl headrace status -n llm
      kubectl headrace drain llama-70b/llama-70b-0 -n llm
    """


@app.command("status")
def status(
    namespace: NamespaceOption = "", kubeconfig: KubeconfigOption = "", context: ContextOption = "",
    service: ServiceOption = "", address: AddressOption = "", admin_token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show how many gateways are ready, and what one of them says of itself and of its endpoints."""
    cluster = Cluster(kubeconfig, context, namespace)
    with _admin(cluster, service, address) as admin:
        client = AdminClient(admin.url, admin_token)
        gateways = cluster.gateways(admin.service) if admin.service is not None else None
        if not as_json and gateways is not None:
            ready = sum(gateways.values())
            typer.echo(f"{admin.service}: {ready} of {len(gateways)} gateways are ready.")
        readiness = client.readiness()
        answer = client.get(ENDPOINTS, "endpoints")
    pools = _by_pool(answer["endpoints"])
    if as_json:
        shown = {"gateways": gateways, "readiness": readiness, "endpoints": pools, "problems": answer["problems"]}
        typer.echo(json.dumps(shown, indent=2))
        return
    who = "One of them" if gateways is not None else "The gateway"
    typer.echo(f"{who} says: {readiness['status'].replace('_', ' ')}")
    for word in ("reasons", "degraded"):
        for text in readiness[word]:
            typer.echo(f"{word.removesuffix('s')}: {text}")
    typer.echo()
    rows = [[Text(str(value)) for value in row.values()] for row in pools]
    for cells, row in zip(rows, pools, strict=True):
        cells[1].stylize(endpoint_commands.PHASE_STYLE.get(row["phase"], ""))
    print_table(HEADINGS, rows, right=frozenset(HEADINGS[2:]))
    tell_problems(answer)


@app.command("endpoints")
def endpoints(
    namespace: NamespaceOption = "", kubeconfig: KubeconfigOption = "", context: ContextOption = "",
    service: ServiceOption = "", address: AddressOption = "", admin_token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show every endpoint, its phase, and its load in one gateway."""
    with _admin(Cluster(kubeconfig, context, namespace), service, address) as admin:
        endpoint_commands.list_endpoints(admin.url, admin_token, as_json)


@app.command("routes")
def routes(
    namespace: NamespaceOption = "", kubeconfig: KubeconfigOption = "", context: ContextOption = "",
    service: ServiceOption = "", address: AddressOption = "", admin_token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show every route and its pools."""
    with _admin(Cluster(kubeconfig, context, namespace), service, address) as admin:
        route_commands.list_routes(admin.url, admin_token, as_json)


@app.command("drain")
def drain(
    id_: endpoint_commands.IdArgument,
    namespace: NamespaceOption = "", kubeconfig: KubeconfigOption = "", context: ContextOption = "",
    service: ServiceOption = "", address: AddressOption = "", admin_token: TokenOption = None,
) -> None:  # fmt: skip
    """Have all gateways send an endpoint no new requests; those it has go on."""
    with _admin(Cluster(kubeconfig, context, namespace), service, address) as admin:
        endpoint_commands.drain(id_, admin.url, admin_token)


@app.command("undrain")
def undrain(
    id_: endpoint_commands.IdArgument,
    namespace: NamespaceOption = "", kubeconfig: KubeconfigOption = "", context: ContextOption = "",
    service: ServiceOption = "", address: AddressOption = "", admin_token: TokenOption = None,
) -> None:  # fmt: skip
    """Let a drained endpoint take requests again."""
    with _admin(Cluster(kubeconfig, context, namespace), service, address) as admin:
        endpoint_commands.undrain(id_, admin.url, admin_token)


@dataclass(slots=True, frozen=True)
class _Admin:
    url: str
    service: AdminService | None
    """None for an address that was given."""


@contextlib.contextmanager
def _admin(cluster: Cluster, service: str, address: str) -> Iterator[_Admin]:
    if address:
        if service:
            raise AdminError("--service and --address are two ways to one gateway: give one of them.")
        yield _Admin(address, None)
        return
    found = cluster.service(service)
    with cluster.reached(found) as url:
        yield _Admin(url, found)


def _by_pool(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many endpoints of each pool are in each phase, and what they have in flight."""
    counted: Counter[tuple[str, str]] = Counter()
    in_flight: Counter[tuple[str, str]] = Counter()
    for row in rows:
        key = row["pool"] or "-", row["phase"]
        counted[key] += 1
        in_flight[key] += row["in_flight"]
    return [
        {"pool": pool, "phase": phase, "endpoints": count, "in_flight": in_flight[pool, phase]}
        for (pool, phase), count in sorted(counted.items())
    ]


def main() -> None:
    """Entry point of kubectl's plugin."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that kubectl proxy is ended, too
    app(prog_name="kubectl headrace")


if __name__ == "__main__":
    main()
