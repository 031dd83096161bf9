"""`headrace bench grpc` from start to end: the processes, the rounds, and the way out."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console

from headrace.bench.figures import Measured, Plan
from headrace.bench.kserve.figures import FIGURES as FIGURES
from headrace.bench.kserve.load import Load
from headrace.bench.kserve.rounds import Rounds, Sizes
from headrace.bench.kserve.sides import ENGINE, PROXIES, Ports, address_of, engine_part, proxy_parts
from headrace.bench.processes import unless_ended
from headrace.bench.usage import ProcessTree
from headrace.local.part import Part
from headrace.local.ports import free_ports
from headrace.local.progress import make_progress
from headrace.local.run_dir import RunDir
from headrace.local.supervisor import Supervisor

FULL: Final = Sizes(
    rounds=9,
    unary_calls=5000,
    unary_at_once=16,
    streams=64,
    streams_at_once=4,
    stream_messages=250,
    latency_calls=500,
    tensor_bytes=100 * 1024 * 1024,
)
QUICK: Final = Sizes(
    rounds=3,
    unary_calls=1000,
    unary_at_once=16,
    streams=20,
    streams_at_once=4,
    stream_messages=250,
    latency_calls=100,
    tensor_bytes=100 * 1024 * 1024,
)


async def measure(plan: Plan, err: Console) -> Measured:
    """Run the comparison; see `headrace.bench.catalogue.Bench`."""
    sizes = QUICK if plan.quick else FULL
    ports = Ports(*free_ports(6))
    with RunDir() as run:
        engine = engine_part(run, ports, sizes.stream_messages)
        return await compare(plan.figures, sizes, ports, engine, proxy_parts(run, ports), err)


async def compare(
    asked: frozenset[str], sizes: Sizes, ports: Ports, engine: Part, proxies: Sequence[Part], err: Console
) -> Measured:
    """Start everything, measure, and stop everything; `proxies` are the parts called as in PROXIES.

    Raises:
        BenchError: a side answered wrongly.
        LocalFleetError: a side could not be started or ended while it was measured.
    """
    progress = make_progress(err)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(progress.close)
        supervisor = await stack.enter_async_context(Supervisor(progress))
        await supervisor.start([engine])
        await supervisor.start(proxies)
        progress.close()
        loads = {}
        for side in (ENGINE, *PROXIES):
            loads[side] = Load(side, address_of(side, ports))
            stack.push_async_callback(loads[side].close)
        trees = {side: ProcessTree(supervisor.pid(side)) for side in PROXIES}
        rounds = Rounds(sizes, loads, trees, asked)
        await unless_ended(supervisor, rounds.run(err))
    return Measured(rounds.figures, asdict(sizes))
