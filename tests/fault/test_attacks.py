"""Attacks as slowhttptest makes them, and floods of HTTP/2: whoever asks besides gets its answers, and about as soon.

Small in the suite, where only the answers are held to. `ATTACK_CONNECTIONS=5000` makes them large and measures: the
99th percentile of the others' latency while they last is compared with that before and after, in the same minute.
"""

import asyncio
import contextlib
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import msgspec
import pytest_asyncio

from gateway.upstream.triton.raw import SERVICE
from headrace.bench.kserve.messages import ONCE, text_request
from router.spec.fleet import FleetSpec, RouteSpec
from router.spec.gateway import ClientsSpec, GatewaySpec, TlsSpec
from tests.certificates import make
from tests.fault.attackers import GRPC, HTTP
from tests.fault.held_triton import HeldTriton
from tests.fault.worker_command import Command, command
from tests.harness import AT_ONCE, EngineConnection, ScriptedEngine, free_port, one_pool

COUNT = int(os.environ.get("ATTACK_CONNECTIONS", "0"))
KINDS = os.environ.get("ATTACK_KINDS", "").split()
RATE = float(os.environ.get("ATTACK_RATE", "500"))
WINDOW_S, ROUNDS = (3.0, 2) if COUNT else (0.2, 1)
SETTLE_S = 15.0 if COUNT else 0.0
"""Until an attack is under way: first requests come all at once, to an engine in the process that measures."""
LARGE_BYTES = 400 * 1024
"""More than a gateway and the kernel hold of an answer that nobody reads."""
MOST = 1.5
"""How much longer the others may wait, as a ratio of their 99th percentiles."""
ROOT = Path(__file__).parents[2]
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
ASK = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY

Ask = Callable[[], Awaitable[None]]


async def answer(connection: EngineConnection) -> None:
    size = LARGE_BYTES if b'"large"' in connection.body else 2
    await connection.head("content-type: application/json", f"content-length: {size}")
    await connection.send(b"{}".ljust(size))


@contextlib.asynccontextmanager
async def gateway(folder: Path, *, tls: TlsSpec | None = None) -> AsyncIterator[Command]:
    async with ScriptedEngine(answer) as engine, HeldTriton() as triton:
        spec = one_pool(engine.endpoint(), max_in_flight="off")
        pools = triton.pools(max_in_flight="off")
        whole: FleetSpec = msgspec.structs.replace(
            spec,
            pools={**spec.pools, **pools},
            routes={**spec.routes, **{route: RouteSpec(pool=route) for route in pools}},
        )
        http, admin, grpc_ = (f"127.0.0.1:{free_port()}" for _ in range(3))
        caps = ClientsSpec(streams_per_connection=100, streams_per_peer=200)
        addresses = GatewaySpec(http=http, admin=admin, grpc=grpc_, drain=AT_ONCE, clients=caps, tls=tls)
        async with command(folder, whole, addresses, workers=1) as running:
            await running.until(lambda state: state["status"] == "ready")
            yield running


class Attackers:
    """The process of those who attack."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @contextlib.asynccontextmanager
    async def attacking(self, kind: str, address: str | None, count: int) -> AsyncIterator[None]:
        assert address is not None
        await self._told(f"{kind} {address.rpartition(':')[2]} {count} {RATE}\n", 30 + count / RATE * 4)
        yield
        await self._told("\n", 30)

    async def _told(self, line: str, patience_s: float) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line.encode())
        async with asyncio.timeout(patience_s):
            assert await self._process.stdout.readline() == b"done\n"


@pytest_asyncio.fixture
async def attackers() -> AsyncIterator[Attackers]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fault.attackers"),
        cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    yield Attackers(process)
    process.kill()
    await process.wait()


async def latencies(ask: Ask, seconds: float) -> list[float]:
    """What a client waits for its answers, one after another."""
    waited: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        await asyncio.wait_for(ask(), 20)
        waited.append(time.perf_counter() - began)
        await asyncio.sleep(0.004)
    return waited


@contextlib.asynccontextmanager
async def over_http(running: Command, context: ssl.SSLContext | None = None) -> AsyncIterator[Ask]:
    host, _, port = running.addresses.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)

    async def ask() -> None:
        writer.write(ASK)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        assert await reader.readexactly(2) == b"{}"

    yield ask
    writer.close()


@contextlib.asynccontextmanager
async def over_grpc(running: Command, _: ssl.SSLContext | None = None) -> AsyncIterator[Ask]:
    assert running.addresses.grpc is not None
    async with grpc.aio.insecure_channel(running.addresses.grpc) as channel:
        call, request = channel.unary_unary(f"/{SERVICE}/ModelInfer"), text_request(ONCE)

        async def ask() -> None:
            assert await call(request)

        yield ask


def p99(waited: list[float]) -> float:
    return sorted(waited)[int(len(waited) * 0.99)]


async def compared(attackers: Attackers, kind: str, address: str | None, ask: Ask) -> float:
    """Hold that who asks is answered under attack; the ratio of the 99th percentiles."""
    calm: list[float] = []
    attacked: list[float] = []
    for _ in range(ROUNDS):
        calm += await latencies(ask, WINDOW_S)
        async with attackers.attacking(kind, address, COUNT or 40):
            await asyncio.sleep(SETTLE_S)
            attacked += await latencies(ask, WINDOW_S)
        await asyncio.sleep(SETTLE_S)
    ratio = p99(attacked) / p99(calm)
    print(f"{kind}: p99 {p99(calm) * 1000:.2f} ms, under attack {p99(attacked) * 1000:.2f} ms: {ratio:.2f}", flush=True)
    return ratio


async def test_others_are_answered_while_some_attack(attackers: Attackers, tmp_path: Path) -> None:
    ratios = {}
    async with gateway(tmp_path) as running:
        for ask_over, kinds, address in (
            (over_http, HTTP, running.addresses.http),
            (over_grpc, GRPC, running.addresses.grpc),
        ):
            async with ask_over(running) as ask:
                await latencies(ask, WINDOW_S)
                for kind in kinds:
                    if kind in KINDS or not KINDS:
                        ratios[f"{ask_over.__name__} {kind}"] = await compared(attackers, kind, address, ask)
    assert not COUNT or max(ratios.values()) <= MOST, ratios


async def test_others_are_answered_while_handshakes_stall(attackers: Attackers, tmp_path: Path) -> None:
    made = make(tmp_path)
    async with gateway(tmp_path, tls=TlsSpec(cert=str(made.cert), key=str(made.key))) as running:
        async with over_http(running, made.client()) as ask:
            await latencies(ask, WINDOW_S)
            ratio = await compared(attackers, "silence", running.addresses.http, ask)
    assert not COUNT or ratio <= MOST
