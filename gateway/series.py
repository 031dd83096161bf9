"""Counters and histograms that cost the request path a dictionary look-up and an addition.

prometheus_client's own take a lock and, for their labels, a tuple of strings per increment, for threads that a gateway
does not have: several microseconds a request, which is more than routing it. So values are kept in plain dictionaries
by their labels and become prometheus_client's families when they are scraped; what is exposed, and how, is left to it.

Being plain numbers, they also travel: a family's `rows` in one process are added to the same family in another, which
is how several processes are scraped as one.

A histogram can have exemplars: of each bucket the last observation that somebody has said a trace of. Scrapers get them
who ask for OpenMetrics; the older text format has no place for them.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str | int, ...]
"""Values of a family's labels, in their order."""
Rows = list[tuple[Labels, tuple[float, ...]]]
"""The series of a family: of a counter its value, of a histogram its buckets' counts and then its total."""


class Example(NamedTuple):
    """An observation of a traced request."""

    trace_id: str
    """In hexadecimal."""
    value: float
    at: float
    """Unix time."""


Examples = list[tuple[Labels, dict[int, Example]]]
"""The examples of a family of histograms, by series and by the bucket's place."""


class Counters(Collector):
    """A family of counters: `counters.values[labels] += 1`."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self.name = name
        self._described = name, documentation
        self._labels = tuple(labels)
        self.values: defaultdict[Labels, float] = defaultdict(float)

    def forget(self, label: str, value: str) -> None:
        """Drop the series in which `label` has `value`."""
        _forget(self.values, self._labels.index(label), value)

    def rows(self) -> Rows:
        return [(labels, (value,)) for labels, value in self.values.items()]

    def add(self, rows: Rows) -> None:
        """Add what another process has counted."""
        for labels, (value,) in rows:
            self.values[labels] += value

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(*self._described, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric([str(label) for label in labels], value)
        yield family


class Histogram:
    """One series of a family of histograms."""

    __slots__ = ("_bounds", "counts", "examples", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations in each bucket, not those below it; the last one is above every bound."""
        self.total = 0.0
        self.examples: dict[int, Example] = {}
        """The last one of each bucket that has one."""

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def exemplify(self, value: float, trace_id: str) -> None:
        """Show the trace of what has been observed."""
        self.examples[bisect_left(self._bounds, value)] = Example(trace_id, value, time.time())


class Histograms(Collector):
    """A family of histograms: `histograms.of(labels).observe(seconds)`."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        """`bounds` are the upper ends of the buckets, ascending, without infinity."""
        self.name = name
        self._described = name, documentation
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self.values: dict[Labels, Histogram] = {}

    def of(self, labels: Labels) -> Histogram:
        """The series with these labels."""
        series = self.values.get(labels)
        if series is None:
            series = self.values[labels] = Histogram(self._bounds)
        return series

    def forget(self, label: str, value: str) -> None:
        """Drop the series in which `label` has `value`."""
        _forget(self.values, self._labels.index(label), value)

    def rows(self) -> Rows:
        return [(labels, (*series.counts, series.total)) for labels, series in self.values.items()]

    def add(self, rows: Rows) -> None:
        """Add what another process has observed."""
        for labels, (*counts, total) in rows:
            series = self.of(labels)
            series.counts = [one + int(other) for one, other in zip(series.counts, counts, strict=True)]
            series.total += total

    def examples(self) -> Examples:
        return [(labels, series.examples) for labels, series in self.values.items() if series.examples]

    def add_examples(self, examples: Examples) -> None:
        """Take over those of another process that are later."""
        for labels, others in examples:
            own = self.of(labels).examples
            for bucket, other in others.items():
                if bucket not in own or own[bucket].at < other.at:
                    own[bucket] = other

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._described, labels=self._labels)
        for labels, series in self.values.items():
            counts = zip(self._names, accumulate(series.counts), strict=True)
            buckets = [
                _bucket(name, float(count), series.examples.get(place)) for place, (name, count) in enumerate(counts)
            ]
            family.add_metric([str(label) for label in labels], buckets, series.total)
        yield family


def _bucket(name: str, count: float, example: Example | None) -> tuple[str, float] | tuple[str, float, Exemplar]:
    if example is None:
        return name, count
    return name, count, Exemplar({"trace_id": example.trace_id}, example.value, example.at)


def _forget(values: dict[Labels, float] | dict[Labels, Histogram], place: int, value: str) -> None:
    for labels in [labels for labels in values if labels[place] == value]:
        del values[labels]
