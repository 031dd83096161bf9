"""The figures of `headrace bench grpc`, by the stretch of load they come from."""

from typing import Final

from headrace.bench.figures import Figure
from headrace.bench.kserve.sides import GATEWAY, PROXIES


def prefix(side: str) -> str:
    """What the names of a side's own figures begin with."""
    return "" if side == GATEWAY else f"{side}_"


def _per_side(name: str, bar: float | None = None) -> list[Figure]:
    """The figure for each side; the bar is the gateway's."""
    return [Figure(prefix(side) + name, bar if side == GATEWAY else None) for side in PROXIES]


UNARY: Final = [
    Figure("cpu_unary_vs_bare", bar=1.3),
    Figure("cpu_unary_vs_renaming_bare"),
    *_per_side("us_per_unary"),
]
"""CPU time of a ModelInfer."""
STREAM: Final = [
    Figure("cpu_stream_message_vs_bare", bar=1.3),
    Figure("cpu_stream_message_vs_renaming_bare"),
    *_per_side("us_per_stream_message"),
]
"""CPU time of a response on ModelStreamInfer, each stream's opening included."""
LATENCY: Final = _per_side("added_latency_unary_us")
"""Median of one ModelInfer at a time, less the engine's own."""
MEMORY: Final = [
    Figure("peak_rss_100mb_vs_bare", bar=1.3),
    *_per_side("peak_rss_100mb_vs_message"),
    *_per_side("rss_after_100mb_vs_message", bar=1.2),
]
"""Growth of the resident set by a tensor of 100 MiB there and back: at its peak, and what is left of it."""
FIGURES: Final = (*UNARY, *STREAM, *LATENCY, *MEMORY)
