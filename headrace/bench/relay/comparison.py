"""`headrace bench relay` from start to end: the processes, the rounds, and the way out."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

from rich.console import Console

from gateway.file_limit import raise_file_limit
from headrace.bench.figures import Measured, Plan
from headrace.bench.processes import unless_ended
from headrace.bench.relay import figures
from headrace.bench.relay.figures import FIGURES as FIGURES
from headrace.bench.relay.load import Load
from headrace.bench.relay.peers import PEERS
from headrace.bench.relay.programs import Programs, compile_programs
from headrace.bench.relay.rounds import Rounds, Sizes
from headrace.bench.relay.started import Started
from headrace.local.progress import make_progress
from headrace.local.run_dir import RunDir

FULL: Final = Sizes(
    rounds=10,
    cost_s=10.0,
    latency_s=24.0,
    latency_streams=1000,
    latency_chunks=60,
    rss_streams=2000,
    held_streams=figures.HELD_STREAMS,
    hold_s=60.0,
    grpc_streams=100,
)
QUICK: Final = Sizes(
    rounds=3,
    cost_s=0.5,
    latency_s=1.0,
    latency_streams=200,
    latency_chunks=10,
    rss_streams=500,
    held_streams=figures.HELD_STREAMS,
    hold_s=3.0,
    grpc_streams=12,
)
_OTHER_FILES: Final = 500
"""What a proxy has open besides two connections for each stream."""


async def measure(plan: Plan, err: Console) -> Measured:
    """Run the comparison; see `headrace.bench.catalogue.Bench`."""
    sizes = QUICK if plan.quick else FULL
    if plan.hold_s is not None:
        sizes = replace(sizes, hold_s=plan.hold_s)
    asked, left_out = plan.figures, {}
    if plan.quick and asked == figures.EVERYTHING:
        asked = figures.IN_A_MINUTE
        left_out["figures"] = "held streams, workers and those without a bar: name them with --figures"
    with RunDir() as run:
        return await compare(asked, sizes, run, await compile_programs(run), left_out, err)


async def compare(
    asked: frozenset[str],
    sizes: Sizes,
    run: RunDir,
    programs: Programs,
    left_out: dict[str, str],
    err: Console,
    peers: Sequence[str] = tuple(PEERS),
) -> Measured:
    """Start what the figures need, measure, and stop everything; of the peers only those in `peers`.

    Raises:
        BenchError: the gateway answered wrongly.
        LocalFleetError: the gateway or an engine could not be started or ended while it was measured.
    """
    files = raise_file_limit()
    most = (files - _OTHER_FILES) // 2
    if most < sizes.held_streams:
        left_out["more held streams"] = f"this system lets a process open {files} files: {most} streams at most"
        sizes = replace(sizes, held_streams=most, rss_streams=min(sizes.rss_streams, most))
    async with contextlib.AsyncExitStack() as stack:
        sides = Started(run, programs, make_progress(err), stack)
        await sides.start_own(asked)
        for name in figures.needed_peers(asked):
            if name in peers:
                await sides.start_peer(name, left_out)
        sides.progress.close()
        rounds = Rounds(sizes, Load(programs.load, run.path), sides.sides, asked, left_out)
        await unless_ended(sides.supervisor, rounds.run(err))
    return Measured(rounds.figures, {**asdict(sizes), "open_files": files}, left_out)
