"""How the help of all commands looks: plain text, which also reads well in a log, a pipe and a narrow terminal."""

from typing import Any, Final

PLAIN: Final[dict[str, Any]] = {"rich_markup_mode": None, "add_completion": False}
"""For every `typer.Typer`: they do not inherit it."""
HELP_OPTIONS: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"]}
"""For the outermost one: its members inherit it."""
