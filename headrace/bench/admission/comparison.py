"""`headrace bench admission`: what a request's way in costs, by gateways that differ in what they have on.

Every gateway is put the same load, one after the other in each round, and every figure is formed within its round: the
cost of a part of admission is what the gateway that has it takes more than the one that has not.
"""

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console
from rich.text import Text

from headrace.bench.admission.fronts import (
    ALL,
    FRONTS,
    KEYS,
    LIMITS,
    OFF,
    OIDC,
    QUEUE,
    Issuer,
    front_part,
    front_spec,
    headers_of,
    running_issuer,
)
from headrace.bench.figures import BenchError, Figure, Measured, Plan
from headrace.bench.processes import unless_ended
from headrace.bench.relay.load import Load, Report
from headrace.bench.relay.programs import Programs, compile_programs
from headrace.bench.relay.rounds import WARM_UP_S, Side
from headrace.bench.relay.sides import ENGINE, Engines, engine_part
from headrace.bench.relay.stretches import ONE_CHUNK
from headrace.bench.usage import ProcessTree
from headrace.local.parts import valkey_part
from headrace.local.ports import free_ports
from headrace.local.progress import make_progress
from headrace.local.run_dir import RunDir
from headrace.local.supervisor import Supervisor
from headrace.local.wheels import find_valkey

_US: Final = 1e6
RATIOS: Final = (
    (Figure("cpu_keys_and_limits_vs_off", bar=1.2), LIMITS, OFF),
    (Figure("cpu_admission_vs_off"), ALL, OFF),
)
"""Figures that are how many times what one front costs another does."""
OFF_FIGURE: Final = Figure("us_off")
DIFFERENCES: Final = (
    (Figure("us_admission", bar=40.0), ALL, OFF),
    (Figure("us_oidc_cached", bar=60.0), OIDC, OFF),
    (Figure("us_keys"), KEYS, OFF),
    (Figure("us_limits"), LIMITS, KEYS),
    (Figure("us_queue"), QUEUE, OFF),
)
"""Figures that are what one front costs more than another."""
FIGURES: Final = (*(figure for figure, _, _ in RATIOS), OFF_FIGURE, *(figure for figure, _, _ in DIFFERENCES))


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much load a round is: little, in many rounds, so that what else is done on the machine meets all alike."""

    rounds: int
    cost_s: float
    """Of load on each front."""


FULL: Final = Sizes(rounds=40, cost_s=1.0)
QUICK: Final = Sizes(rounds=9, cost_s=0.5)


async def measure(plan: Plan, err: Console) -> Measured:
    """Run the comparison; see `headrace.bench.catalogue.Bench`."""
    sizes = QUICK if plan.quick else FULL
    with RunDir() as run:
        return await compare(plan.figures, sizes, run, await compile_programs(run), err)


async def compare(asked: frozenset[str], sizes: Sizes, run: RunDir, programs: Programs, err: Console) -> Measured:
    """Start what the figures need, measure, and stop everything.

    Raises:
        BenchError: a gateway answered wrongly.
        LocalFleetError: Valkey, the engine or a gateway could not be started or ended while it was measured.
    """
    fronts = needed(asked)
    progress = make_progress(err)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(progress.close)
        issuer = await stack.enter_async_context(running_issuer())
        supervisor = await stack.enter_async_context(Supervisor(progress))
        engine, unused, valkey, *ports = free_ports(3 + 2 * len(fronts))
        await supervisor.start(
            [engine_part(run, programs, Engines(engine, unused)), valkey_part(find_valkey(), run, valkey)]
        )
        http = dict(zip(fronts, ports[::2], strict=True))
        admin = dict(zip(fronts, ports[1::2], strict=True))
        await supervisor.start(
            [
                front_part(
                    run, name, front_spec(name, engine, valkey, issuer, http[name], admin[name]),
                    headers_of(name, issuer),
                )
                for name in fronts
            ]
        )  # fmt: skip
        progress.close()
        sides = {name: Side(http[name], ProcessTree(supervisor.pid(name))) for name in fronts}
        rounds = Rounds(sizes, Load(programs.load, run.path), sides, issuer)
        await unless_ended(supervisor, rounds.run(err))
    return Measured(rounds.figures, {**asdict(sizes), "connections": ONE_CHUNK.connections, "engine": ENGINE})


def needed(asked: frozenset[str]) -> list[str]:
    """The fronts without which a figure asked for cannot be measured."""
    wanted = {name for figure, *names in (*RATIOS, *DIFFERENCES) if figure.name in asked for name in names}
    if OFF_FIGURE.name in asked:
        wanted.add(OFF)
    return [name for name in FRONTS if name in wanted]


class Rounds:
    """The rounds in which the fronts take turns: let it run, read `figures`."""

    def __init__(self, sizes: Sizes, load: Load, sides: Mapping[str, Side], issuer: Issuer) -> None:
        self._sizes = sizes
        self._load = load
        self._sides = sides
        self._headers = {name: headers_of(name, issuer) for name in sides}
        self.figures: defaultdict[str, list[float]] = defaultdict(list)
        """For each figure one number per round."""

    async def run(self, err: Console) -> None:
        """Run all rounds."""
        order = list(self._sides)
        for number in range(self._sizes.rounds):
            err.print(Text(f"round {number + 1} of {self._sizes.rounds}", style="dim"))
            self._note({name: await self._cost_us(name, self._sizes.cost_s) for name in order})
            order = [*order[1:], order[0]]

    async def _cost_us(self, name: str, seconds: float) -> float:
        """CPU time of a gateway's processes per request."""
        side = self._sides[name]
        await self._put(name, WARM_UP_S)  # a tenant that was away begins with asking for leases
        before = side.tree.cpu_seconds()
        report = await self._put(name, seconds)
        return (side.tree.cpu_seconds() - before) * _US / report.streams

    async def _put(self, name: str, seconds: float) -> Report:
        report = await self._load.run(self._sides[name].port, ONE_CHUNK, seconds=seconds, headers=self._headers[name])
        if report.errors or not report.streams:
            raise BenchError(
                f"{name}: {report.errors} of {report.errors + report.streams} answers were wrong: {report.first_error}"
            )
        return report

    def _note(self, cost: Mapping[str, float]) -> None:
        if OFF in cost:
            self.figures[OFF_FIGURE.name].append(cost[OFF])
        for figure, above, below in RATIOS:
            if cost.keys() >= {above, below}:
                self.figures[figure.name].append(cost[above] / cost[below])
        for figure, above, below in DIFFERENCES:
            if cost.keys() >= {above, below}:
                self.figures[figure.name].append(cost[above] - cost[below])
