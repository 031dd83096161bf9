"""Run a server until it is told to stop: let it drain, and cut that short when told again.

Meanwhile the process keeps the memory it has freed and collects garbage seldom: both cost a server of many short
requests more than they give back.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
from typing import Protocol

_COLLECT_EVERY = 20_000
"""Objects made and not freed before the youngest are looked at (CPython's default: 700)."""

_KEPT_BYTES = 8 * 1024 * 1024
"""Freed memory that the C library keeps, and the largest block that it takes from what it keeps."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's parameters (malloc.h)."""

logger = logging.getLogger("headrace.gateway")


class Server(Protocol):
    """What can be run. `stop` may be called whatever became of `start`."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Drain, then release everything. Cancelled, it waits for streams no longer."""


class Stop:
    """The wish that a server stop, of whoever holds it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def ask(self) -> None:
        """Ask it to drain; the second time, to wait for streams no longer."""
        (self.insisted if self.asked.is_set() else self.asked).set()

    def heed_signals(self) -> None:
        """Have SIGTERM and SIGINT ask, too."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.ask)


async def serve(server: Server, stop: Stop) -> None:
    """Serve until `stop`, then drain. A start still under way is cancelled. Raises what `server.start` raises."""
    _keep_freed_memory()
    starting = asyncio.create_task(server.start())
    asked = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait([starting, asked], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _spare_the_collector()
            await asked
            logger.info("stopping: no new connections, waiting for streams to finish")
        else:
            logger.info("stopping before all of it has started")
    finally:
        asked.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)  # what it raises by itself has been raised
        draining = asyncio.create_task(server.stop())
        insisted = asyncio.create_task(stop.insisted.wait())
        await asyncio.wait([draining, insisted], return_when=asyncio.FIRST_COMPLETED)
        insisted.cancel()
        if not draining.done():
            logger.warning("told to stop again: not waiting for streams any longer")
            draining.cancel()
            await asyncio.wait([draining])
        if not draining.cancelled():
            draining.result()


def _keep_freed_memory() -> None:
    """Let the C library keep what a prompt of some hundred kilobytes needed for the next one: given back to the system
    and taken again, every page of it is cleared and mapped anew, which costs as much as reading the prompt. What is
    above `_KEPT_BYTES` goes back at once. Without glibc, nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _spare_the_collector() -> None:
    """Everything that is there when serving begins stays: the garbage collector need not look at it again. What
    requests leave behind is freed by counting references, but for rare cycles: those may gather a little."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 20, 20)
