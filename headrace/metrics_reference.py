"""The page about the metrics (`docs/metrics.md`), made from the families that a gateway registers.

Names, types and meanings are what a scrape exposes; which values a label can have is said here, from the types that its
values are taken from. `python -m headrace.metrics_reference` prints the page.
"""

from collections.abc import Iterator
from typing import get_args

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from gateway.http.client_addresses import Refusal
from gateway.http.front import MODELS, OTHER
from gateway.kserve import API as KSERVE
from gateway.metrics import CLIENT_GONE, FINISH_REASONS, UNKNOWN_ROUTE, FleetCollector, Metrics
from gateway.oidc.callers import Outcome
from gateway.upstream.base import Failure
from headrace.workers.totals import WorkerCounts
from router.admission.limits import KINDS
from router.admission.tickets import Reason as Refused
from router.fleet import FleetView, Phase
from router.overload import Measure
from router.plan import Reason
from router.prompt import Api
from router.state.follower import FleetStatus

_APIS = (*get_args(Api), KSERVE, MODELS, OTHER)
_LABELS: dict[str, str | tuple[str, ...]] = {
    "api": tuple(dict.fromkeys(_APIS)),
    "route": f"a route of the fleet, or `{UNKNOWN_ROUTE}` for a request that names none of them",
    "status": f"the HTTP status of the answer; {CLIENT_GONE} for a client that left before the end of it",
    "endpoint": "the id of an endpoint",
    "pool": "the name of a pool",
    "phase": get_args(Phase),
    "failure": tuple(failure.value for failure in Failure),
    "measure": tuple(measure.value for measure in Measure),
    "outcome": ("exported", "failed", "dropped"),
    "issuer": "the URL of an issuer in `gateway.auth.jwt`",
    "headrace_attempts.reason": get_args(Reason),
    "headrace_clients_refused.reason": get_args(Refusal),
    "headrace_finished.reason": (*sorted(FINISH_REASONS), "other"),
    "headrace_jwks_fetches.outcome": ("ok", "failed"),
    "headrace_jwt_checks.outcome": get_args(Outcome),
    "headrace_lease_asks.outcome": ("granted", "failed"),
    "headrace_limit_refusals.limit": (*KINDS, "streams"),
    "headrace_queue_refusals.reason": get_args(Refused),
    "headrace_tokens.kind": ("prompt", "prompt_cached", "completion"),
}
"""What the labels can be, by name; where a family has a label of its own, by the family's name and that."""

_HEAD = """\
# Metrics

What `/metrics` on the admin port shows, in Prometheus' text format. With `--workers` it is about all processes of the
gateway together. Every label has few values: routes, pools and endpoints are those of the fleet, and the series of what
leaves the fleet are dropped; everything else is one of the values that stand here. To a scraper that asks for
OpenMetrics (`Accept: application/openmetrics-text`) buckets of latencies show the trace of the last request in them
that was traced.

This page is made from the families themselves (`make metrics`).
"""
_SECTIONS = {
    "Requests, endpoints and the process": "Of every gateway.",
    "The fleet as the gateway sees it": "Read off it when it is scraped.",
    "Worker processes": "Only with `--workers`.",
    "The operating system's view": "Of the process, or of all processes of the gateway together.",
}


def page() -> str:
    """The page as `docs/metrics.md` holds it."""
    common = [f"| `{label}` | {_shown(label)} |" for label in _LABELS if "." not in label]
    lines = [_HEAD, "## Labels", "", "| label | values |", "|---|---|", *common, ""]
    for (title, about), families in zip(_SECTIONS.items(), _families(), strict=True):
        lines += [f"## {title}", "", about, "", "| name | type | labels | meaning |", "|---|---|---|---|"]
        lines += [_row(family) for family in sorted(families, key=lambda family: family.name)]
        lines.append("")
    return "\n".join(lines)


def _families() -> Iterator[list[Metric]]:
    """Every family there can be, section by section."""
    yield list(Metrics().collect())
    yield list(FleetCollector(FleetView, lambda: 0, lambda: True, FleetStatus, dict, lambda: 0).collect())
    yield list(WorkerCounts(1, lambda: 1, lambda: 0).collect())
    yield list(ProcessCollector(registry=None).collect())


def _row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = "; ".join(_label(family.name, label) for label in vars(family)["_labelnames"])
    return f"| `{name}` | {family.type} | {labels} | {family.documentation} |"


def _label(family: str, label: str) -> str:
    """A label, with what it can be where that is the family's own. Raises KeyError for one that is not described."""
    own = f"{family}.{label}"
    return f"`{label}`: {_shown(own)}" if own in _LABELS else f"`{_LABELS[label] and label}`"


def _shown(label: str) -> str:
    values = _LABELS[label]
    return values if isinstance(values, str) else ", ".join(f"`{value}`" for value in values)


if __name__ == "__main__":
    print(page(), end="")
