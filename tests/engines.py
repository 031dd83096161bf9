"""Session fixtures: the real Valkey, Triton and llama.cpp of the embedded fleet, one process each.

Import the fixtures in a `conftest.py`. The engines live on the event loop of the test session, under the same
supervisor as in `headrace up`; a test may kill one and wait until it is back on its ports. Each engine is started
when the first test asks for it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest_asyncio

from headrace.local.part import Part
from headrace.local.parts import TritonPorts, llama_part, triton_part, valkey_part
from headrace.local.ports import free_ports
from headrace.local.run_dir import RunDir
from headrace.local.supervisor import Supervisor
from headrace.local.wheels import Wheels, find_wheels


class SilentReporter:
    """Nobody watches the engines of a test run start."""

    def starting(self, part: Part) -> None:
        pass

    def ready(self, part: Part, seconds: float) -> None:
        pass

    def restarting(self, part: Part, reason: str, delay_s: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Engine:
    """One running part: `kill` it, and `until_ready` returns when the supervisor has brought it back."""

    name: str
    supervisor: Supervisor

    @property
    def pid(self) -> int:
        return self.supervisor.pid(self.name)

    async def kill(self) -> None:
        """`kill -9`; returns when the process is gone, and its restart follows."""
        await self.supervisor.crash(self.name)

    async def until_ready(self, timeout_s: float = 30) -> None:
        async with asyncio.timeout(timeout_s):
            await self.supervisor.until_ready(self.name)


@dataclass(frozen=True, slots=True)
class Valkey(Engine):
    url: str


@dataclass(frozen=True, slots=True)
class Triton(Engine):
    grpc: str
    http: str
    metrics: str


@dataclass(frozen=True, slots=True)
class Llama(Engine):
    http: str


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every engine fixture needs."""

    wheels: Wheels
    run: RunDir
    supervisor: Supervisor


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def workshop() -> AsyncIterator[Workshop]:
    with RunDir() as run:
        async with Supervisor(SilentReporter()) as supervisor:
            yield Workshop(find_wheels(), run, supervisor)


StartTriton = Callable[[str], Awaitable[Triton]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def start_triton(workshop: Workshop) -> StartTriton:
    async def start(name: str) -> Triton:
        http, grpc, metrics = free_ports(3)
        part = triton_part(workshop.wheels, workshop.run, name, TritonPorts(http, grpc, metrics))
        await workshop.supervisor.start([part])
        return Triton(
            name,
            workshop.supervisor,
            grpc=f"127.0.0.1:{grpc}",
            http=f"http://127.0.0.1:{http}",
            metrics=f"http://127.0.0.1:{metrics}/metrics",
        )

    return start


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def triton_a(start_triton: StartTriton) -> Triton:
    return await start_triton("triton-a")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def triton_b(start_triton: StartTriton) -> Triton:
    return await start_triton("triton-b")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llama(workshop: Workshop) -> Llama:
    (port,) = free_ports(1)
    await workshop.supervisor.start([llama_part(workshop.wheels, workshop.run, port)])
    return Llama("llama-a", workshop.supervisor, http=f"http://127.0.0.1:{port}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def valkey(workshop: Workshop) -> Valkey:
    (port,) = free_ports(1)
    await workshop.supervisor.start([valkey_part(workshop.wheels.valkey, workshop.run, port)])
    return Valkey("valkey", workshop.supervisor, url=f"redis://127.0.0.1:{port}")
