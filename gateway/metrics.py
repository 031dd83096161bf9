"""The gateway's Prometheus metrics.

Labels are bounded by construction: routes, pools and endpoints come from the fleet's documents (a request for a model
that is not there counts under `unknown`), everything else is an enumeration. What describes the present (phases,
requests in flight) is read off the fleet when it is scraped, so it cannot drift from what the router acts on.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.discovered import discovery_trouble
from gateway.relay.accounting import GAP_BOUNDS, Account
from gateway.series import Counters, Examples, Histograms, Rows
from router.fleet import FleetView
from router.state.follower import FleetStatus

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "abort"})
"""Those that are counted by name."""

UNKNOWN_ROUTE = "unknown"
CLIENT_GONE = 499
"""The status under which requests are counted whose client left before the answer was complete (nginx's number)."""


class Metrics(Collector):
    """The metrics of one gateway process, on a registry of their own."""

    def __init__(self) -> None:
        self.requests = Counters("headrace_requests", "Requests answered, by HTTP status.", ("api", "route", "status"))
        self.duration = Histograms(
            "headrace_request_duration_seconds",
            "From the request's head to the last byte of its answer.",
            ("api", "route"),
            _DURATION_BUCKETS,
        )
        self.ttft = Histograms(
            "headrace_time_to_first_token_seconds",
            "From the request's head to the first byte of content sent to the client.",
            ("api", "route"),
            _TTFT_BUCKETS,
        )
        self.attempts = Counters(
            "headrace_attempts",
            "Requests sent to endpoints, by why the endpoint was chosen.",
            ("endpoint", "reason"),
        )
        self.upstream_failures = Counters(
            "headrace_upstream_failures",
            "Requests that failed at an endpoint, by the kind of failure.",
            ("endpoint", "failure"),
        )
        self.retries_refused = Counters(
            "headrace_retries_refused", "Failed requests not tried elsewhere: the retry budget was spent.", ("route",)
        )
        self.limit_refusals = Counters(
            "headrace_limit_refusals",
            "Requests refused for a limit of their tenant, by its kind.",
            ("route", "limit"),
        )
        self.lease_asks = Counters(
            "headrace_lease_asks", "Times the shared store was asked for a part of a limit.", ("outcome",)
        )
        self.overloaded = Counters(
            "headrace_overload_seconds",
            "Seconds for which a process has taken a measure against being short of something.",
            ("measure",),
        )
        self.access_log_dropped = Counters(
            "headrace_access_log_dropped",
            "Lines of the access log lost, because they could not be written, or not fast enough.",
            (),
        )
        self.spans = Counters(
            "headrace_spans",
            "Spans of traced requests: exported, not taken by the collector (failed), or not sent because too many"
            " waited (dropped).",
            ("outcome",),
        )
        self.clients_refused = Counters(
            "headrace_clients_refused",
            "Connections, requests and gRPC calls of clients refused before anything was known of the request, for how"
            " they begin or how many there are.",
            ("reason",),
        )
        self.jwt_checks = Counters(
            "headrace_jwt_checks", "Tokens checked (not those that are remembered), by what came of it.", ("outcome",)
        )
        self.jwks_fetches = Counters(
            "headrace_jwks_fetches", "Times the keys of a trusted issuer were asked for.", ("issuer", "outcome")
        )
        self.queue_wait = Histograms(
            "headrace_queue_wait_seconds",
            "How long requests waited in a route's queue, whatever came of it; without those that never had to.",
            ("route",),
            _TTFT_BUCKETS,
        )
        self.queue_refusals = Counters(
            "headrace_queue_refusals",
            "Requests that a route's queue did not let in, by the reason.",
            ("route", "reason"),
        )
        self.ejections = Counters(
            "headrace_ejections", "Times an endpoint was ejected for failed requests in a row.", ("endpoint",)
        )
        self.gaps = Histograms(
            "headrace_inter_token_seconds",
            "From one read of a stream to the next, which nearly always is from token to token.",
            ("api", "route"),
            GAP_BOUNDS,
        )
        self.tokens = Counters(
            "headrace_tokens",
            "Tokens of answered requests as the engines report them: of prompts (the cached ones among them once more),"
            " and of completions.",
            ("api", "route", "kind"),
        )
        self.finished = Counters(
            "headrace_finished", "Answers by the finish reason the engine gave.", ("api", "route", "reason")
        )
        self.body_bytes = Counters("headrace_response_body_bytes", "Bytes of answers relayed.", ("api", "route"))
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._of_routes = (
            *(self.requests, self.duration, self.ttft, self.retries_refused),
            *(self.gaps, self.tokens, self.finished, self.body_bytes),
            *(self.limit_refusals, self.queue_wait, self.queue_refusals),
        )
        self._of_endpoints = (self.attempts, self.upstream_failures, self.ejections)
        self._families = (
            *(*self._of_routes, *self._of_endpoints, self.overloaded, self.clients_refused),
            *(self.access_log_dropped, self.spans, self.lease_asks),
            *(self.jwt_checks, self.jwks_fetches),
        )
        self._histograms = [family for family in self._families if isinstance(family, Histograms)]
        for family in self._families:
            self.registry.register(family)

    def rows(self) -> dict[str, Rows]:
        """Every counter and histogram as it stands, by the family's name."""
        return {family.name: family.rows() for family in self._families}

    def add(self, rows: dict[str, Rows]) -> None:
        """Add what the `rows` of another process say."""
        for family in self._families:
            family.add(rows.get(family.name, []))

    def examples(self) -> dict[str, Examples]:
        """The histograms' examples, by the family's name."""
        return {family.name: examples for family in self._histograms if (examples := family.examples())}

    def add_examples(self, examples: dict[str, Examples]) -> None:
        """Take over those of another process that are later."""
        for family in self._histograms:
            family.add_examples(examples.get(family.name, []))

    def collect(self) -> Iterator[Metric]:
        """The counters and histograms, exposed as they stand."""
        for family in self._families:
            yield from family.collect()

    def answered(self, api: str, route: str, status: int, seconds: float, ttft: float | None) -> None:
        """Count a request that was answered after `seconds`; `ttft` is the time to its first token if it streamed."""
        self.requests.values[api, route, status] += 1
        self.duration.of((api, route)).observe(seconds)
        if ttft is not None:
            self.ttft.of((api, route)).observe(ttft)

    def exemplify(self, api: str, route: str, seconds: float, ttft: float | None, trace_id: str) -> None:
        """Show the trace of a request that was counted as `answered`."""
        self.duration.of((api, route)).exemplify(seconds, trace_id)
        if ttft is not None:
            self.ttft.of((api, route)).exemplify(ttft, trace_id)

    def accounted(self, api: str, route: str, account: Account) -> None:
        """Count what an answer that has ended said about itself."""
        account.finish()
        tokens = self.tokens.values
        if account.prompt_tokens:
            tokens[api, route, "prompt"] += account.prompt_tokens
            tokens[api, route, "prompt_cached"] += account.cached_tokens
        if account.completion_tokens:
            tokens[api, route, "completion"] += account.completion_tokens
        if reason := account.finish_reason:
            self.finished.values[api, route, reason if reason in FINISH_REASONS else "other"] += 1
        if account.body_bytes:
            self.body_bytes.values[api, route] += account.body_bytes

    def dropped_lines(self, count: int) -> None:
        """Count lines of the access log that are lost."""
        self.access_log_dropped.values[()] += count

    def told_of_spans(self, outcome: str, count: int) -> None:
        """Count spans of which there is an outcome."""
        self.spans.values[outcome,] += count

    def forget_endpoint(self, id_: str) -> None:
        """Drop the series of an endpoint that left the fleet: pods come with ever new names."""
        for family in self._of_endpoints:
            family.forget("endpoint", id_)

    def forget_route(self, name: str) -> None:
        """Drop the series of a route that is no more."""
        for family in self._of_routes:
            family.forget("route", name)


class FleetCollector(Collector):
    """Gauges read off the gateway when it is scraped."""

    def __init__(
        self,
        view: Callable[[], FleetView],
        live_requests: Callable[[], int],
        redis_connected: Callable[[], bool | None],
        shared: Callable[[], FleetStatus],
        queues: Callable[[], Mapping[str, tuple[int, int]]],
        limit_meters: Callable[[], int] | None = None,
    ) -> None:
        """`redis_connected` gives None where no Redis is configured; `shared` how it stands with the shared state;
        `queues`, by route, how many requests wait and how many bytes of theirs; `limit_meters` how many limits are
        held."""
        self._view = view
        self._live_requests = live_requests
        self._redis_connected = redis_connected
        self._shared = shared
        self._queues = queues
        self._limit_meters = limit_meters

    def collect(self) -> Iterator[Metric]:
        live = GaugeMetricFamily("headrace_live_requests", "Client requests being answered.")
        live.add_metric([], self._live_requests())
        yield live
        in_flight = GaugeMetricFamily(
            "headrace_endpoint_in_flight_requests", "Requests at an endpoint.", labels=("endpoint", "pool")
        )
        phase = GaugeMetricFamily(
            "headrace_endpoint_phase", "1 for the phase an endpoint is in.", labels=("endpoint", "pool", "phase")
        )
        for endpoint in self._view().endpoints.values():
            in_flight.add_metric([endpoint.id, endpoint.pool], endpoint.state.in_flight)
            phase.add_metric([endpoint.id, endpoint.pool, endpoint.phase], 1)
        yield in_flight
        yield phase
        length = GaugeMetricFamily("headrace_queue_requests", "Requests that wait.", labels=("route",))
        size = GaugeMetricFamily("headrace_queue_bytes", "Bytes of requests that wait.", labels=("route",))
        waiting = self._queues()
        for route in self._view().routes:
            requests, held = waiting.get(route, (0, 0))
            length.add_metric([route], requests)
            size.add_metric([route], held)
        yield length
        yield size
        if self._limit_meters is not None:
            meters = GaugeMetricFamily("headrace_limit_meters", "Limits of tenants, and of theirs on routes, in use.")
            meters.add_metric([], self._limit_meters())
            yield meters
        connected = self._redis_connected()
        if connected is not None:
            redis = GaugeMetricFamily("headrace_redis_connected", "Whether the shared state is followed.")
            redis.add_metric([], connected)
            yield redis
            differs = GaugeMetricFamily(
                "headrace_file_differs",
                "1 while another gateway's fleet file, a different one, is served.",
            )
            differs.add_metric([], self._shared().file_differs)
            yield differs
            degraded = GaugeMetricFamily(
                "headrace_discovery_degraded",
                "1 while `headrace discovery` tells of trouble, or nothing, in a fleet that has pools with `discover`.",
            )
            degraded.add_metric([], bool(discovery_trouble(self._view(), self._shared())))
            yield degraded
