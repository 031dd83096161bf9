"""The `headrace` command.

Each subcommand lives in a module of its own that is imported only when it runs: `headrace check` in a CI job need not
load a gRPC stack.
"""

import importlib
import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.cli.style import HELP_OPTIONS, PLAIN
from headrace.version import headrace_version

_COMMANDS = {
    "up": ("headrace.cli.up", "up"),
    "gateway": ("headrace.cli.gateway", "gateway"),
    "discovery": ("headrace.cli.discovery", "discovery"),
    "reload": ("headrace.cli.reload", "reload"),
    "check": ("headrace.cli.check", "check"),
    "schema": ("headrace.cli.schema", "schema"),
    "endpoints": ("headrace.cli.endpoints", "endpoints_app"),
    "routes": ("headrace.cli.routes", "routes_app"),
    "requests": ("headrace.cli.requests", "requests_app"),
    "config": ("headrace.cli.config", "config"),
    "log-level": ("headrace.cli.log_level", "log_level_app"),
    "tenants": ("headrace.cli.tenants", "tenants_app"),
    "keys": ("headrace.cli.keys", "keys_app"),
    "bench": ("headrace.cli.bench", "bench"),
}


class _LazyGroup(TyperGroup):
    """A group whose members are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name]
        member = getattr(importlib.import_module(module), name)
        if not isinstance(member, typer.Typer):
            app = typer.Typer(**PLAIN)
            app.command(cmd_name)(member)
            member = app
        command = typer.main.get_command(member)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS, **PLAIN
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {headrace_version()}")
        raise typer.Exit


@app.callback()
def _headrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fleet gateway and router for LLM inference.

    \b
    Examples:
      headrace up                            a fleet to try, on this machine
      headrace check fleet.yaml
      headrace gateway --config fleet.yaml
      headrace endpoints list
    """


def main() -> None:
    """Entry point of the console command."""
    if os.getpid() == 1:  # of a container: such a process ignores what it has no handler for, and it has none yet
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()
