"""The decision: which endpoints a request may go to, in which order, and why.

`plan` looks at the route's pools in the order this conversation prefers them (a weighted split by weighted rendezvous,
then the fallbacks as listed) and, inside each, at the endpoints that are ready and can honour what the request asks
for, in the order of the affinity floor. Endpoints that have all the requests they may have come last: while no other
has room, the request has to wait (`Plan.free`). It is synchronous and reads only its arguments.
"""

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from router.affinity import pool_preference, preference, within_bounds
from router.errors import ApiError, invalid, unavailable
from router.fleet import Endpoint, FleetView, Pool, Route
from router.prompt import PromptView

Reason = Literal["affinity", "spill", "fallback"]

SERVING = frozenset({"ready", "warming"})
"""The phases in which an endpoint takes new requests."""


class Attempt(msgspec.Struct, frozen=True):
    """One endpoint to try. `reason`: it is the conversation's home, it stands in for a loaded home, or for what failed
    or could not take the request at all."""

    endpoint: Endpoint
    pool: Pool
    reason: Reason


class Plan(msgspec.Struct, frozen=True):
    """The attempts for one request, best first; at least one."""

    route: Route
    attempts: tuple[Attempt, ...]
    free: float = math.inf
    """How many more requests the endpoints of `attempts` may have together; the first of them has room, if any has."""
    narrowed: bool = False
    """Some endpoints of the route that take requests cannot take this one."""

    def only(self, suits: Callable[[Endpoint], bool]) -> "Plan":
        """The plan without the endpoints that do not suit; it may be left with none."""
        attempts = tuple([attempt for attempt in self.attempts if suits(attempt.endpoint)])
        if len(attempts) == len(self.attempts):
            return self
        return Plan(self.route, attempts, sum([room(attempt.endpoint) for attempt in attempts]), narrowed=True)


def plan(prompt: PromptView, fleet: FleetView) -> Plan:
    """Decide where `prompt` goes. Raises ApiError: 404 no such route, 400 no pool can do it, 503 none is ready."""
    route = fleet.route(prompt.model)
    needs = prompt.needs
    attempts: list[Attempt] = []
    full: list[Attempt] = []
    free: float = 0
    narrowed = False
    preferred = True
    for pool in (*pool_preference(prompt.key, route.pools), *route.fallback):
        if prompt.api == "kserve" and pool.spec.protocol != "triton":
            narrowed = True
            continue
        stands_in, preferred = not preferred, False
        ready = [e for e in pool.endpoints if e.phase in SERVING]
        serving = [e for e in ready if _can(e, needs)] if needs else ready
        narrowed = narrowed or len(serving) < len(ready)
        if not serving:
            continue
        order = preference(prompt.key, serving)
        home = order[0]
        if prompt.pinned:
            return Plan(route, (Attempt(home, pool, "affinity"),), room(home), narrowed=True)
        for endpoint in within_bounds(order):
            left, kept = endpoint.state.max_in_flight - endpoint.state.in_flight, full
            if left > 0:
                free, kept = free + left, attempts
            reason: Reason = "fallback" if stands_in or kept else "affinity" if endpoint is home else "spill"
            kept.append(Attempt(endpoint, pool, reason))
    if full:
        attempts += [Attempt(one.endpoint, one.pool, "fallback") for one in full] if attempts else full
    if not attempts:
        raise _refusal(route, prompt)
    return Plan(route, tuple(attempts), free, narrowed)


def room(endpoint: Endpoint) -> float:
    """How many more requests an endpoint may have."""
    return max(endpoint.state.max_in_flight - endpoint.state.in_flight, 0)


def _can(endpoint: Endpoint, needs: frozenset[str]) -> bool:
    capabilities = endpoint.state.capabilities
    return capabilities is None or needs <= capabilities


def _refusal(route: Route, prompt: PromptView) -> ApiError:
    pools = [pool for pool in route.all_pools if prompt.api != "kserve" or pool.spec.protocol == "triton"]
    if not pools:
        return invalid(f"{route.name!r} has no Triton behind it: call it through the OpenAI API.", param="model_name")
    endpoints = [endpoint for pool in pools for endpoint in pool.endpoints]
    if endpoints and not any(_can(endpoint, prompt.needs) for endpoint in endpoints):
        if prompt.api == "embeddings":
            return invalid(
                f"No engine behind {route.name!r} makes embeddings. Use another model.",
                param="model",
                code="unsupported_api",
            )
        missing = [prompt.needs - (endpoint.state.capabilities or frozenset()) for endpoint in endpoints]
        missing.sort(key=len)
        need = min(missing[0])
        return invalid(
            f"No engine behind {route.name!r} supports {need!r}. Leave it out, or use another model.",
            param=need.partition(":")[0],
            code="unsupported_parameter",
        )
    phases = sorted(f"{endpoint.id} {endpoint.phase}" for endpoint in endpoints)
    shown = ", ".join(phases[:5]) + (" ..." if len(phases) > 5 else "")
    return unavailable(f"No endpoint of {route.name!r} is ready to take the request ({shown or 'it has none'}).")
