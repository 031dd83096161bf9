"""`headrace bench NAME`: measure headrace beside what it is compared with, on this machine.

Everything is started for the run on loopback and stopped with it. The table goes to standard error; what a program
reads goes to the files that were asked for.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.bench.catalogue import NAMES
from headrace.bench.figures import BenchError
from headrace.bench.run import run_bench
from headrace.local.errors import LocalFleetError


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"Which bench: {', '.join(NAMES)}.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="End within a minute: three short rounds.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.", show_default=False)
    ] = None,
    plot_folder: Annotated[
        Path | None, typer.Option("--plot", metavar="DIR", help="Draw the figures into DIR.", show_default=False)
    ] = None,
    figures: Annotated[
        str | None,
        typer.Option("--figures", metavar="A,B", help="Measure these figures only.", show_default=False),
    ] = None,
    hold_s: Annotated[
        float | None,
        typer.Option("--hold", metavar="SECONDS", min=1, help="How long held streams are held.", show_default=False),
    ] = None,
) -> None:
    """Run a reproducible comparison and report its figures.

    Example: headrace bench grpc --quick --json grpc.json
    """
    err = Console(stderr=True)
    try:
        status = run_bench(
            name, figures, quick=quick, json_file=json_file, plot_folder=plot_folder, err=err, hold_s=hold_s
        )
    except (BenchError, LocalFleetError) as error:
        err.print(f"headrace bench: {error}", style="red", soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(error.exit_code if isinstance(error, LocalFleetError) else 2) from None
    raise typer.Exit(status)
