"""`headrace check FILE`: is this fleet file one that a gateway can start with?

The file alone is judged, not the environment of whoever runs the check: it usually runs on another machine than the
gateway. Findings go to standard output, one a line, in the form editors and CI systems make links of.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from headrace.config import ConfigError, load_fleet, size_text
from router.spec.strict import Problem


class CheckReport(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    file: str
    ok: bool
    errors: list[Problem]
    warnings: list[Problem]
    fleet: str | None = None
    pools: int = 0
    endpoints: int = 0
    routes: int = 0
    tenants: int = 0


def check(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The fleet file, or a folder of them; - for standard input.", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Check a fleet file strictly.

    Names line and path of the mistakes and exits with 1 if there are any. Warnings do not count.

    \b
    Examples:
      headrace check fleet.yaml
      headrace check - < fleet.yaml
    """
    try:
        loaded = load_fleet(file, {})
        report = CheckReport(
            file=str(file), ok=True, errors=[], warnings=loaded.warnings, fleet=loaded.spec.fleet, **loaded.size
        )
    except ConfigError as error:
        report = CheckReport(file=str(file), ok=False, errors=error.problems, warnings=[])
    if as_json:
        typer.echo(msgspec.json.encode(report))
    else:
        for line in _lines(report):
            typer.echo(line)
    if not report.ok:
        raise typer.Exit(1)


def _lines(report: CheckReport) -> list[str]:
    lines = [problem.render(report.file) for problem in report.errors]
    lines += [f"{problem.render(report.file)} (warning)" for problem in report.warnings]
    if report.ok:
        counted = {"pools": report.pools, "endpoints": report.endpoints}
        size = {**counted, "routes": report.routes, "tenants": report.tenants}
        lines.append(f"{report.file}: fleet {report.fleet}: {size_text(size)}")
    return lines
