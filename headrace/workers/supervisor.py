"""The process over the workers: owner of the HTTP port, the admin port and the workers' places.

It reads no request, so nothing a client sends can bring it down, and it holds the HTTP port's sockets as long as it
lives: while a worker is replaced, the others go on accepting from them, and if there is none at that moment the kernel
keeps connections until there is. (One socket for all, not one for each: connections that had been given to a dead
worker's own socket would wait for its successor.) The gRPC port it only finds free, once; grpc cannot be given a
socket, so each worker opens it with SO_REUSEPORT.

What it serves is changed by a new generation of workers (`generation`), which accepts from the same sockets before the
old one stops.

Towards the admin API it is the gateway: it follows the shared state itself, as one reader more, publishes the fleet
file, and takes everything about requests and engines from the workers' reports.
"""

import asyncio
import itertools
import socket
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
from msgspec import structs
from prometheus_client import CollectorRegistry

from gateway.admin.server import AdminServer
from gateway.admin.view import Lifecycle, Workers
from gateway.configuration import Origins
from gateway.http.fair_share import shared_memory
from gateway.listening import ListenError, bind, free_port, not_to_be_had
from gateway.live_requests import RequestFilter, RequestList, merged
from gateway.log_levels import LogLevel, LogLevels
from gateway.metrics import FleetCollector
from gateway.reload import ReadAgain, Reloaded, ReloadError, what_can_change
from headrace.config import LoadedFleet
from headrace.workers.channel import CancelRequest, ListRequests, Report, SetLogLevel, Start
from headrace.workers.generation import Generation
from headrace.workers.slot import Slot, WorkerError
from headrace.workers.totals import Processes, Totals, WorkerCounts, take_over
from router.errors import unavailable
from router.fleet import Endpoint, FleetView, compile_view
from router.merge import MergedFleet, merge
from router.spec.documents import Document, file_documents
from router.spec.fleet import FleetSpec
from router.spec.units import seconds
from router.state.fleet import FleetState

_FIXED = ("http", "grpc", "admin", "admin_tls")
"""What of `gateway` stays as it is while the supervisor lives."""
_LAST_WORDS_S = 5.0
"""How long workers that were told not to wait may take to tell their clients and end."""


class Supervisor:
    """A gateway of several workers. Start it once, stop it once. What the admin API shows is read off it."""

    def __init__(self, loaded: LoadedFleet, count: int, read_again: ReadAgain, origins: Origins) -> None:
        spec = loaded.spec
        self._spec = spec
        self._settings = loaded.settings
        self._origins = origins
        self._count = count
        self._read_again = read_again
        self._reloading = asyncio.Lock()
        self._view = FleetView()
        self.merged: MergedFleet = merge(())
        documents = file_documents(spec, content_hash=loaded.content_hash)
        redis_url = spec.redis.url if spec.redis is not None else None
        self.state = FleetState(redis_url, spec.fleet, documents, loaded.content_hash, self._apply)
        self._numbers = itertools.count(1)
        self._questions = itertools.count(1)
        self._generations: list[Generation] = []
        """All that have workers."""
        self._in_force: Generation | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._http: list[socket.socket] = []
        self._grpc: str | None = None
        """The address of all workers."""
        self._admin = AdminServer(self, loaded.settings.admin_token, spec.gateway)
        self._stopping = False
        self.cut = 0
        self._former_restarts = 0
        """Of generations that are no more."""
        self.log_levels = LogLevels()
        self._totals = Totals(self._reports)
        self.registry = CollectorRegistry()
        for collector in (
            self._totals,
            FleetCollector(
                *(lambda: self.fleet, self._live_requests, self._redis_connected),
                *(lambda: self.state.status, self._queues),
            ),
            Processes(lambda: [slot.pid for slot in self._slots if slot.pid is not None]),
            WorkerCounts(count, lambda: self.workers.serving, self._restarts),
        ):
            self.registry.register(collector)

    @property
    def lifecycle(self) -> Lifecycle:
        if self._stopping:
            return "draining"
        return "serving" if any(slot.served.is_set() for slot in self._slots_in_force) else "starting"

    @property
    def settle_s(self) -> float:
        return seconds(self._spec.gateway.drain.settle)

    @property
    def workers(self) -> Workers:
        retired = (slot for slot in self._slots if slot not in self._slots_in_force and slot.leaving)
        serving = sum(slot.serving for slot in self._slots_in_force)
        return Workers(self._count, serving, draining=sum(slot.pid is not None for slot in retired))

    @property
    def fleet(self) -> FleetView:
        take_over(self._view, [(slot.report, slot.serving) for slot in self._slots if slot.report is not None])
        return self._view

    @property
    def anonymous(self) -> bool:
        return self._spec.gateway.auth.anonymous == "allow"

    def degraded(self) -> list[str]:
        return list(dict.fromkeys(text for report in self._reports() for text in report.degraded))

    def drained(self, endpoint: Endpoint) -> bool:
        told = [report.endpoints.get(endpoint.id) for report in self._reports()]
        return endpoint.spec.drain and all(one is not None and one.drained for one in told)

    async def list_requests(self, wanted: RequestFilter) -> RequestList:
        asked = [slot for slot in self._slots if slot.report is not None]
        question = ListRequests(next(self._questions), wanted)
        answers = await asyncio.gather(*(slot.ask(question) for slot in asked))
        lists = [answer.listed for answer in answers if answer is not None and answer.listed is not None]
        silent = [slot.number for slot, answer in zip(asked, answers, strict=True) if answer is None]
        problems = [f"worker {number} has not answered: its requests are not listed." for number in silent]
        return merged([*lists, RequestList(requests=[], matching=0, problems=problems)], wanted)

    async def cancel_request(self, id_: str) -> bool:
        question = CancelRequest(next(self._questions), id_)
        answers = await asyncio.gather(*(slot.ask(question) for slot in self._slots if slot.report is not None))
        if any(answer is not None and answer.cancelled for answer in answers):
            return True
        if None in answers:
            message = "A worker does not answer: if it has the request, that ends when it does. List the open requests."
            raise unavailable(message, code="worker_silent")
        return False

    def configuration(self) -> tuple[FleetSpec, Origins]:
        return self._spec, self._origins

    def set_log_level(self, name: str, level: LogLevel | None) -> None:
        self.log_levels.set_or_reset(name, level)
        for slot in self._slots:
            slot.set_log_level(SetLogLevel(name, level))

    async def start(self) -> None:
        """Serve with all workers. Raises ListenError if an address is not to be had, WorkerError if a worker ends."""
        gateway = self._spec.gateway
        await self._admin.start()
        self._http = bind("http", gateway.http)
        self._grpc = _found_free(gateway.grpc)
        await self.state.start()
        self._in_force = first = self._new_generation(self._spec, [])
        await first.served()

    async def reload(self) -> Reloaded:
        """Have new workers serve what the fleet file says now, then let the old ones drain. Raises ReloadError, and
        nothing has changed."""
        async with self._reloading:
            old = self._in_force
            if old is None or self.lifecycle != "serving":
                raise ReloadError(f"The gateway is {self.lifecycle}: nothing is reloaded.")
            spec, content_hash, given = await self._read_again()
            spec, reloaded = what_can_change(self._spec, spec, _FIXED)
            self._raise_if_stopping()
            of_file = file_documents(spec, content_hash=content_hash)
            documents = [*of_file, *(one for one in self.state.documents if one.source != "file")]
            new = self._new_generation(spec, documents)
            try:
                await new.served()
                self._raise_if_stopping()
            except BaseException as error:  # that this is cancelled, too
                self._retire(new, compile_view(merge(documents), FleetView()))
                if isinstance(error, ListenError | WorkerError):
                    raise ReloadError(f"The new workers do not serve, so the old ones stay. {error}") from None
                raise
            self._in_force, self._spec = new, spec
            self._origins = self._origins.reread(given, content_hash, _FIXED)
            self._retire(old, self._view)
            await self.state.publish(of_file, content_hash)
            reloaded.tell()
            return reloaded

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise ReloadError("The gateway has been told to stop: nothing is reloaded.")

    def _new_generation(self, spec: FleetSpec, documents: list[Document]) -> Generation:
        """Workers that serve `spec`, and `documents` until their generation is in force: then what all follow."""
        served = structs.replace(spec, gateway=structs.replace(spec.gateway, grpc=self._grpc), pools={}, routes={})

        counts = shared_memory(self._count)

        def start(number: int, place: int) -> Start:
            return Start(
                number=number,
                spec=served,
                documents=msgspec.json.encode(self.state.documents if self._in_force is new else documents),
                http=[one.fileno() for one in self._http],
                workers=self._count,
                counts=counts,
                place=place,
                log_level=self._settings.log_level,
                log_format=self._settings.log_format,
                log_levels=self.log_levels.changed,
            )

        numbers = itertools.islice(self._numbers, self._count)
        new = Generation(
            (Slot(number, partial(start, number, place), self._worker_ended) for place, number in enumerate(numbers)),
            counts,
        )
        self._generations.append(new)
        return new

    def _retire(self, generation: Generation, knows: FleetView) -> None:
        """Have a generation drain, which knows of this fleet."""
        task = asyncio.create_task(self._wait_out(generation, knows), name="retiring workers")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _wait_out(self, generation: Generation, knew: FleetView) -> None:
        generation.settle(accepting=False)
        await asyncio.sleep(self.settle_s)
        await generation.stop_in_turn()
        await asyncio.wait(generation.keepers)
        await asyncio.gather(*generation.keepers, return_exceptions=True)  # what they raise is known
        self._generations.remove(generation)
        generation.ended()
        self._former_restarts += sum(slot.restarts for slot in generation.slots)
        self._totals.followed(knew, self._view)  # what has left since, it may have counted to its end

    def begin_drain(self) -> None:
        """Have the workers serve on, and everybody know that they will stop."""
        self._stopping = True
        for generation in self._generations:
            generation.settle(accepting=True)

    async def stop(self) -> None:
        """Let the workers drain, then release everything. Cancelled, it has them wait for streams no longer."""
        self._stopping = True
        for one in self._http:
            one.close()
        for generation in self._generations:
            generation.stop()
        if keepers := [keeper for generation in self._generations for keeper in generation.keepers]:
            try:
                await asyncio.wait(keepers)
            except asyncio.CancelledError:
                for generation in self._generations:
                    generation.cut()
                await asyncio.wait(keepers, timeout=_LAST_WORDS_S)
            for keeper in keepers:
                keeper.cancel()  # whose worker is killed with it
            await asyncio.gather(*keepers, return_exceptions=True)  # what they raise, `start` or `reload` has raised
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        for generation in self._generations:
            generation.ended()
        await self._admin.stop()
        await self.state.stop()

    @property
    def _slots(self) -> list[Slot]:
        return [slot for generation in self._generations for slot in generation.slots]

    @property
    def _slots_in_force(self) -> Sequence[Slot]:
        return self._in_force.slots if self._in_force is not None else ()

    def _worker_ended(self, last: Report) -> None:
        self._totals.ended(last)
        if self._stopping:
            self.cut += max(last.cut, last.live_requests)  # these, where it had no time to cut them itself

    def _apply(self, documents: list[Document]) -> None:
        """Take over changed documents."""
        self.merged = merge(documents)
        view = compile_view(self.merged, self._view)
        self._totals.followed(self._view, view)
        self._view = view

    def _reports(self) -> Iterator[Report]:
        return (slot.report for slot in self._slots if slot.report is not None)

    def _restarts(self) -> int:
        return self._former_restarts + sum(slot.restarts for slot in self._slots)

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


def _found_free(address: str | None) -> str | None:
    """The gRPC address of all workers, with one port, found free. Raises ListenError."""
    if address is None:
        return None
    host, _, _ = address.rpartition(":")
    try:
        return f"{host}:{free_port(address)}"
    except OSError as error:
        raise not_to_be_had("grpc", address, error) from None
