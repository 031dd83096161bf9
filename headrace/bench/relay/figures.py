"""The figures of `headrace bench relay`, by the stretch of load they come from, and which sides each of them needs."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from headrace.bench.figures import Figure
from headrace.bench.relay.peers import HAPROXY, NGINX, PEERS, SMG
from headrace.bench.relay.sides import DIRECT, GATEWAY
from headrace.bench.relay.stretches import LONG_STREAM, ONE_CHUNK, PROMPT_8K, PROMPT_100K, STREAM, Stretch

SIDES: Final = (GATEWAY, *PEERS)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure that is the gateway's number over another side's, in the same round."""

    figure: Figure
    stretch: Stretch | None
    """Of which the CPU time per stream is compared; None for latency."""
    side: str


RATIOS: Final = (
    Ratio(Figure("cpu_64chunk_vs_nginx", bar=2.0), STREAM, NGINX),
    Ratio(Figure("cpu_64chunk_vs_smg", bar=0.75), STREAM, SMG),
    Ratio(Figure("cpu_1chunk_vs_smg", bar=0.9), ONE_CHUNK, SMG),
    Ratio(Figure("cpu_100k_prompt_vs_smg", bar=0.7), PROMPT_100K, SMG),
)
COST_STRETCHES: Final = (STREAM, LONG_STREAM, ONE_CHUNK, PROMPT_8K, PROMPT_100K)
LATENCY_RATIO: Final = Ratio(Figure("added_latency_p99_vs_nginx", bar=2.0), None, NGINX)
LATENCY_SIDES: Final = (GATEWAY, NGINX, HAPROXY, SMG, DIRECT)
LATENCIES: Final = ("added_latency_p50_us", "added_latency_p99_us")
RSS: Final = "rss_per_stream_kb"
RSS_BAR_KB: Final = 22.0

HELD, HELD_LOST, HELD_GROWTH, HELD_CPU = "held_streams", "held_streams_lost", "held_rss_vs_first", "held_us_per_chunk"
HELD_STREAMS: Final = 9500
HELD_FIGURES: Final = (
    Figure(HELD, bar=HELD_STREAMS, at_least=True),
    Figure(HELD_LOST, bar=0),
    Figure(HELD_GROWTH),
    Figure(HELD_CPU),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of two figures that have no side of their own."""

    ratio: Figure
    above: str
    """The figure above the line."""
    below: str


TRITON_HTTP: Final = Comparison(
    Figure("cpu_triton_token_vs_openai", bar=2.5), "triton_http_us_per_token", "openai_us_per_token"
)
TRITON_GRPC: Final = Comparison(
    Figure("cpu_triton_grpc_token_vs_grpc_aio", bar=1.3), "triton_grpc_us_per_token", "grpc_aio_us_per_token"
)
WORKERS: Final = Comparison(
    Figure("cpu_2_workers_vs_1", bar=1.15), "two_workers_us_per_stream", "one_worker_us_per_stream"
)


def prefix(side: str) -> str:
    """What the names of a side's own figures begin with."""
    return "" if side == GATEWAY else f"{side}_"


def cost_name(stretch: Stretch) -> str:
    """What a side's cost in a stretch is called, without the side's prefix."""
    return f"us_per_stream_{stretch.name}"


def sides_of(stretch: Stretch, asked: Collection[str]) -> list[str]:
    """The sides whose cost in the stretch has to be known for the figures asked for; DIRECT among them."""
    wanted = {side for side in SIDES if prefix(side) + cost_name(stretch) in asked}
    for ratio in RATIOS:
        if ratio.stretch == stretch and ratio.figure.name in asked:
            wanted |= {GATEWAY, ratio.side}
    if any(f"{who}_{cost_name(stretch)}" in asked for who in ("engine", "load")):
        wanted.add(DIRECT)
    return [side for side in (*SIDES, DIRECT) if side in wanted]


def latency_sides(asked: Collection[str]) -> list[str]:
    """As `sides_of`, for the latency of chunks."""
    wanted = {side for side in LATENCY_SIDES for name in LATENCIES if prefix(side) + name in asked}
    if LATENCY_RATIO.figure.name in asked:
        wanted |= {GATEWAY, LATENCY_RATIO.side}
    return [side for side in LATENCY_SIDES if side in wanted]


def rss_sides(asked: Collection[str]) -> list[str]:
    """As `sides_of`, for the memory of held streams."""
    return [side for side in SIDES if prefix(side) + RSS in asked]


def needed_peers(asked: Collection[str]) -> list[str]:
    """The peers without which a figure asked for cannot be measured."""
    wanted = {side for stretch in COST_STRETCHES for side in sides_of(stretch, asked)}
    wanted |= {*latency_sides(asked), *rss_sides(asked)}
    return [peer for peer in PEERS if peer in wanted]


def wants(comparison: Comparison, asked: Collection[str]) -> bool:
    """Whether any of its figures is asked for."""
    return not {comparison.ratio.name, comparison.above, comparison.below}.isdisjoint(asked)


def _figures() -> list[Figure]:
    figures = [ratio.figure for ratio in RATIOS]
    for stretch in COST_STRETCHES:
        figures += [Figure(prefix(side) + cost_name(stretch)) for side in SIDES]
        figures += [Figure(f"{who}_{cost_name(stretch)}") for who in ("engine", "load")]
    figures.append(LATENCY_RATIO.figure)
    figures += [Figure(prefix(side) + name) for name in LATENCIES for side in LATENCY_SIDES]
    figures += [Figure(prefix(side) + RSS, bar=RSS_BAR_KB if side == GATEWAY else None) for side in SIDES]
    figures += HELD_FIGURES
    for one in (TRITON_HTTP, TRITON_GRPC, WORKERS):
        figures += [one.ratio, Figure(one.above), Figure(one.below)]
    return figures


FIGURES: Final = tuple(_figures())
EVERYTHING: Final = frozenset(figure.name for figure in FIGURES)
IN_A_MINUTE: Final = frozenset(
    figure.name for figure in FIGURES if figure.bar is not None and figure not in (*HELD_FIGURES, WORKERS.ratio)
)
"""What a quick run measures unless it is told what: opening and ending thousands of streams takes half a minute."""
