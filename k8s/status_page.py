"""What a replica of discovery says of itself over HTTP: `/healthz`, `/readyz` and `/metrics`.

A replica is ready once it knows what there is to discover, leading or not. What is stale or refused is `degraded` and
still 200: taking it out of anything would help nobody, as it serves no requests.
"""

from collections.abc import Iterator

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from k8s.discovery import Discovery


class _Metrics:
    """Collects when it is asked; there is nothing to keep up to date."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def collect(self) -> Iterator[Metric]:
        discovery = self._discovery
        leader = GaugeMetricFamily("headrace_discovery_leader", "1 while this replica leads and publishes.")
        leader.add_metric([], discovery.election.leads)
        yield leader
        endpoints = GaugeMetricFamily(
            "headrace_discovery_endpoints", "Endpoints found, by pool and phase.", labels=["pool", "phase"]
        )
        for (pool, phase), count in discovery.phases().items():
            endpoints.add_metric([pool, phase], count)
        yield endpoints
        stale = GaugeMetricFamily(
            "headrace_discovery_stale_seconds",
            "For how long nothing has been heard of these objects, if that is too long; else 0.",
            labels=["objects"],
        )
        for reflector in discovery.reflectors:
            stale.add_metric([str(reflector.collection)], reflector.stale_s)
        yield stale
        publications = CounterMetricFamily(
            "headrace_discovery_publications", "How often this replica has published endpoints that had changed."
        )
        publications.add_metric([], discovery.publications)
        yield publications


def status_page(discovery: Discovery) -> web.Application:
    """The pages about `discovery`."""
    registry = CollectorRegistry()
    registry.register(_Metrics(discovery))

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        degraded = discovery.degraded()
        body = {
            "status": "ready" if discovery.settled else "not_ready",
            "leader": discovery.election.leads,
            "degraded": degraded,
            "endpoints": {f"{pool} {phase}": count for (pool, phase), count in sorted(discovery.phases().items())},
        }
        status = 200 if discovery.settled else 503
        return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app
