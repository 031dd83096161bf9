"""Clients while generations of workers change, over both APIs: with streams that are held, and with short requests
without end."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import grpc
from tritonclient.grpc import service_pb2

from gateway.upstream.triton.raw import SERVICE
from headrace.bench.kserve.messages import ONCE, text_request
from headrace.bench.kserve.messages import STREAM as STREAM_ROUTE
from tests.fault.worker_command import Command
from tests.harness import DONE, ONE, STREAM, EngineConnection, HeldEngine

MAY_END_SO = {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
LOST_WHILE_WRITING = (grpc.StatusCode.INTERNAL, "Internal error from Core")
"""What gRPC's own asyncio client says of a call that ends while it still writes its request, whatever the status."""

SHORT = {**STREAM, "messages": [{"role": "user", "content": "short"}]}
HELD_CALL = text_request(STREAM_ROUTE)
_short = service_pb2.ModelInferRequest.FromString(HELD_CALL)
_short.id = "short"
SHORT_CALL = _short.SerializeToString()

ALL_OF_IT = 2, grpc.StatusCode.OK
"""How many messages a stream has, and how it ends."""


class Engine(HeldEngine):
    """Holds all streams but those that are asked to be short."""

    async def _hold(self, connection: EngineConnection) -> None:
        if b'"short"' in connection.body:
            await connection.stream(ONE, DONE)
        else:
            await super()._hold(connection)


class Call:
    """One gRPC client's stream."""

    def __init__(self, channel: grpc.aio.Channel, message: bytes) -> None:
        self.messages = 0
        self.details = ""
        self.code: grpc.StatusCode | None = None
        self.began = asyncio.Event()
        self.ended = asyncio.create_task(self._run(channel, message))

    @property
    def complete(self) -> bool:
        return (self.messages, self.code) == ALL_OF_IT

    async def _run(self, channel: grpc.aio.Channel, message: bytes) -> None:
        call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(message)
            await call.done_writing()
            async for _ in call:  # `read` would leave out what it has not asked for when the status comes
                self.messages += 1
                self.began.set()
        self.code = await call.code()
        self.details = await call.details()


@contextlib.asynccontextmanager
async def channels(address: str | None, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Channels that have a connection each."""
    assert address is not None
    alone = [("grpc.use_local_subchannel_pool", 1)]
    opened = [grpc.aio.insecure_channel(address, options=alone) for _ in range(count)]
    try:
        yield opened
    finally:
        await asyncio.gather(*(one.close() for one in opened))


@contextlib.asynccontextmanager
async def calls(address: str | None, count: int) -> AsyncIterator[list[Call]]:
    """gRPC streams that have begun."""
    async with channels(address, -(-count // 10)) as opened:
        begun = [Call(opened[number % len(opened)], HELD_CALL) for number in range(count)]
        try:
            async with asyncio.timeout(30 + count / 10):
                for call in begun:
                    await call.began.wait()
            yield begun
        finally:
            for call in begun:
                call.ended.cancel()
            await asyncio.gather(*(call.ended for call in begun), return_exceptions=True)


class Traffic:
    """Short requests without end, over HTTP on new and on kept connections, and over gRPC; and a look at readiness
    and counters meanwhile."""

    def __init__(self, running: Command) -> None:
        self._running = running
        self.http: Counter[str] = Counter()
        self.grpc: Counter[str] = Counter()

    async def new_connections(self) -> None:
        while True:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
                await self._ask(session)

    async def kept_connections(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                await self._ask(session)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.post(f"{self._running.url}/v1/chat/completions", json=SHORT) as response:
                whole = await response.read() == ONE + DONE
                self.http["whole" if whole else f"{response.status}, not whole"] += 1
        except aiohttp.ClientError as error:
            self.http[repr(error)] += 1
        await asyncio.sleep(0.01)

    async def grpc_calls(self, channel: grpc.aio.Channel) -> None:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        request = text_request(ONCE)
        while True:
            try:
                await infer(request, timeout=30)
                self.grpc["whole"] += 1
            except grpc.aio.AioRpcError as error:
                assert error.code() in MAY_END_SO, error
                self.grpc[f"{error.code().name}: {error.details()}"] += 1
            call = Call(channel, SHORT_CALL)
            await call.ended
            if not call.complete:
                ended_so = call.code in MAY_END_SO or (call.code, call.details) == LOST_WHILE_WRITING
                assert ended_so and not call.messages, (call.code, call.messages, call.details)
            self.grpc["whole" if call.complete else f"{call.code}"] += 1
            await asyncio.sleep(0.01)

    async def readiness(self) -> None:
        while True:
            state = await self._running.readiness()
            assert state["status"] == "ready", state
            await asyncio.sleep(0.05)

    async def counters(self) -> None:
        before: dict[tuple[str, ...], float] = {}
        while True:
            after = await self._running.samples()
            counted = {key for key in before if key[0].endswith(("_total", "_bucket", "_sum", "_count"))}
            assert not {key for key in counted if after.get(key, 0) < before[key]}
            before = after
            await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """As long as it flows, nothing that it asserts may fail."""
        async with channels(self._running.addresses.grpc, 4) as opened:
            parts = [
                *(self.new_connections() for _ in range(4)),
                *(self.kept_connections() for _ in range(4)),
                *(self.grpc_calls(channel) for channel in opened),
                self.readiness(),
                self.counters(),
            ]
            tasks = [asyncio.create_task(part) for part in parts]
            try:
                yield
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
