"""Tables on standard output: fitted to the terminal, one row per line where there is none to fit."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH_OF_A_PIPE = 10_000


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[Text]], *, right: frozenset[str] = frozenset()
) -> None:
    """Prints `rows` under `headings`; the columns named in `right` hold numbers."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_OF_A_PIPE)
    console.print(table)
