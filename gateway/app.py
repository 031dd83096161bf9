"""One gateway process: what it is made of, in which order it comes up, and how it goes down.

Up: serve the admin port, follow the shared state and probe the engines once (never waiting long for either), then serve
the clients. Down: say so in `/readyz`, serve on until that has been noticed (how long, its owner knows), stop
accepting, let the streams finish, then close what they used.

A gateway that inherits its HTTP sockets is one of several workers of a supervisor, which does what is to be done once:
it serves the admin port and publishes the fleet file; the gRPC port is then shared, too.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gateway.access import Access
from gateway.admin.server import AdminServer
from gateway.admin.view import Lifecycle, no_requests_left
from gateway.admission import Admission
from gateway.configuration import Origins
from gateway.corridor import Corridor
from gateway.exchange import LiveExchanges
from gateway.file_limit import raise_file_limit
from gateway.fleet import LiveFleet
from gateway.grpc.server import GrpcFront
from gateway.http.client_addresses import ClientAddresses
from gateway.http.fair_share import FairShare
from gateway.http.front import Front
from gateway.http.server import ClientServer
from gateway.limits import Limiter
from gateway.listening import certificate, not_to_be_had
from gateway.live_requests import RequestFilter, RequestList, cancel_request, list_requests
from gateway.log_levels import LogLevel, LogLevels
from gateway.metrics import FleetCollector, Metrics
from gateway.overload import OverloadWatch
from gateway.reload import ReadAgain, Reloaded, ReloadError, what_can_change
from gateway.series import Examples, Rows
from gateway.telemetry.observer import observer_of
from gateway.upstream.base import Failure, UpstreamError
from router.fleet import Endpoint, FleetView
from router.merge import MergedFleet
from router.retry import RetryBudget
from router.spec.documents import Document, file_documents
from router.spec.fleet import FleetSpec
from router.spec.gateway import GatewaySpec, JwtSpec
from router.spec.units import seconds, share, size_bytes
from router.state.fleet import FleetState
from router.state.limits import LimitStore

if TYPE_CHECKING:
    from gateway.oidc.tokens import Tokens

_GIVING_UP_S = 2.0
"""How long streams that are given up have to tell their clients so, and what runs in the background has to end."""
_CANCELS = 3
"""How often what runs in the background is told to end."""
_STOPPING = UpstreamError(Failure.BUSY, "The gateway is stopping and waits no longer.", 503, "gateway_stopping")
_FIRST_PROBES_S = 3.0
"""How long the first round of probes may hold up the start; longer than a probe's default timeout."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a worker has from its supervisor."""

    http: Sequence[socket.socket]
    """Bound to `gateway.http`."""
    documents: list[Document]
    """The fleet, as long as Redis says nothing else."""
    workers: int
    """How many there are: they share what an endpoint may have in flight."""
    share: FairShare
    """Its of the connections."""


class Gateway:
    """A gateway and its servers. Start it once, stop it once. What the admin API shows is read off it."""

    workers = None
    """It is one process."""

    def __init__(
        self,
        spec: FleetSpec,
        content_hash: str,
        admin_token: str | None,
        inherited: Inherited | None = None,
        read_again: ReadAgain | None = None,
        origins: Origins | None = None,
    ) -> None:
        """A worker is what `inherited` something; the pools and routes of its `spec` do not count."""
        self._spec = spec
        self._read_again = read_again
        self._origins = origins or Origins(content_hash=content_hash)
        self._reloading = asyncio.Lock()
        self._inherited = inherited
        self._metrics = Metrics()
        self._live_fleet = LiveFleet(self._metrics, inherited.workers if inherited is not None else 1)
        retry = spec.gateway.retry
        self._live = LiveExchanges(self._live_fleet.pools, RetryBudget(share(retry.budget), retry.min_per_second))
        documents = file_documents(spec, content_hash=content_hash) if inherited is None else inherited.documents
        redis_url = spec.redis.url if spec.redis is not None else None
        self.state = FleetState(
            redis_url, spec.fleet, documents, content_hash, self._live_fleet.apply, publishes=inherited is None
        )
        self.log_levels = LogLevels()
        self._overload = OverloadWatch(spec.gateway.overload, self._metrics)
        limits = LimitStore(redis_url, spec.fleet, secrets.token_hex(8)) if redis_url is not None else None
        self._limiter = Limiter(limits, self._metrics, lambda: self.fleet, self._live.now)
        self._addresses = ClientAddresses(spec.gateway.clients, self._metrics)
        self._admission = Admission(self._live, self._metrics, self._overload)
        self._live_fleet.changed = self._admission.fleet_changed
        auth = spec.gateway.auth
        self.anonymous = auth.anonymous == "allow"
        self._tokens = _tokens(auth.jwt, self._metrics) if auth.jwt else None
        corridor = Corridor(
            Access(self._live_fleet, self._tokens, anonymous=self.anonymous),
            self._overload,
            self._addresses,
            self._limiter,
            self._admission,
            self._live_fleet,
            self._live,
            self._metrics,
            spec.gateway.expose_routing,
        )
        self._front = Front(corridor, size_bytes(spec.gateway.body_limit))
        self._grpc = GrpcFront(corridor, lambda: self.lifecycle == "serving", spec.gateway)
        self._admin = AdminServer(self, admin_token, spec.gateway) if inherited is None else None
        self._clients: ClientServer | None = None
        self._watches: list[asyncio.Task[None]] = []
        self.lifecycle: Lifecycle = "starting"
        self.settle_s = seconds(spec.gateway.drain.settle)
        self.cut = 0
        """Requests that were ended because the gateway stopped."""
        self._metrics.registry.register(
            FleetCollector(
                lambda: self.fleet,
                lambda: self.live_requests,
                self.redis_connected,
                lambda: self.state.status,
                self.queues,
                self._limiter.__len__,
            )
        )

    @property
    def fleet(self) -> FleetView:
        return self._live_fleet.view

    @property
    def merged(self) -> MergedFleet:
        return self._live_fleet.merged

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

    @property
    def live_requests(self) -> int:
        return len(self._live)

    def queues(self) -> dict[str, tuple[int, int]]:
        """By route: how many requests wait, and how many bytes of theirs."""
        return self._admission.lengths()

    def degraded(self) -> list[str]:
        """What is not as it should be, besides what its fleet and its state show."""
        return self._tokens.degraded() if self._tokens is not None else []

    def rows(self) -> dict[str, Rows]:
        """Its counters and histograms as they stand."""
        return self._metrics.rows()

    def examples(self) -> dict[str, Examples]:
        """Its histograms' examples."""
        return self._metrics.examples()

    def drained(self, endpoint: Endpoint) -> bool:
        return no_requests_left(endpoint)

    async def list_requests(self, wanted: RequestFilter) -> RequestList:
        return list_requests(self._live, wanted)

    async def cancel_request(self, id_: str) -> bool:
        return cancel_request(self._live, id_)

    def configuration(self) -> tuple[FleetSpec, Origins]:
        return self._spec, self._origins

    def set_log_level(self, name: str, level: LogLevel | None) -> None:
        self.log_levels.set_or_reset(name, level)

    def redis_connected(self) -> bool | None:
        """Whether the shared state is followed; None where none is configured."""
        status = self.state.status
        return status.connected if status.configured else None

    async def start(self) -> None:
        """Serve. Raises ListenError if an address is not to be had, or a certificate for it."""
        raise_file_limit()
        # What traces need takes long to import, which would look like an overload to the watch.
        self._live.observer = observer = observer_of(self._spec, self._metrics, self._live.now)
        own = certificate("tls", self._spec.gateway.tls)
        if self._admin is not None:
            await self._admin.start()
        await self.state.start()
        await self._live_fleet.probed_once(_FIRST_PROBES_S)
        self._watches = [
            asyncio.create_task(self._live.sweep(), name="deadline sweep"),
            asyncio.create_task(self._overload.watch(), name="overload watch"),
            asyncio.create_task(self._limiter.run(), name="limits"),
            asyncio.create_task(self._admission.watch(), name="queue watch"),
        ]
        if self._tokens is not None:
            self._watches += [asyncio.create_task(keeper, name="issuer keys") for keeper in self._tokens.keepers()]
        handle = self._front.handle
        if observer is not None and observer.tells_of_all:
            handle = partial(observer.handle, handle)
        if own is not None:
            self._watches.append(asyncio.create_task(own.follow(), name="certificate"))
        tls = own.context if own is not None else None
        bound, share = (self._inherited.http, self._inherited.share) if self._inherited is not None else (None, None)
        self._clients = ClientServer(handle, self._overload, self._addresses, tls, share)
        await self._clients.start(self._spec.gateway.http, bound)
        if self._spec.gateway.grpc is not None:
            try:
                await self._grpc.start(self._spec.gateway.grpc, own, shared=self._inherited is not None)
            except OSError as error:
                raise not_to_be_had("grpc", self._spec.gateway.grpc, error) from None
        if self.lifecycle == "starting":
            self.lifecycle = "serving"

    def begin_drain(self, *, accepting: bool = True) -> None:
        """Go on serving, but let everybody know who looks: it is not ready any more, and keeps no connection after its
        answer. Without `accepting`, others do that for HTTP."""
        self.lifecycle = "draining"
        if self._clients is not None:
            self._clients.drain(accepting=accepting)

    async def reload(self) -> Reloaded:
        """Take over the pools, routes and tenants of the fleet file as it is now. Raises ReloadError."""
        async with self._reloading:
            if self._read_again is None or self.lifecycle != "serving":
                raise ReloadError(f"A gateway that is {self.lifecycle} reads no file again.")
            spec, content_hash, given = await self._read_again()
            spec, reloaded = what_can_change(self._spec, spec, GatewaySpec.__struct_fields__)
            await self.state.publish(file_documents(spec, content_hash=content_hash), content_hash)
            self._origins = self._origins.reread(given, content_hash, GatewaySpec.__struct_fields__)
            reloaded.tell()
            return reloaded

    async def stop(self) -> None:
        """Drain, then release everything. Cancelled, it waits for streams no longer."""
        self.lifecycle = "draining"
        if self._clients is not None:
            await self._drain(self._clients)
        await self._end_watches()
        if self._admin is not None:
            await self._admin.stop()
        if self._live.observer is not None:
            await self._live.observer.close()
        await self._live_fleet.close()
        await self._limiter.close()
        await self.state.stop()

    async def _end_watches(self) -> None:
        """Cancel them, and once more those that go on all the same: a library may have swallowed it."""
        watches = self._watches
        for _ in range(_CANCELS):
            for watch in watches:
                watch.cancel()
            if watches:
                _, pending = await asyncio.wait(watches, timeout=_GIVING_UP_S)
                watches = list(pending)
        if watches:
            logger.warning("stopping without the end of: %s", ", ".join(watch.get_name() for watch in watches))

    async def _drain(self, clients: ClientServer) -> None:
        """Let the streams finish; those that do not in time end with an error event or status."""
        grace = seconds(self._spec.gateway.drain.grace)
        closing = asyncio.gather(clients.stop(grace + _GIVING_UP_S), self._grpc.stop(grace + _GIVING_UP_S))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([closing], timeout=grace)
        if not closing.done():
            self.cut = len(self._live)
            self._live.abort(_STOPPING)
            await asyncio.wait([closing], timeout=_GIVING_UP_S)
            closing.cancel()


def _tokens(trusted: Sequence[JwtSpec], metrics: Metrics) -> "Tokens":
    """The tokens of trusted issuers. What checks them is loaded only here: it takes 9 MB of every process."""
    from gateway.oidc.tokens import Tokens

    return Tokens(trusted, metrics)
