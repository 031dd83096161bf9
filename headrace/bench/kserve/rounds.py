"""The rounds in which the sides take turns, and what each round says about the figures.

Within a round every stretch of load (calls, streams, single calls for latency) is put to one side after the other
before the next stretch begins, starting with another side each round. Memory comes last, in rounds of its own, because
its growth is counted from what a side held before its first large tensor.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from rich.console import Console
from rich.text import Text

from headrace.bench.figures import Figure
from headrace.bench.kserve.figures import LATENCY, MEMORY, STREAM, UNARY, prefix
from headrace.bench.kserve.load import Load
from headrace.bench.kserve.sides import BARE, ENGINE, GATEWAY, PROXIES, RENAMING
from headrace.bench.usage import ProcessTree

SETTLE_S: Final = 1.0
"""What a side has after a large tensor to give memory back."""
_WARM_UP_CALLS: Final = 200
_US: Final = 1e6


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much load a round is."""

    rounds: int
    unary_calls: int
    unary_at_once: int
    streams: int
    streams_at_once: int
    stream_messages: int
    latency_calls: int
    tensor_bytes: int


class Rounds:
    """One comparison: give it the sides, let it run, read `figures`."""

    def __init__(
        self, sizes: Sizes, loads: Mapping[str, Load], trees: Mapping[str, ProcessTree], asked: frozenset[str]
    ) -> None:
        """`loads` has a client for every proxy and for the engine, `trees` the processes of every proxy."""
        self._sizes = sizes
        self._loads = loads
        self._trees = trees
        self._asked = asked
        self.figures: defaultdict[str, list[float]] = defaultdict(list)
        """For each figure one number per round."""

    async def run(self, err: Console) -> None:
        """Run all rounds that the figures asked for need."""
        stretches = [
            (UNARY, self._unary),
            (STREAM, self._stream),
            (LATENCY, self._latency),
        ]
        wanted = [stretch for figures, stretch in stretches if self._wanted(figures)]
        if wanted:
            await self._warm_up()
            await self._repeat(wanted, "CPU and latency", err)
        if self._wanted(MEMORY):
            before = {side: tree.rss_bytes() for side, tree in self._trees.items()}

            async def memory(order: list[str]) -> None:
                await self._memory(order, before)

            await self._repeat([memory], "memory", err)

    async def _warm_up(self) -> None:
        """A process's first calls pay for connections and for code that has not run yet."""
        sizes = self._sizes
        for load in self._loads.values():
            if self._wanted((*UNARY, *LATENCY)):
                await load.unary(_WARM_UP_CALLS, sizes.unary_at_once)
            if self._wanted(STREAM):
                await load.streams(sizes.streams_at_once, sizes.streams_at_once, sizes.stream_messages)

    def _wanted(self, figures: Collection[Figure]) -> bool:
        return any(figure.name in self._asked for figure in figures)

    async def _repeat(
        self, stretches: Collection[Callable[[list[str]], Awaitable[None]]], what: str, err: Console
    ) -> None:
        for number in range(self._sizes.rounds):
            err.print(Text(f"{what}: round {number + 1} of {self._sizes.rounds}", style="dim"))
            first = number % len(PROXIES)
            for stretch in stretches:
                await stretch([*PROXIES[first:], *PROXIES[:first]])

    async def _unary(self, order: list[str]) -> None:
        sizes = self._sizes
        cost = {
            side: await self._cpu_us(side, self._loads[side].unary(sizes.unary_calls, sizes.unary_at_once))
            / sizes.unary_calls
            for side in order
        }
        self._note_costs(cost, "us_per_unary", "cpu_unary")

    async def _stream(self, order: list[str]) -> None:
        sizes = self._sizes
        messages = sizes.streams * sizes.stream_messages
        cost = {}
        for side in order:
            load = self._loads[side].streams(sizes.streams, sizes.streams_at_once, sizes.stream_messages)
            cost[side] = await self._cpu_us(side, load) / messages
        self._note_costs(cost, "us_per_stream_message", "cpu_stream_message")

    async def _latency(self, order: list[str]) -> None:
        calls = self._sizes.latency_calls
        seconds = {side: median(await self._loads[side].unary(calls, 1)) for side in (ENGINE, *order)}
        for side in order:
            self._note(prefix(side) + "added_latency_unary_us", (seconds[side] - seconds[ENGINE]) * _US)

    async def _memory(self, order: list[str], before: Mapping[str, int]) -> None:
        size = self._sizes.tensor_bytes
        growth = {}
        for side in order:
            tree = self._trees[side]
            with tree.peak_rss() as peak:
                await self._loads[side].tensor(size)
            growth[side] = peak.bytes - before[side]
            await asyncio.sleep(SETTLE_S)
            self._note(f"{prefix(side)}peak_rss_100mb_vs_message", growth[side] / size)
            self._note(f"{prefix(side)}rss_after_100mb_vs_message", (tree.rss_bytes() - before[side]) / size)
        self._note("peak_rss_100mb_vs_bare", growth[GATEWAY] / growth[BARE])

    async def _cpu_us(self, side: str, load: Awaitable[object]) -> float:
        tree = self._trees[side]
        before = tree.cpu_seconds()
        await load
        return (tree.cpu_seconds() - before) * _US

    def _note_costs(self, cost: Mapping[str, float], own: str, ratio: str) -> None:
        for side in PROXIES:
            self._note(prefix(side) + own, cost[side])
        for yardstick in (BARE, RENAMING):
            self._note(f"{ratio}_vs_{yardstick}", cost[GATEWAY] / cost[yardstick])

    def _note(self, figure: str, number: float) -> None:
        self.figures[figure].append(number)
