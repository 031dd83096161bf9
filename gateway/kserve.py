"""What both KServe fronts, gRPC and HTTP, have in common: names, limits, and what they say of the routes.

The gateway's model repository is the routes that have Triton behind them. A front can use an endpoint that has an
address for its API (`Address`), so a route whose endpoints have but one of the two is ready in one front only.
"""

from typing import Literal

import msgspec

from router.fleet import Endpoint, FleetView, Route
from router.plan import SERVING

API = "kserve"
"""The fronts' name in metrics."""

BODY_LIMIT = 2**31 - 1
"""Bytes of a message or of an HTTP body: Triton counts them in an int32."""

EXTENSIONS = (
    *("classification", "sequence", "schedule_policy", "model_configuration"),
    *("binary_tensor_data", "parameters", "statistics"),
)
"""Those of Triton's extensions that its clients can use through the gateway."""

Address = Literal["http", "grpc"]
"""The address of an endpoint's that a front needs, by its name in the fleet file."""

_REASONS_SHOWN = 5


class IndexedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the repository index, with the fields of Triton's (repository index of KServe's model repository
    extension)."""

    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str = ""
    """Why it is not ready."""


def repository_index(fleet: FleetView, address: Address, *, only_ready: bool) -> list[IndexedModel]:
    """The routes that have Triton behind them, by name; `only_ready`: those that can be served through `address`."""
    models = []
    for name, route in sorted(fleet.routes.items()):
        endpoints = _endpoints(route)
        if endpoints is None:
            continue
        if _servable(route, address):
            models.append(IndexedModel(name, "1", "READY"))
        elif not only_ready:
            reasons = [_unusable(endpoint, address) for endpoint in endpoints[:_REASONS_SHOWN]]
            models.append(IndexedModel(name, "1", "UNAVAILABLE", "; ".join(reasons) or "it has no endpoint"))
    return models


def any_servable(fleet: FleetView, address: Address) -> bool:
    """Whether there is a route that can be served: what readiness means to both fronts."""
    return any(_servable(route, address) for route in fleet.routes.values())


def reachable(endpoint: Endpoint, address: Address) -> bool:
    """Whether `endpoint` has the address."""
    return getattr(endpoint.spec, address) is not None


def _servable(route: Route, address: Address) -> bool:
    """Whether a request for `route` would find an endpoint."""
    return any(e.phase in SERVING and reachable(e, address) for e in _endpoints(route) or ())


def _endpoints(route: Route) -> list[Endpoint] | None:
    """The Triton endpoints of a route, None if it is not meant to have any."""
    pools = [pool for pool in route.all_pools if pool.spec.protocol == "triton"]
    return [endpoint for pool in pools for endpoint in pool.endpoints] if pools else None


def _unusable(endpoint: Endpoint, address: Address) -> str:
    what = endpoint.phase if reachable(endpoint, address) else f"has no {address} address"
    return f"{endpoint.id} {what}"
