"""How the parts of a fleet must fit together: what no type of a single field can say.

Pure functions over a `FleetSpec` that give findings with paths, no positions: the strict reader knows the lines of a
file, and whoever checks a fleet from elsewhere has none. A finding is an error when the fleet cannot work as written,
a warning when it can but probably does not do what its author thinks.
"""

import ipaddress
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from router.spec.fleet import (
    ChatTemplateSpec,
    DiscoverSpec,
    EndpointSpec,
    FleetSpec,
    PoolSpec,
    RouteSpec,
    TenantSpec,
    TimeoutSpec,
)
from router.spec.gateway import ClientsSpec, GatewaySpec, JwtSpec
from router.spec.units import host_and_port, seconds, share
from router.spec.wording import did_you_mean, pattern_of, text_fault

_SHORTEST_PING_S = 1.0
ANONYMOUS: Final = "anonymous"
"""The tenant that says what callers without a key may, where they may call at all."""

Path = tuple[str | int, ...]


class Fault(NamedTuple):
    """What is wrong with one field of a part."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"`{self.field}`: {self.message}"


class Finding(NamedTuple):
    """What is wrong with the part of a fleet at `path`."""

    path: Path
    message: str
    warning: bool = False


def findings(fleet: FleetSpec, pools: Collection[str]) -> Iterator[Finding]:
    """Everything about the fleet as a whole. `pools` are the names a route may use."""
    for name, pool in fleet.pools.items():
        yield from _pool(("pools", name), pool)
    yield from _endpoints(fleet)
    for name, route in fleet.routes.items():
        yield from route_findings(("routes", name), route, pools)
    if fleet.redis is None:
        for name, pool in fleet.pools.items():
            if pool.discover is not None:
                message = "has no effect without `redis`, through which gateways learn what is discovered"
                yield Finding(("pools", name, "discover"), message, warning=True)
    if not fleet.routes:
        yield Finding((), "no routes: nothing is served until one is set from elsewhere", warning=True)
    else:
        yield from _unused_pools(fleet)
    yield from _tenants(fleet)
    yield from _issuers(("gateway", "auth", "jwt"), fleet.gateway.auth.jwt)
    yield from listeners(fleet.gateway)
    yield from _clients(("gateway", "clients"), fleet.gateway.clients)


def address_fault(endpoint: EndpointSpec, pool: PoolSpec) -> Fault | None:
    """Why an endpoint of `pool` cannot be reached as it is described, None if it can."""
    needed = pool.needed_address
    if getattr(endpoint, needed) is None:
        api = {"http": "HTTP", "grpc": "gRPC"}[needed]
        what = (
            "protocol triton with transport http"
            if (pool.protocol, needed) == ("triton", "http")
            else f"protocol {pool.protocol}"
        )
        return Fault(needed, f"is missing; {what} needs the address of the engine's {api} API")
    for name in ("http", "grpc", "metrics"):
        address: str | None = getattr(endpoint, name)
        if address is not None and (fault := text_fault(address, pattern_of(EndpointSpec.__annotations__[name]))):
            return Fault(name, fault)
    return None


class Addresses:
    """Which endpoint serves which model at which address.

    One server may serve two models, as two endpoints; twice the same model is one replica counted twice.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str, str], str] = {}

    def take(self, endpoint: EndpointSpec, model: str) -> Iterator[Fault]:
        """Enter an endpoint that serves `model`; the addresses at which another does already."""
        for name in ("http", "grpc"):
            address: str | None = getattr(endpoint, name)
            if address is not None:
                holder = self._taken.setdefault((name, address.rstrip("/"), model), endpoint.id)
                if holder != endpoint.id:
                    yield Fault(name, f"{model} at this address is already endpoint {holder}")


def no_pool(name: str, pools: Collection[str]) -> str:
    """What is wrong with a pool's name that is none of `pools`."""
    known = did_you_mean(name, pools) or (f"; there are {', '.join(pools)}" if 0 < len(pools) <= 20 else "")
    return f"no pool is named {name if len(name) <= 130 else name[:127] + '...'}{known}"


def listeners(gateway: GatewaySpec) -> Iterator[Finding]:
    """Listening addresses that exclude one another."""
    seen: list[tuple[str, str | None, int]] = []
    for name in ("http", "grpc", "admin"):
        address: str | None = getattr(gateway, name)
        if address is None:
            continue
        host, port = host_and_port(address)
        for other, other_host, other_port in seen:
            # An empty host takes the port on every interface, so it collides with any host.
            if port == other_port != 0 and (host == other_host or None in (host, other_host)):
                yield Finding(("gateway", name), f"listens on port {port}, which `{other}` already takes")
        seen.append((name, host, port))


def _clients(path: Path, clients: ClientsSpec) -> Iterator[Finding]:
    for index, proxy in enumerate(clients.trusted_proxies):
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            yield Finding((*path, "trusted_proxies", index), f"is no network: {error}")
    if clients.proxy_protocol != "off" and not clients.trusted_proxies:
        message = "has no effect without `trusted_proxies`: nobody else is believed"
        yield Finding((*path, "proxy_protocol"), message)


def _pool(path: Path, pool: PoolSpec) -> Iterator[Finding]:
    for index, endpoint in enumerate(pool.endpoints):
        if fault := address_fault(endpoint, pool):
            # At the endpoint: where a mistake inside it is the reason, this is only its consequence.
            yield Finding((*path, "endpoints", index), str(fault))
    if pool.discover is not None:
        yield from _discover((*path, "discover"), pool.discover)
    elif not pool.endpoints:
        yield Finding(path, "no endpoints: it serves nothing until one is added from elsewhere", warning=True)
    if pool.protocol == "openai" and pool.transport == "http":
        message = "has no effect: engines of protocol openai are always called over HTTP"
        yield Finding((*path, "transport"), message, warning=True)
    if pool.chat_template is not None:
        yield from _chat_template((*path, "chat_template"), pool.chat_template, pool.protocol)
    elif pool.protocol == "triton":
        yield Finding(path, "no `chat_template`: chat requests are refused, only prompts are served", warning=True)
    if not isinstance(pool.credentials, str):
        secret = pool.credentials.replace
        if (secret.env is None) == (secret.file is None):
            found = "needs `env` or `file`" if secret.env is None else "has both `env` and `file`; keep one"
            yield Finding((*path, "credentials", "replace"), found)
    if pool.tokenizer is not None and pool.protocol == "openai":
        message = "has no effect: engines of protocol openai tokenise themselves"
        yield Finding((*path, "tokenizer"), message, warning=True)
    price = pool.price
    if price is not None and price.usd_per_gpu_hour is not None:
        for name in ("usd_per_million_prompt_tokens", "usd_per_million_completion_tokens"):
            if getattr(price, name) is not None:
                yield Finding((*path, "price", name), "a pool is paid by the GPU-hour or by the token, not both")
    yield from _timeouts((*path, "timeouts"), pool.timeouts)
    outlier = pool.outlier
    if seconds(outlier.max_ejection) < seconds(outlier.base_ejection):
        message = f"{outlier.max_ejection} is shorter than `base_ejection`, {outlier.base_ejection}"
        yield Finding((*path, "outlier", "max_ejection"), message)
    if seconds(pool.ping) < _SHORTEST_PING_S:
        message = f"{pool.ping} is shorter than most gaps between tokens: streams will carry more pings than text"
        yield Finding((*path, "ping"), message, warning=True)


def _discover(path: Path, discover: DiscoverSpec) -> Iterator[Finding]:
    if discover.selector is None and discover.inference_pool is None:
        yield Finding(path, "needs `selector` or `inference_pool`")
    elif discover.selector is not None and discover.inference_pool is not None:
        yield Finding(path, "has both `selector` and `inference_pool`; keep one")
    if discover.inference_pool is not None and discover.namespace == "*":
        yield Finding((*path, "namespace"), "may not be * with `inference_pool`, which is in one namespace")


def _chat_template(path: Path, template: ChatTemplateSpec, protocol: str) -> Iterator[Finding]:
    if template.file is None and template.text is None:
        yield Finding(path, "needs `file` or `text`")
    elif template.file is not None and template.text is not None:
        yield Finding(path, "has both `file` and `text`; keep one")
    elif template.file == "":
        yield Finding((*path, "file"), "is empty; write the template's path, relative to this file")
    if protocol == "openai":
        yield Finding(path, "has no effect: engines of protocol openai apply their own template", warning=True)


def _timeouts(path: Path, timeouts: TimeoutSpec) -> Iterator[Finding]:
    usual = TimeoutSpec()
    for name in ("connect", "first_byte", "idle"):
        limit = getattr(timeouts, name)
        # A value left at its default was not written by anybody: nothing to warn its author of.
        if limit not in (getattr(usual, name), "off") and seconds(limit) > seconds(timeouts.total):
            message = f"{limit} is never reached: `total` ends the request after {timeouts.total}"
            yield Finding((*path, name), message, warning=True)


def _endpoints(fleet: FleetSpec) -> Iterator[Finding]:
    ids: dict[str, str] = {}
    addresses = Addresses()
    for pool_name, pool in fleet.pools.items():
        for index, endpoint in enumerate(pool.endpoints):
            path: Path = ("pools", pool_name, "endpoints", index)
            if endpoint.id in ids:
                message = f"endpoint id {endpoint.id} is taken in pool {ids[endpoint.id]}; ids are unique in a fleet"
                yield Finding((*path, "id"), message)
                continue
            ids[endpoint.id] = pool_name
            for fault in addresses.take(endpoint, pool.model):
                yield Finding((*path, fault.field), fault.message)


def _unused_pools(fleet: FleetSpec) -> Iterator[Finding]:
    used = {part.pool for route in fleet.routes.values() for part in route.pools}
    used |= {name for route in fleet.routes.values() for name in (route.pool, *route.fallback) if name is not None}
    for name in fleet.pools:
        if name not in used:
            yield Finding(("pools", name), "no route leads to it", warning=True)


def _tenants(fleet: FleetSpec) -> Iterator[Finding]:
    holders: dict[str, str] = {}
    for name, tenant in fleet.tenants.items():
        path: Path = ("tenants", name)
        yield from tenant_findings(path, tenant, fleet.routes)
        for index, key in enumerate(tenant.keys):
            holder = holders.setdefault(key.sha256, name)
            if holder != name:
                yield Finding((*path, "keys", index, "sha256"), f"this key is tenant {holder}'s already")
        if name == ANONYMOUS:
            if fleet.gateway.auth.anonymous == "deny":
                message = "has no effect: `gateway.auth.anonymous` denies callers without a key"
                yield Finding(path, message, warning=True)
        elif not tenant.keys and not fleet.gateway.auth.jwt:
            yield Finding(path, "no keys: nobody can call as this tenant", warning=True)
    if not fleet.tenants and fleet.gateway.auth.anonymous == "deny":
        message = (
            "nobody may call it: list `tenants` (`headrace keys new` makes a key), or write "
            "`auth: {anonymous: allow}` where the network can be trusted"
        )
        if fleet.gateway.auth.jwt:
            message = "nobody may call it: list the `tenants` that tokens may name"
        yield Finding(("gateway",), message, warning=True)


def _issuers(path: Path, issuers: Collection[JwtSpec]) -> Iterator[Finding]:
    seen: dict[tuple[str, str], int] = {}
    for index, one in enumerate(issuers):
        first = seen.setdefault((one.issuer, one.audience), index)
        if first != index:
            message = f"the issuer's tokens for this audience are jwt[{first}]'s already"
            yield Finding((*path, index, "audience"), message)
        if not one.algorithms:
            yield Finding((*path, index, "algorithms"), "is empty: no token would be taken")
        source = "issuer" if one.jwks is None else "jwks"
        if _could_be_exchanged(one.jwks or one.issuer):
            message = "its keys come over plain http://: whoever is on their way can put others in their place"
            yield Finding((*path, index, source), message, warning=True)


def _could_be_exchanged(url: str) -> bool:
    """Whether what comes from there passes over a network without protection."""
    parts = urlsplit(url)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True


def tenant_findings(path: Path, tenant: TenantSpec, routes: Collection[str]) -> Iterator[Finding]:
    """Everything about the tenant at `path`. `routes` are the names there are; others may come later."""
    seen: set[str] = set()
    for index, key in enumerate(tenant.keys):
        if key.sha256 in seen:
            yield Finding((*path, "keys", index, "sha256"), "this key is listed twice")
        seen.add(key.sha256)
    for index, name in enumerate(tenant.routes):
        if name not in routes:
            message = f"no route is named {name}{did_you_mean(name, routes)}"
            yield Finding((*path, "routes", index), message, warning=True)
    for name in tenant.route_limits:
        if name not in routes:
            message = f"no route is named {name}{did_you_mean(name, routes)}"
            yield Finding((*path, "route_limits", name), message, warning=True)
        elif tenant.routes and name not in tenant.routes:
            yield Finding((*path, "route_limits", name), "the tenant may not call this route", warning=True)


def route_findings(path: Path, route: RouteSpec, pools: Collection[str]) -> Iterator[Finding]:
    """Everything about the route at `path`. `pools` are the names it may use."""
    both = route.pool is not None and bool(route.pools)
    if route.pool is None and not route.pools:
        yield Finding(path, "needs `pool`, or `pools` for a weighted split")
    elif both:
        yield Finding(path, "has both `pool` and `pools`; keep one")
    hints = route.retention
    if hints is not None and hints.prompt is None and hints.decode is None:
        yield Finding((*path, "retention"), "needs `prompt` or `decode`, priorities from 0 to 100")
    if share(route.queue.tenant_share) == 0:
        yield Finding((*path, "queue", "tenant_share"), "must be above 0%: nobody could wait; with `size: 0` none does")
    named: list[tuple[Path, str]] = [((*path, "pool"), route.pool)] if route.pool is not None else []
    named += [((*path, "pools", index, "pool"), part.pool) for index, part in enumerate(route.pools)]
    named += [((*path, "fallback", index), name) for index, name in enumerate(route.fallback)]
    seen: set[str] = set()
    for where, name in named:
        if name not in pools:
            yield Finding(where, no_pool(name, pools))
        elif name in seen and not both:
            yield Finding(where, f"pool {name} is named twice in this route")
        seen.add(name)
