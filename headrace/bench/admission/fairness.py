"""`headrace bench fairness`: nine tenants below their share, alone and beside one who wants fifty times its own.

An engine with eight slots and a fixed service time, a tenth of it before the first token; a real gateway in front;
requests that come at random times, the same ones alone and beside. The nine use 60 % of the slots together.

A tail's latency needs many requests, and on a machine that others use too, every delay of theirs is in it. So the
service time is long beside what a machine holds a process up, and the same is done several times over at once, with
other times of arrival: each repetition is two routes of one gateway, with queues of their own, one for the nine alone
and one for all ten, so that both see the same machine. All repetitions of a round make one tail.

Requests are sent by this process when they are due, whatever became of the ones before, and their time counts from when
they were due. One that is not started within ten service times is lost.
"""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Final

from rich.console import Console
from rich.text import Text

from gateway.file_limit import raise_file_limit
from gateway.http.connection import KEEP_ALIVE_S
from headrace.bench.admission.fronts import front_part, gateway_spec
from headrace.bench.figures import BenchError, Figure, Measured, Plan
from headrace.bench.processes import unless_ended
from headrace.bench.relay.programs import Programs, compile_programs
from headrace.bench.relay.sides import GATEWAY, Engines, engine_part
from headrace.bench.relay.stretches import Stretch, make_request
from headrace.local.ports import LOOPBACK, free_ports
from headrace.local.progress import make_progress
from headrace.local.run_dir import RunDir
from headrace.local.supervisor import Supervisor
from router.spec.fleet import EndpointSpec, FleetSpec, KeySpec, PoolSpec, RouteSpec, TenantSpec
from router.spec.gateway import AuthSpec

SLOTS: Final = 8
NINE: Final = tuple(f"tenant-{number}" for number in range(9))
GREEDY: Final = "greedy"
TIMES_ITS_SHARE: Final = 50
LOAD: Final = 0.6
"""Of the slots, by the nine together."""
PREFILL: Final = 0.1
"""Part of the service time that is over when the first token comes."""
PATIENCE: Final = 10
"""Service times within which a request is to be started."""
_CHUNKS: Final = 10
_US: Final = 1e6
_ANSWER_LIMIT: Final = 1024 * 1024

ALONE: Final = "alone"
BESIDE: Final = "beside"
TTFT_RATIO: Final = Figure("nine_ttft_p99_vs_alone", bar=1.2)
GOODPUT_RATIO: Final = Figure("nine_goodput_vs_alone", bar=0.95, at_least=True)
WORST_RATIO: Final = Figure("worst_tenants_goodput_vs_alone", bar=0.95, at_least=True)
TTFT: Final = {name: Figure(f"nine_ttft_p99_{name}_ms") for name in (ALONE, BESIDE)}
GREEDY_SLOTS: Final = Figure("greedy_part_of_slots")
"""What the greedy one gets; the nine leave it 0.4."""
FIGURES: Final = (TTFT_RATIO, GOODPUT_RATIO, WORST_RATIO, *TTFT.values(), GREEDY_SLOTS)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    rounds: int
    repetitions: int
    """At once."""
    service_s: float
    seconds: float
    """In which requests come."""
    warm_up_s: float
    """The first of them, which do not count."""


FULL: Final = Sizes(rounds=5, repetitions=20, service_s=1.0, seconds=90.0, warm_up_s=15.0)
QUICK: Final = Sizes(rounds=1, repetitions=20, service_s=0.75, seconds=36.0, warm_up_s=8.0)


@dataclass(slots=True)
class Seen:
    """What came of requests: those that count."""

    served: Counter[str] = field(default_factory=Counter)
    """By tenant."""
    ttft: list[float] = field(default_factory=list)
    """Of the nine, in seconds."""

    @property
    def ttft_p99(self) -> float:
        return sorted(self.ttft)[int(0.99 * len(self.ttft))]

    @property
    def nine(self) -> int:
        return sum(self.served[name] for name in NINE)


async def measure(plan: Plan, err: Console) -> Measured:
    """Run the comparison; see `headrace.bench.catalogue.Bench`."""
    with RunDir() as run:
        return await compare(QUICK if plan.quick else FULL, run, await compile_programs(run), err)


async def compare(sizes: Sizes, run: RunDir, programs: Programs, err: Console) -> Measured:
    """Start engine and gateway, measure, and stop everything.

    Raises:
        BenchError: a request was answered as none should be.
        LocalFleetError: one of them could not be started or ended while it was measured.
    """
    raise_file_limit()
    progress = make_progress(err)
    figures: defaultdict[str, list[float]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(progress.close)
        supervisor = await stack.enter_async_context(Supervisor(progress))
        engine, unused, port, admin = free_ports(4)
        await supervisor.start([engine_part(run, programs, Engines(engine, unused))])
        spec = fleet_spec(engine, port, admin, sizes.repetitions)
        await supervisor.start([front_part(run, GATEWAY, spec, _headers(NINE[0]))])
        progress.close()

        async def rounds() -> None:
            for number in range(sizes.rounds):
                err.print(Text(f"round {number + 1} of {sizes.rounds}", style="dim"))
                _note(figures, sizes, await _one_round(port, number, sizes))

        await unless_ended(supervisor, rounds())
    return Measured(figures, asdict(sizes))


def fleet_spec(engine: int, port: int, admin: int, repetitions: int) -> FleetSpec:
    """For each repetition a route of the nine alone and one of all ten, each to a pool of its own."""
    names = [f"{who}-{number}" for number in range(repetitions) for who in (ALONE, BESIDE)]
    pools = {
        name: PoolSpec(
            protocol="openai",
            model=name,
            endpoints=[EndpointSpec(id=f"engine-{name}", http=f"http://{LOOPBACK}:{engine}")],
            max_in_flight=SLOTS,
        )
        for name in names
    }
    tenants = {name: TenantSpec(keys=[KeySpec(sha256=sha256(name.encode()).hexdigest())]) for name in (*NINE, GREEDY)}
    return FleetSpec(
        fleet="bench-fairness",
        pools=pools,
        routes={name: RouteSpec(pool=name) for name in names},
        tenants=tenants,
        gateway=gateway_spec(port, admin, AuthSpec()),
    )


def arrivals(seed: str, rate: float, seconds: float) -> list[float]:
    """Times of requests that come at random, `rate` a second."""
    dice, times = random.Random(seed), list[float]()
    at = dice.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += dice.expovariate(rate)
    return times


async def _one_round(port: int, number: int, sizes: Sizes) -> Mapping[str, Seen]:
    capacity = SLOTS / sizes.service_s
    rates = {**dict.fromkeys(NINE, LOAD * capacity / len(NINE)), GREEDY: TIMES_ITS_SHARE * capacity / (len(NINE) + 1)}
    seen = {ALONE: Seen(), BESIDE: Seen()}
    client = _Client(port, sizes)
    start = asyncio.get_running_loop().time() + 0.5
    try:
        async with asyncio.TaskGroup() as group:
            for repetition in range(sizes.repetitions):
                for tenant, rate in rates.items():
                    times = arrivals(f"{number} {repetition} {tenant}", rate, sizes.seconds)
                    for who in (ALONE, BESIDE) if tenant != GREEDY else (BESIDE,):
                        name = f"{who}-{repetition}"
                        group.create_task(client.send(name, tenant, [start + at for at in times], start, seen[who]))
    except* BenchError as errors:
        raise errors.exceptions[0] from None
    finally:
        client.close()
    return seen


def _note(figures: Mapping[str, list[float]], sizes: Sizes, seen: Mapping[str, Seen]) -> None:
    alone, beside = seen[ALONE], seen[BESIDE]
    figures[TTFT_RATIO.name].append(beside.ttft_p99 / alone.ttft_p99)
    figures[GOODPUT_RATIO.name].append(beside.nine / alone.nine)
    figures[WORST_RATIO.name].append(min(beside.served[name] / max(alone.served[name], 1) for name in NINE))
    for who, figure in TTFT.items():
        figures[figure.name].append(seen[who].ttft_p99 * 1000)
    slot_seconds = (sizes.seconds - sizes.warm_up_s) * SLOTS * sizes.repetitions
    figures[GREEDY_SLOTS.name].append(beside.served[GREEDY] * sizes.service_s / slot_seconds)


def _headers(tenant: str) -> tuple[str, ...]:
    return (f"x-api-key: {tenant}",)


class _Client:
    """Connections to the gateway, as many as there are requests at a time."""

    def __init__(self, port: int, sizes: Sizes) -> None:
        self._port = port
        self._sizes = sizes
        gap_s = (1 - PREFILL) * sizes.service_s / (_CHUNKS - 1)
        self._stretch = Stretch("fairness", _CHUNKS, round(gap_s * _US), 400, 1)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, float]] = []
        """And since when."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        for _, writer, _ in self._idle:
            writer.close()

    async def send(self, route: str, tenant: str, times: Sequence[float], start: float, seen: Seen) -> None:
        """Send a request at each of the loop times `times`."""
        patience = f"x-headrace-timeouts: first_byte={PATIENCE * self._sizes.service_s:g}s"
        prefill_us = round(PREFILL * self._sizes.service_s * _US)
        request = make_request(self._stretch, route, *_headers(tenant), patience, prefill_us=prefill_us)
        async with asyncio.TaskGroup() as group:
            for at in times:
                await asyncio.sleep(at - self._loop.time())
                counts = at - start >= self._sizes.warm_up_s
                group.create_task(self._ask(request, tenant, at, seen if counts else Seen()))

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One that the gateway is not about to close, because nobody has used it for long."""
        while self._idle:
            reader, writer, since = self._idle.pop()
            if self._loop.time() - since < KEEP_ALIVE_S / 2:
                return reader, writer
            writer.close()
        return await asyncio.open_connection(LOOPBACK, self._port, limit=_ANSWER_LIMIT)

    async def _ask(self, request: bytes, tenant: str, at: float, seen: Seen) -> None:
        reader, writer = await self._connection()
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 200 "):
                await reader.readuntil(b"data: ")
                if tenant != GREEDY:
                    seen.ttft.append(self._loop.time() - at)
                await reader.readuntil(b"[DONE]")
                await reader.readuntil(b"0\r\n\r\n")
                seen.served[tenant] += 1
            elif head.startswith((b"HTTP/1.1 429 ", b"HTTP/1.1 503 ")):
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
            else:
                status = head.split(b"\r\n", 1)[0].decode(errors="replace")
                raise BenchError(f"{tenant} was answered {status!r}")
            if b"\r\nconnection: close" not in head.lower():
                self._idle.append((reader, writer, self._loop.time()))
                return
        except (OSError, asyncio.IncompleteReadError) as error:
            raise BenchError(f"{tenant} lost its connection: {error}") from None
        writer.close()
