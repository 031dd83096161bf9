"""Whether a gateway should get traffic, and what is not as it should be although it can serve.

Not ready is only what another gateway would do better: this one is starting, is draining, or has no route it could
serve. A lost Redis or a file that differs from the published one concerns every gateway alike; taking them all out of
the load balancer would turn a degraded control plane into an outage, so these are `degraded` and still 200.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from gateway.admin.view import Lifecycle, Workers, ready_endpoints
from gateway.discovered import discovery_trouble
from router.fleet import FleetView
from router.state.follower import FleetStatus

MOST_NAMED = 20
"""Names and problems shown of each kind; the fleet may have hundreds."""


class Readiness(Struct, frozen=True):
    """The body of `/readyz`."""

    status: Literal["ready", "not_ready"]
    reasons: list[str]
    """Why it is not ready, one sentence each."""
    degraded: list[str]
    detail: dict[str, Any]


def readiness(
    lifecycle: Lifecycle,
    fleet: FleetView,
    state: FleetStatus,
    workers: Workers | None = None,
    *,
    anonymous: bool = True,
    besides: Iterable[str] = (),
) -> Readiness:
    """The readiness of a gateway in this state; `workers` where it has several processes, `anonymous` where it answers
    those without a key, `besides` for what else degrades it."""
    reasons: list[str] = []
    unservable = sorted(name for name, route in fleet.routes.items() if not ready_endpoints(route))
    if lifecycle == "starting":
        reasons.append("The gateway is starting.")
    elif lifecycle == "draining":
        reasons.append("The gateway is draining: it finishes its streams and takes no new ones.")
    elif workers is not None and not workers.serving:
        reasons.append("No worker serves; they are being restarted, and the log says why they ended.")
    if not fleet.routes:
        reasons.append("There is no route; add one to the fleet file or with `headrace routes set`.")
    elif len(unservable) == len(fleet.routes):
        reasons.append("No route has a ready endpoint; `headrace endpoints list` shows why.")

    degraded: list[str] = []
    if workers is not None and workers.serving < workers.configured:
        degraded.append(f"workers: {workers.serving} of {workers.configured} serve; the log says why.")
    lost_since = datetime.fromtimestamp(state.lost_since, UTC).isoformat() if state.lost_since is not None else None
    if state.configured and not state.connected:
        degraded.append(f"redis: {state.error or 'no answer yet.'} The fleet stays as last known.")
    if state.file_differs:
        degraded.append("file_differs: another gateway has published a different fleet file, and that one is served.")
    if state.connected:
        degraded += (f"discovery: {text}" for text in discovery_trouble(fleet, state)[:MOST_NAMED])
    problems = [*state.problems, *fleet.problems]
    if problems:
        degraded.append(f"documents: {len(problems)} of the fleet's documents have problems; see detail.problems.")
    if not anonymous and not fleet.tenants:
        how = "add one to the fleet file or with `headrace tenants set`"
        degraded.append(f"auth: nobody may call, for there is no tenant; {how}.")
    degraded += besides
    return Readiness(
        status="not_ready" if reasons else "ready",
        reasons=reasons,
        degraded=degraded,
        detail={
            **({"workers": workers} if workers is not None else {}),
            "redis": {
                "configured": state.configured, "connected": state.connected,
                "lost_since": lost_since, "error": state.error,
            },
            "file_differs": state.file_differs,
            "endpoints": dict(Counter(endpoint.phase for endpoint in fleet.endpoints.values())),
            "routes": len(fleet.routes),
            "routes_without_ready_endpoint": unservable[:MOST_NAMED],
            "problems": problems[:MOST_NAMED],
        },
    )  # fmt: skip
