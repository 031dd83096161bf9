"""The load: fixed numbers of messages to one side, every answer counted, so that nothing is measured that failed."""

import asyncio
import time
from typing import Any, Final

import grpc

from headrace.bench.figures import BenchError
from headrace.bench.kserve.messages import ONCE, STREAM, TENSOR, tensor_request, text_request
from headrace.bench.kserve.server import SERVICE, channel_to

CALL_S: Final = 60.0
"""Deadline of one call; a large tensor on a busy machine takes a few seconds."""
PROBE_S: Final = 1.0


class Load:
    """A client of one side. To be made inside the event loop that uses it, and closed."""

    def __init__(self, name: str, address: str) -> None:
        self._name = name
        self._channel = channel_to(address)
        self._infer = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")
        self._infer_stream = self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        self._once = text_request(ONCE)
        self._stream = text_request(STREAM)

    async def close(self) -> None:
        await self._channel.close()

    async def unary(self, count: int, at_once: int) -> list[float]:
        """Call `count` times with `at_once` calls in flight; return each call's seconds."""
        seconds: list[float] = []
        left = iter(range(count))

        async def caller() -> None:
            for _ in left:
                started = time.perf_counter()
                await self._infer(self._once, timeout=CALL_S)
                seconds.append(time.perf_counter() - started)

        await self._all([caller() for _ in range(at_once)])
        return seconds

    async def streams(self, count: int, at_once: int, messages: int) -> None:
        """Open `count` streams, `at_once` at a time, with one request each that is answered by `messages`."""
        left = iter(range(count))

        async def caller() -> None:
            for _ in left:
                await self._one_stream(messages)

        await self._all([caller() for _ in range(at_once)])

    async def tensor(self, size: int) -> None:
        """Send one tensor of `size` bytes and take one back."""
        request = tensor_request(TENSOR, size)
        try:
            response = await self._infer(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise self._refused(error) from None
        if not size <= len(response) <= size + 1024:
            raise BenchError(f"{self._name} answered a tensor of {size} bytes with {len(response)} bytes")

    async def _one_stream(self, messages: int) -> None:
        call = self._infer_stream(timeout=CALL_S)
        await call.write(self._stream)
        await call.done_writing()
        answered = 0
        while await call.read() is not grpc.aio.EOF:
            answered += 1
        if answered != messages:
            raise BenchError(f"{self._name} answered a stream with {answered} messages instead of {messages}")

    async def _all(self, callers: list[Any]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for caller in callers:
                    group.create_task(caller)
        except ExceptionGroup as failed:  # not except*: before CPython 3.11.4 what that raises comes in a group again
            first = failed.exceptions[0]
            raise (self._refused(first) if isinstance(first, grpc.aio.AioRpcError) else first) from None

    def _refused(self, error: Any) -> BenchError:
        return BenchError(f"{self._name} answered {error.code().name}: {error.details()}")


async def answers(address: str) -> bool:
    """Whether a call to `address` gets its answer now. Raises nothing."""
    channel = channel_to(address)
    try:
        for route in (ONCE, TENSOR):
            await channel.unary_unary(f"/{SERVICE}/ModelInfer")(text_request(route), timeout=PROBE_S)
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close()
    return True
