"""The `headrace` command.

Each subcommand lives in a module of its own that is imported only when it runs: `headrace check` in a CI job need not
load a gRPC stack.
"""

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

_COMMANDS = {
    "up": ("headrace.cli.up", "up"),
    "gateway": ("headrace.cli.gateway", "gateway"),
    "check": ("headrace.cli.check", "check"),
    "schema": ("headrace.cli.schema", "schema"),
    "endpoints": ("headrace.cli.endpoints", "endpoints_app"),
    "routes": ("headrace.cli.routes", "routes_app"),
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
            app = typer.Typer(add_completion=False)
            app.command(cmd_name)(member)
            member = app
        command = typer.main.get_command(member)
        command.name = cmd_name
        return command


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _headrace() -> None:
    """Fleet gateway and router for LLM inference."""


def main() -> None:
    """Entry point of the console command."""
    app()
