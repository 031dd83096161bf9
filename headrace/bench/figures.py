"""What a bench measures: figures with stable names, one number for each round, and what is made of them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


class BenchError(Exception):
    """A bench cannot run as asked. The message is one sentence for the person who started it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number a bench reports. The name says its unit, or what it is a ratio to."""

    name: str
    bar: float | None = None
    """The largest value that is good enough, where there is one."""
    at_least: bool = False
    """`bar` is the smallest one instead."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked of a bench."""

    figures: frozenset[str]
    quick: bool
    hold_s: float | None = None
    """How long held streams are held, where a bench holds some; None: as long as it thinks right."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a bench found."""

    rounds: Mapping[str, Sequence[float]]
    """For each figure one number per round."""
    settings: Mapping[str, Any]
    """Sizes and counts that a repetition has to share; JSON values."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What was not measured, each with the reason: a side that is not installed with what would install it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A figure over its rounds."""

    figure: Figure
    median: float
    smallest: float
    largest: float
    rounds: int

    @property
    def within_bar(self) -> bool | None:
        """Whether the median is good enough; None where nothing says what that is."""
        if self.figure.bar is None:
            return None
        return self.median >= self.figure.bar if self.figure.at_least else self.median <= self.figure.bar


def choose(figures: Sequence[Figure], asked: str | None) -> frozenset[str]:
    """The names in the comma-separated `asked`, all of them without it.

    Raises:
        BenchError: a name is none of the bench's.
    """
    known = [figure.name for figure in figures]
    if asked is None:
        return frozenset(known)
    names = [name.strip() for name in asked.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"no figure {', '.join(unknown)}" if unknown else "no figure was named"
        raise BenchError(f"{what}: choose from {', '.join(known)}")
    return frozenset(names)


def summarize(figures: Sequence[Figure], asked: Collection[str], measured: Measured) -> list[Summary]:
    """Summaries of the figures asked for that have numbers, in the bench's order."""
    return [
        Summary(figure, median(numbers), min(numbers), max(numbers), len(numbers))
        for figure in figures
        if figure.name in asked and (numbers := measured.rounds.get(figure.name))
    ]
