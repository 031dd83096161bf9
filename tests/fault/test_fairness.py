"""One tenant that wants fifty times its share of an engine, beside nine who want less than theirs.

An engine with eight slots and a fixed service time, a real gateway, tenants whose requests come at random times of a
fixed seed. The nine use 60 % of the capacity together. What their waits come to is held by a simulation
(`tests/unit/test_admission_fairness.py`); real time on a shared machine is measured and printed, not asserted. A
request that is not started within ten service times counts as lost.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256

import aiohttp
import msgspec
import pytest

from router.spec.fleet import KeySpec, TenantSpec
from tests.harness import DONE, ONE, STREAM, EngineConnection, RunningGateway, ScriptedEngine, one_pool, running_gateway

SLOTS = 8
SERVICE_S = 0.4
CAPACITY = SLOTS / SERVICE_S
NINE = [f"tenant-{number}" for number in range(9)]
GREEDY = "greedy"
SECONDS = 10.0
PATIENCE = "first_byte=4s"


class Slots:
    """The engine: what is more than it can work on at a time waits inside it."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(SLOTS)
        self.at_work = 0
        self.most = 0

    async def __call__(self, connection: EngineConnection) -> None:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        try:
            async with self._free:
                await asyncio.sleep(0.1 * SERVICE_S)
                await connection.events(ONE)
                await asyncio.sleep(0.9 * SERVICE_S)
                await connection.chunk(DONE)
                await connection.end()
        finally:
            self.at_work -= 1


@dataclass
class Seen:
    """What came of a run, by tenant."""

    served: Counter[str] = field(default_factory=Counter)
    refused: Counter[int] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    """Of the nine, in seconds."""

    @property
    def ttft_p99(self) -> float:
        return sorted(self.ttft)[int(0.99 * len(self.ttft))]


async def run(rates: dict[str, float]) -> Seen:
    """Tenants that ask `rates` times a second."""
    slots, seen = Slots(), Seen()
    loop = asyncio.get_running_loop()
    known = {name: TenantSpec(keys=[KeySpec(sha256=sha256(name.encode()).hexdigest())]) for name in rates}

    async def ask(client: aiohttp.ClientSession, running: RunningGateway, tenant: str, at: float) -> None:
        await asyncio.sleep(at - loop.time())
        headers = {"x-api-key": tenant, "x-headrace-timeouts": PATIENCE}
        body = {**STREAM, "max_tokens": 100}
        async with client.post(f"{running.url}/v1/chat/completions", json=body, headers=headers) as response:
            first = await response.content.readany()
            if response.status != 200:
                assert tenant == GREEDY or b"queue" in first
                seen.refused[response.status] += 1
                return
            if tenant != GREEDY:
                seen.ttft.append(loop.time() - at)
            assert (first + await response.read()).endswith(DONE)
            seen.served[tenant] += 1

    async with ScriptedEngine(slots) as engine:
        spec = msgspec.structs.replace(one_pool(engine.endpoint(), max_in_flight=SLOTS), tenants=known)
        connector = aiohttp.TCPConnector(limit=0)
        async with running_gateway(spec) as running, aiohttp.ClientSession(connector=connector) as client:
            start, asked = loop.time() + 0.1, []
            for tenant, rate in rates.items():
                own = random.Random(tenant)
                at = own.expovariate(rate)
                while at < SECONDS:
                    asked.append(asyncio.create_task(ask(client, running, tenant, start + at)))
                    at += own.expovariate(rate)
            await asyncio.gather(*asked)
    assert slots.most <= SLOTS
    return seen


async def test_beside_a_tenant_at_fifty_times_its_share_the_others_keep_their_goodput(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nine = dict.fromkeys(NINE, 0.6 * CAPACITY / 9)
    alone = await run(nine)
    beside = await run({**nine, GREEDY: 50 * 0.1 * CAPACITY})
    with capsys.disabled():
        ratio = beside.ttft_p99 / alone.ttft_p99
        print(
            f"\nnine of ten: {sum(alone.served.values())} requests alone, {sum(beside.served[name] for name in NINE)} "
            f"beside; p99 TTFT {alone.ttft_p99:.3f} s and {beside.ttft_p99:.3f} s, {ratio:.2f} times; "
            f"the greedy one: {beside.served[GREEDY]} served, refused {dict(beside.refused)}"
        )
    assert sum(beside.served[name] for name in NINE) >= 0.95 * sum(alone.served.values())
    assert all(beside.served[name] >= 0.9 * alone.served[name] for name in NINE)
    assert beside.served[GREEDY] > 0
    assert set(beside.refused) <= {429, 503}
    assert beside.refused
