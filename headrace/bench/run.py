"""One bench from start to end: run it under signals that end it in order, then hand out what it found."""

import asyncio
import signal
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from headrace.bench.catalogue import Bench, find_bench
from headrace.bench.figures import BenchError, Measured, Plan, choose, summarize
from headrace.bench.plot import write_plot
from headrace.bench.report import make_result, print_table

INTERRUPTED: Final = 130


def run_bench(
    name: str,
    figures: str | None,
    *,
    quick: bool,
    json_file: Path | None,
    plot_folder: Path | None,
    err: Console,
    hold_s: float | None = None,
) -> int:
    """Run the bench, print its table to `err` and write what is wanted; return the exit status.

    Raises:
        BenchError, LocalFleetError: it cannot run as asked, or a side failed.
    """
    bench = find_bench(name)
    asked = choose(bench.FIGURES, figures)
    measured = asyncio.run(_measure(bench, Plan(asked, quick, hold_s), err))
    if measured is None:
        return INTERRUPTED
    summaries = summarize(bench.FIGURES, asked, measured)
    result = make_result(name, measured, summaries, quick=quick)
    print_table(err, result, summaries, measured)
    try:
        if json_file is not None:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        if plot_folder is not None:
            write_plot(plot_folder, name, summaries)
    except OSError as error:
        raise BenchError(f"cannot write {error.filename}: {error.strerror}") from None
    return 0


async def _measure(bench: Bench, plan: Plan, err: Console) -> Measured | None:
    """None if a signal ended it; the context managers inside have then stopped what ran."""
    received: list[signal.Signals] = []
    task = asyncio.current_task()
    assert task is not None

    def end(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await bench.measure(plan, err)
    except asyncio.CancelledError:
        if not received:
            raise
        err.print(f"headrace bench: ended by {received[0].name} before it was done", highlight=False)
        return None
