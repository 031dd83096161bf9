"""The rounds in which the sides take turns, and what each round says about the figures.

Within a round every stretch of load is put to one side after the other before the next stretch begins, starting with
another side each round. Memory comes first, because its growth is counted from what a side held before it ever had many
streams. A peer that answers wrongly is left out of that stretch, with what it answered; the
gateway that does so ends the bench.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import psutil
from rich.console import Console
from rich.text import Text

from headrace.bench.figures import BenchError
from headrace.bench.kserve import messages
from headrace.bench.relay import figures
from headrace.bench.relay.bare_reader import read_bare
from headrace.bench.relay.figures import cost_name, prefix
from headrace.bench.relay.load import Load, Report
from headrace.bench.relay.peers import PEERS
from headrace.bench.relay.sides import DIRECT, GATEWAY, GRPC_ENGINE, TRITON_GRPC, TRITON_HTTP, WORKERS
from headrace.bench.relay.stretches import COMPLETION, GRPC_TOKENS, LATENCY, MODEL, ONE_CHUNK, STREAM, Stretch, held
from headrace.bench.usage import ProcessTree

WARM_UP_S: Final = 0.3
_OPENED_PER_S: Final = 1000
"""How fast held streams are begun: no side is to be measured while it is busy with that."""
_BUSY: Final = 3
"""How many times longer than planned opening streams may take on a busy machine."""
_SETTLE_S: Final = 0.5
"""After the last of them has begun."""
_SAMPLES: Final = 20
_US: Final = 1e6
_KB: Final = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much load a round is."""

    rounds: int
    cost_s: float
    """Of each stretch on each side whose CPU time is measured."""
    latency_s: float
    """In which streams begin; the last ones take as long again as one stream."""
    latency_streams: int
    latency_chunks: int
    rss_streams: int
    held_streams: int
    hold_s: float
    grpc_streams: int


@dataclass(frozen=True, slots=True)
class Side:
    """Where load goes, and the processes whose CPU time and memory it costs."""

    port: int
    tree: ProcessTree


class Rounds:
    """One comparison: give it the sides, let it run, read `figures`."""

    def __init__(
        self, sizes: Sizes, load: Load, sides: Mapping[str, Side], asked: frozenset[str], left_out: dict[str, str]
    ) -> None:
        """`sides` has what the figures asked for need, DIRECT for the engine itself; `left_out` gets wrong answers."""
        self._sizes = sizes
        self._load = load
        self._sides = sides
        self._asked = asked
        self._left_out = left_out
        self._stretch = ""
        """The one that runs."""
        self._dropped: set[str] = set()
        """Peers that answered wrongly in it."""
        self.figures: defaultdict[str, list[float]] = defaultdict(list)
        """For each figure one number per round."""

    async def run(self, err: Console) -> None:
        """Run all rounds that the figures asked for need."""
        await self._memory(figures.rss_sides(self._asked), err)
        for stretch in figures.COST_STRETCHES:

            async def costs(order: Sequence[str], stretch: Stretch = stretch) -> None:
                await self._costs(stretch, order)

            await self._repeat(stretch.name, figures.sides_of(stretch, self._asked), stretch, costs, err)
        await self._repeat("latency", figures.latency_sides(self._asked), ONE_CHUNK, self._latency, err)
        if figures.wants(figures.TRITON_HTTP, self._asked):
            await self._repeat("Triton over HTTP", [GATEWAY], COMPLETION, self._triton_http, err, TRITON_HTTP)
            self._note_ratios(figures.TRITON_HTTP)
        if figures.wants(figures.TRITON_GRPC, self._asked):
            await self._repeat("Triton over gRPC", [GATEWAY], COMPLETION, self._triton_grpc, err)
            self._note_ratios(figures.TRITON_GRPC)
        if figures.wants(figures.WORKERS, self._asked):
            await self._repeat("workers", list(WORKERS), STREAM, self._workers, err)
            self._note_ratios(figures.WORKERS)
        if any(figure.name in self._asked for figure in figures.HELD_FIGURES):
            err.print(Text(f"holding {self._sizes.held_streams} streams for {self._sizes.hold_s:.0f} s", style="dim"))
            await self._hold()

    async def _repeat(
        self,
        what: str,
        sides: Sequence[str],
        warm_up: Stretch,
        work: Callable[[Sequence[str]], Awaitable[None]],
        err: Console,
        *models: str,
    ) -> None:
        """Put `work` to the sides that are there, in all rounds, after a little of the same that is not counted."""
        there = [side for side in sides if side in self._sides]
        self._stretch = what
        self._dropped.clear()
        for side in there:
            for model in (MODEL, *models):
                short = replace(warm_up, gap_us=min(warm_up.gap_us, 1000))
                await self._put(side, short, seconds=WARM_UP_S, model=model)
        for number in range(self._sizes.rounds if there else 0):
            err.print(Text(f"{what}: round {number + 1} of {self._sizes.rounds}", style="dim"))
            left = [side for side in there if side not in self._dropped]
            first = number % max(len(left), 1)
            await work([*left[first:], *left[:first]])

    def _note_ratios(self, comparison: figures.Comparison) -> None:
        pairs = zip(self.figures[comparison.above], self.figures[comparison.below], strict=True)
        self.figures[comparison.ratio.name] = [one / other for one, other in pairs if other]

    async def _cost_us(
        self, side: str, stretch: Stretch, *, model: str = MODEL, streams: int | None = None, piece: str | None = None
    ) -> tuple[float, Report] | None:
        """CPU time of a side's processes per stream, with the load's report; None for a peer that was dropped."""
        tree = self._sides[side].tree
        try:
            before = tree.cpu_seconds()
            report = await self._put(
                side, stretch, seconds=self._sizes.cost_s, model=model, streams=streams, piece=piece
            )
            return ((tree.cpu_seconds() - before) * _US / report.streams, report) if report else None
        except psutil.NoSuchProcess:
            self._drop(side, "it ended while it was measured")
            return None

    async def _costs(self, stretch: Stretch, order: Sequence[str]) -> None:
        cost = {}
        for side in order:
            measured = await self._cost_us(side, stretch)
            if measured is None:
                continue
            cost[side], report = measured
            if side == DIRECT:
                self._note(f"engine_{cost_name(stretch)}", cost[side])
                self._note(f"load_{cost_name(stretch)}", report.cpu_s * _US / report.streams)
            else:
                self._note(prefix(side) + cost_name(stretch), cost[side])
        for ratio in figures.RATIOS:
            if ratio.stretch == stretch and cost.keys() >= {GATEWAY, ratio.side} and cost[ratio.side]:
                self._note(ratio.figure.name, cost[GATEWAY] / cost[ratio.side])

    async def _latency(self, order: Sequence[str]) -> None:
        p99 = {}
        sizes = self._sizes
        stretch = replace(LATENCY, connections=sizes.latency_streams, chunks=sizes.latency_chunks)
        spread_s = stretch.chunks * stretch.gap_us / _US  # begun all at once they would end so, again and again
        for side in order:
            report = await self._put(side, stretch, seconds=sizes.latency_s, ramp_s=spread_s)
            if report is not None:
                p99[side] = report.p99_us
                for name, number in zip(figures.LATENCIES, (report.p50_us, report.p99_us), strict=True):
                    self._note(prefix(side) + name, number)
        ratio = figures.LATENCY_RATIO
        if p99.keys() >= {GATEWAY, ratio.side}:
            self._note(ratio.figure.name, p99[GATEWAY] / p99[ratio.side])

    async def _triton_http(self, _: Sequence[str]) -> None:
        for name, model in ((figures.TRITON_HTTP.above, TRITON_HTTP), (figures.TRITON_HTTP.below, MODEL)):
            measured = await self._cost_us(GATEWAY, COMPLETION, model=model)
            assert measured is not None
            self._note(name, measured[0] / COMPLETION.chunks)

    async def _triton_grpc(self, _: Sequence[str]) -> None:
        streams, chunks = self._sizes.grpc_streams, GRPC_TOKENS.chunks
        measured = await self._cost_us(
            GATEWAY, GRPC_TOKENS, model=TRITON_GRPC, streams=streams, piece=messages.PIECE.decode()
        )
        assert measured is not None
        self._note(figures.TRITON_GRPC.above, measured[0] / chunks)
        cpu_s = await read_bare(self._sides[GRPC_ENGINE].port, streams, GRPC_TOKENS.connections, chunks)
        self._note(figures.TRITON_GRPC.below, cpu_s * _US / (streams * chunks))

    async def _workers(self, order: Sequence[str]) -> None:
        for side in order:
            measured = await self._cost_us(side, STREAM)
            assert measured is not None
            self._note(f"{side}_us_per_stream", measured[0])

    async def _memory(self, sides: Sequence[str], err: Console) -> None:
        before: dict[str, int] = {}
        count = self._sizes.rss_streams

        async def memory(order: Sequence[str]) -> None:
            for side in order:
                tree = self._sides[side].tree
                before.setdefault(side, tree.rss_bytes())
                streams = _bearable(side, count)
                rss = await self._rss_when_open(side, streams)
                if rss is not None:
                    self._note(prefix(side) + figures.RSS, (rss - before[side]) / streams / _KB)

        await self._repeat("memory", sides, ONE_CHUNK, memory, err)

    async def _rss_when_open(self, side: str, count: int) -> int | None:
        """Memory of a side with `count` held streams, in bytes."""
        ramp_s = count / _bearable(side, _OPENED_PER_S)
        seen: list[int] = []

        async def look() -> None:
            await asyncio.sleep(_SETTLE_S)
            seen.append(self._sides[side].tree.rss_bytes())

        stretch = held(count, math.ceil(_BUSY * ramp_s + _SETTLE_S) + 1)
        if await self._put(side, stretch, streams=count, ramp_s=ramp_s, when_open=look) is None:
            return None
        if not seen:
            self._drop(side, f"it did not hold {count} streams at once (a busy machine? run it again)")
        return seen[0] if seen else None

    async def _hold(self) -> None:
        count, hold_s = self._sizes.held_streams, self._sizes.hold_s
        ramp_s = count / _OPENED_PER_S
        tree = self._sides[GATEWAY].tree
        cpu: list[float] = []
        rss: list[int] = []

        async def look() -> None:
            await asyncio.sleep(_SETTLE_S)
            for number in range(_SAMPLES + 1):
                await asyncio.sleep(hold_s / _SAMPLES if number else 0)
                cpu.append(tree.cpu_seconds())
                rss.append(tree.rss_bytes())

        stretch = held(count, math.ceil(ramp_s + hold_s) + 2)
        report = await self._load.run(self._sides[GATEWAY].port, stretch, streams=count, ramp_s=ramp_s, when_open=look)
        self._note(figures.HELD, report.streams if rss else report.most_open)
        self._note(figures.HELD_LOST, report.errors)
        if report.errors:
            self._left_out["held streams that were lost"] = report.first_error
        if rss:
            self._note(figures.HELD_GROWTH, max(rss) / rss[0])
            self._note(figures.HELD_CPU, (cpu[-1] - cpu[0]) * _US / (count * hold_s))

    async def _put(
        self,
        side: str,
        stretch: Stretch,
        *,
        seconds: float = 0.0,
        streams: int | None = None,
        model: str = MODEL,
        ramp_s: float = 0.0,
        piece: str | None = None,
        when_open: Callable[[], Awaitable[None]] | None = None,
    ) -> Report | None:
        """Put load on a side and see that every answer was right; None if it was not, for a peer."""
        if side in self._dropped:
            return None
        if streams is None:
            stretch = replace(stretch, connections=_bearable(side, stretch.connections))
        report = await self._load.run(
            self._sides[side].port,
            stretch,
            seconds=seconds,
            streams=streams,
            ramp_s=ramp_s,
            model=model,
            piece=piece,
            when_open=when_open,
        )
        if report.errors or not report.streams:
            self._drop(
                side, f"{report.errors} of {report.errors + report.streams} answers were wrong: {report.first_error}"
            )
            return None
        return report

    def _drop(self, side: str, why: str) -> None:
        if side not in PEERS:
            raise BenchError(f"{side} in {self._stretch}: {why}")
        self._dropped.add(side)
        self._left_out[f"{side} in {self._stretch}"] = why

    def _note(self, figure: str, number: float) -> None:
        self.figures[figure].append(number)


def _bearable(side: str, count: int) -> int:
    """How many of `count` streams a side is given."""
    return max(1, count // 10) if side in PEERS and PEERS[side].slow else count
