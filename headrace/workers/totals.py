"""Many workers' reports as one gateway.

- **Counters and histograms** are added. When a worker ends, what it had counted goes into a base: sums only grow.
- **Requests in flight** are added, over every worker that still has some.
- **An endpoint's phase** is the best that a serving worker sees it in: the gateway is to get traffic as long as one of
  its workers can serve it, and an endpoint is down when it is down for all. Where they differ, the detail says so.
- **CPU time, memory and descriptors** are added over the workers and the supervisor, dead workers' CPU time included,
  as the limits of a container are about all of them. Memory they share counts once for each.

A worker's gauges vanish with it.
"""

import resource
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.metrics import Metrics
from headrace.workers.channel import Report
from router.fleet import FleetView, Phase

_FROM_BEST_TO_WORST: tuple[Phase, ...] = ("ready", "draining", "warming", "starting", "preempting", "unhealthy")


def take_over(view: FleetView, reports: Collection[tuple[Report, bool]]) -> None:
    """Set the states of `view`'s endpoints to what the workers report of them, each with whether it serves."""
    for id_, endpoint in view.endpoints.items():
        told = [(serving, report.endpoints[id_]) for report, serving in reports if id_ in report.endpoints]
        state = endpoint.state
        state.in_flight = sum(one.in_flight for _, one in told)
        opinions = [one for serving, one in told if serving]
        if not opinions:
            state.phase, state.detail = "starting", "no worker knows it yet"
            continue
        opinions.sort(key=lambda one: _FROM_BEST_TO_WORST.index(one.phase))
        best, worst = opinions[0], opinions[-1]
        state.phase, state.detail = best.phase, best.detail
        if differing := [one for one in opinions if one.phase != best.phase]:
            seen = f"{worst.phase} for {len(differing)} of {len(opinions)} workers: {worst.detail}"
            state.detail = f"{best.detail}; {seen}" if best.detail else seen


class Totals(Collector):
    """The counters and histograms of all workers there are and were."""

    def __init__(self, reports: Callable[[], Iterable[Report]]) -> None:
        self._base = Metrics()
        self._reports = reports

    def ended(self, last: Report) -> None:
        """Keep what a worker that is no more had counted."""
        self._base.add(last.rows)
        self._base.add_examples(last.examples)

    def followed(self, before: FleetView, after: FleetView) -> None:
        """Drop the series of what left the fleet, as the workers do."""
        for id_ in before.endpoints.keys() - after.endpoints.keys():
            self._base.forget_endpoint(id_)
        for name in before.routes.keys() - after.routes.keys():
            self._base.forget_route(name)

    def collect(self) -> Iterator[Metric]:
        total = Metrics()
        total.add(self._base.rows())
        total.add_examples(self._base.examples())
        for report in self._reports():
            total.add(report.rows)
            total.add_examples(report.examples)
        yield from total.collect()


class Processes(Collector):
    """What the supervisor and its workers use together: the families of prometheus_client's ProcessCollector, added."""

    def __init__(self, workers: Callable[[], Iterable[int]]) -> None:
        """`workers` gives their process ids."""
        self._workers = workers
        self._own = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        added = {"process_cpu_seconds": ended.ru_utime + ended.ru_stime}
        for pid in self._workers():
            for family in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                added[family.name] = added.get(family.name, 0.0) + sum(sample.value for sample in family.samples)
        for family in self._own.collect():
            if family.name != "process_start_time_seconds":
                family.samples = [
                    sample._replace(value=sample.value + added.get(family.name, 0.0)) for sample in family.samples
                ]
            yield family


class WorkerCounts(Collector):
    """How many workers there are to be, how many serve, and how often one was replaced."""

    def __init__(self, configured: int, serving: Callable[[], int], restarts: Callable[[], int]) -> None:
        self._configured = configured
        self._serving = serving
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("headrace_workers", "Worker processes configured.", self._configured)
        yield GaugeMetricFamily("headrace_workers_serving", "Worker processes that take requests.", self._serving())
        yield CounterMetricFamily(
            "headrace_worker_restarts", "Worker processes started in the place of one that ended.", self._restarts()
        )
