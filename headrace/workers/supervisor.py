"""The process over the workers: owner of the HTTP port, the admin port and the workers' places.

It reads no request, so nothing a client sends can bring it down, and it holds the HTTP port's sockets as long as it
lives: while a worker is replaced, the others go on accepting from them, and if there is none at that moment the kernel
keeps connections until there is. (One socket for all, not one for each: connections that had been given to a dead
worker's own socket would wait for its successor.) The gRPC port it only finds free, once; grpc cannot be given a
socket, so each worker opens it with SO_REUSEPORT.

Towards the admin API it is the gateway: it follows the shared state itself, as one reader more, publishes the fleet
file, and takes everything about requests and engines from the workers' reports.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial

import msgspec
from msgspec import structs
from prometheus_client import CollectorRegistry

from gateway.admin.server import AdminServer
from gateway.admin.view import Lifecycle, Workers
from gateway.listening import bind, free_port, not_to_be_had
from gateway.metrics import FleetCollector
from headrace.config import LoadedFleet
from headrace.workers.channel import Report, Start
from headrace.workers.slot import Slot
from headrace.workers.totals import Processes, Totals, WorkerCounts, take_over
from router.fleet import Endpoint, FleetView, compile_view
from router.merge import MergedFleet, merge
from router.spec.documents import Document, file_documents
from router.spec.fleet import FleetSpec, GatewaySpec
from router.state.fleet import FleetState

_LAST_WORDS_S = 5.0
"""How long workers that were told not to wait may take to tell their clients and end."""


class Supervisor:
    """A gateway of several workers. Start it once, stop it once. What the admin API shows is read off it."""

    def __init__(self, loaded: LoadedFleet, count: int) -> None:
        spec = loaded.spec
        self._loaded = loaded
        self._count = count
        self._view = FleetView()
        self.merged: MergedFleet = merge(())
        documents = file_documents(spec, content_hash=loaded.content_hash)
        redis_url = spec.redis.url if spec.redis is not None else None
        self.state = FleetState(redis_url, spec.fleet, documents, loaded.content_hash, self._apply)
        self._slots: list[Slot] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._http = contextlib.ExitStack()
        self._admin = AdminServer(self, loaded.settings.admin_token, spec.gateway.admin_tls)
        self._stopping = False
        self._totals = Totals(self._reports)
        self.registry = CollectorRegistry()
        for collector in (
            self._totals,
            FleetCollector(lambda: self.fleet, self._live_requests, self._redis_connected, self._queues),
            Processes(lambda: [slot.pid for slot in self._slots if slot.pid is not None]),
            WorkerCounts(count, lambda: self.workers.serving, lambda: sum(slot.restarts for slot in self._slots)),
        ):
            self.registry.register(collector)

    @property
    def lifecycle(self) -> Lifecycle:
        if self._stopping:
            return "draining"
        return "serving" if any(slot.served.is_set() for slot in self._slots) else "starting"

    @property
    def workers(self) -> Workers:
        return Workers(self._count, sum(slot.serving for slot in self._slots))

    @property
    def fleet(self) -> FleetView:
        take_over(self._view, [(slot.report, slot.serving) for slot in self._slots if slot.report is not None])
        return self._view

    @property
    def anonymous(self) -> bool:
        return self._loaded.spec.gateway.auth.anonymous == "allow"

    def degraded(self) -> list[str]:
        return list(dict.fromkeys(text for report in self._reports() for text in report.degraded))

    def drained(self, endpoint: Endpoint) -> bool:
        told = [report.endpoints.get(endpoint.id) for report in self._reports()]
        return endpoint.spec.drain and all(one is not None and one.drained for one in told)

    async def start(self) -> None:
        """Serve with all workers. Raises ListenError if an address is not to be had, WorkerError if a worker ends."""
        gateway = self._loaded.spec.gateway
        await self._admin.start(gateway.admin)
        sockets = [self._http.enter_context(one) for one in bind("http", gateway.http)]
        gateway = _with_grpc_port(gateway)
        await self.state.start()
        spec = structs.replace(self._loaded.spec, gateway=gateway, pools={}, routes={})
        http = [one.fileno() for one in sockets]
        for number in range(1, self._count + 1):
            make_start = partial(self._make_start, number, spec, http)
            self._slots.append(Slot(number, make_start, self._totals.ended))
        self._keepers = [asyncio.create_task(slot.keep(), name=f"worker {slot.number}") for slot in self._slots]
        await self._all_served()

    def _make_start(self, number: int, spec: FleetSpec, http: list[int]) -> Start:
        return Start(
            number=number,
            spec=spec,
            documents=msgspec.json.encode(self.state.documents),
            content_hash=self._loaded.content_hash,
            http=http,
            workers=self._count,
            log_level=self._loaded.settings.log_level,
            log_format=self._loaded.settings.log_format,
        )

    async def stop(self) -> None:
        """Let the workers drain, then release everything. Cancelled, it has them wait for streams no longer."""
        self._stopping = True
        self._http.close()
        self._tell_to_stop()
        if self._keepers:
            try:
                await asyncio.wait(self._keepers)
            except asyncio.CancelledError:
                self._tell_to_stop()
                await asyncio.wait(self._keepers, timeout=_LAST_WORDS_S)
            for keeper in self._keepers:
                keeper.cancel()  # whose worker is killed with it
            await asyncio.gather(*self._keepers, return_exceptions=True)  # what they raise, `start` has raised
        await self._admin.stop()
        await self.state.stop()

    def _tell_to_stop(self) -> None:
        for slot in self._slots:
            slot.stop()

    async def _all_served(self) -> None:
        served = asyncio.create_task(self._each_served())
        try:
            await asyncio.wait([served, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
            for keeper in self._keepers:
                if keeper.done():
                    keeper.result()
        finally:
            served.cancel()

    async def _each_served(self) -> None:
        for slot in self._slots:
            await slot.served.wait()

    def _apply(self, documents: list[Document]) -> None:
        """Take over changed documents."""
        self.merged = merge(documents)
        view = compile_view(self.merged, self._view)
        self._totals.followed(self._view, view)
        self._view = view

    def _reports(self) -> Iterator[Report]:
        return (slot.report for slot in self._slots if slot.report is not None)

    def _live_requests(self) -> int:
        return sum(report.live_requests for report in self._reports())

    def _queues(self) -> dict[str, tuple[int, int]]:
        added: dict[str, tuple[int, int]] = {}
        for report in self._reports():
            for route, (requests, size) in report.queues.items():
                before = added.get(route, (0, 0))
                added[route] = before[0] + requests, before[1] + size
        return added

    def _redis_connected(self) -> bool | None:
        status = self.state.status
        if not status.configured:
            return None
        return status.connected and all(report.redis_connected for report in self._reports())


def _with_grpc_port(gateway: GatewaySpec) -> GatewaySpec:
    """The addresses with one gRPC port for all workers, found free. Raises ListenError."""
    if gateway.grpc is None:
        return gateway
    host, _, _ = gateway.grpc.rpartition(":")
    try:
        return structs.replace(gateway, grpc=f"{host}:{free_port(gateway.grpc)}")
    except OSError as error:
        raise not_to_be_had("grpc", gateway.grpc, error) from None
