"""`headrace reload`: have a gateway read its fleet file again."""

import typer

from gateway.admin import RELOAD
from headrace.cli.admin_client import DEFAULT_ADMIN, AdminClient, AdminOption, TokenOption, failing_in_words

RELOAD_S = 120.0
"""How long new workers may take to serve: twice what a worker has until it counts as hanging."""


def reload(admin: AdminOption = DEFAULT_ADMIN, admin_token: TokenOption = None) -> None:
    """Have a gateway read its fleet file again, as SIGHUP does; ends when the new one is in force.

    A gateway with --workers starts new ones and lets the old ones finish their streams; one without takes over pools,
    routes and tenants. What it refuses changes nothing.
    """
    with failing_in_words():
        answer = AdminClient(admin, admin_token, RELOAD_S).post(RELOAD)
    typer.echo("The fleet file was read again and is in force.")
    for key in answer.get("needs_restart", []):
        typer.echo(f"{key}: what the file says now is in force only after a restart.", err=True)
