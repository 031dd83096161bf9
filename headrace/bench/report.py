"""A bench's result as a table for people and as JSON for comparisons over time.

The JSON's names are stable: `bench`, `git`, `machine`, `versions`, `settings`, and `figures` with one number for each
name. The spread is in the table only: figures of two commits are compared by running both, not by an old spread.
"""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.bench.figures import Measured, Summary

_PACKAGES: Final = ("headrace", "aiohttp", "grpcio", "protobuf", "tritonclient", "uvloop")
_GIT_S: Final = 5.0
_GIB: Final = 1024**3


class Result(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    bench: str
    git: str | None
    """Commit of the measured source, with `-dirty` if it had been changed; None outside a checkout."""
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    figures: Mapping[str, float]


def make_result(bench: str, measured: Measured, summaries: Sequence[Summary], *, quick: bool) -> Result:
    """Put a bench's figures together with where they are from."""
    return Result(
        bench=bench,
        git=_git(),
        machine=_machine(),
        versions={"python": platform.python_version(), **_versions()},
        settings={"quick": quick, **measured.settings, "left_out": dict(measured.left_out)},
        figures={summary.figure.name: round(summary.median, 4) for summary in summaries},
    )


def print_table(err: Console, result: Result, summaries: Sequence[Summary], measured: Measured) -> None:
    """Print medians, spread and bars."""
    table = Table(box=None, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for heading in ("median", "min", "max", "bar"):
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            Text(summary.figure.name),
            Text(_short(summary.median), style="bold"),
            Text(_short(summary.smallest)),
            Text(_short(summary.largest)),
            _bar(summary),
        )
    err.print(table)
    rounds = max((summary.rounds for summary in summaries), default=0)
    machine = result.machine
    where = f"{rounds} rounds on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    err.print(Text(f"{where}; commit {result.git or 'unknown'}"))
    for side, reason in measured.left_out.items():
        err.print(Text(f"left out: {side}: {reason}", style="yellow"))


def _bar(summary: Summary) -> Text:
    if summary.figure.bar is None:
        return Text("")
    relation = ">=" if summary.figure.at_least else "<="
    return Text(f"{relation} {_short(summary.figure.bar)}", style="green" if summary.within_bar else "red")


def _short(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _git() -> str | None:
    """None also where git itself is missing."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / _GIB),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
