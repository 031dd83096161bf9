"""Run a server until it is told to stop: let it drain, and cut that short when told again.

SIGTERM comes from whoever also sends requests: Kubernetes takes a pod out of its services at the moment at which it
tells it to stop, and load balancers look at `/readyz` every few seconds. Until all of them have noticed they go on
sending, so the server goes on serving for a while, and only then refuses connections. SIGINT is somebody at a
keyboard, and nobody has to notice.

Meanwhile the process keeps the memory it has freed and collects garbage seldom: both cost a server of many short
requests more than they give back.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from gateway.reload import Reloaded, ReloadError

_COLLECT_EVERY = 20_000
"""Objects made and not freed before the youngest are looked at (CPython's default: 700)."""

_KEPT_BYTES = 8 * 1024 * 1024
"""Freed memory that the C library keeps, and the largest block that it takes from what it keeps."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's parameters (malloc.h)."""

logger = logging.getLogger("headrace.gateway")


class Server(Protocol):
    """What can be run. `stop` may be called whatever became of `start`."""

    @property
    def settle_s(self) -> float:
        """How long it goes on serving after `begin_drain`."""

    @property
    def cut(self) -> int:
        """How many requests ended because it stopped."""

    async def start(self) -> None: ...

    def begin_drain(self) -> None:
        """Go on serving, but let everybody know that it will stop."""

    async def reload(self) -> Reloaded:
        """Serve what the fleet file says now. Raises ReloadError."""

    async def stop(self) -> None:
        """Drain, then release everything. Cancelled, it waits for streams no longer."""


class Stop:
    """The wish that a server stop, of whoever holds it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.settles = True
        """There is time to go on serving until everybody has noticed."""
        self.insisted = asyncio.Event()

    def ask(self, *, settle: bool = True) -> None:
        """Ask it to drain, at once unless it is to `settle`; the second time, to wait for streams no longer."""
        if self.asked.is_set():
            self.insisted.set()
        else:
            self.settles = settle
            self.asked.set()

    def heed_signals(self) -> None:
        """Have SIGTERM and SIGINT ask, too."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.ask)
        loop.add_signal_handler(signal.SIGINT, partial(self.ask, settle=False))


async def serve(server: Server, stop: Stop) -> None:
    """Serve until `stop`, then drain. A start still under way is cancelled. Raises what `server.start` raises."""
    _keep_freed_memory()
    starting = asyncio.create_task(server.start())
    asked = asyncio.create_task(stop.asked.wait())
    told: float | None = None
    try:
        await asyncio.wait([starting, asked], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _spare_the_collector()
            await asked
            told = time.monotonic()
            if stop.settles and server.settle_s:
                await _settle(server, stop)
            logger.info("stopping: no new connections, waiting for streams to finish")
        else:
            logger.info("stopping before all of it has started")
    finally:
        asked.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)  # what it raises by itself has been raised
        await _drain(server, stop)
    if told is not None:
        cut = f"{server.cut} streams were" if server.cut != 1 else "1 stream was"
        logger.info("stopped in %.1f s; %s cut", time.monotonic() - told, cut)


async def heed_hangups(reload: Callable[[], Awaitable[Reloaded]]) -> None:
    """Have SIGHUP reload, one after another, until cancelled; any number during one are one more."""
    hung_up = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up.set)
    while True:
        await hung_up.wait()
        hung_up.clear()
        logger.info("SIGHUP: reading the fleet file again")
        try:
            await reload()
        except ReloadError as error:
            logger.error("not reloaded: %s", error)
        except Exception:
            logger.exception("reloading failed")


async def _settle(server: Server, stop: Stop) -> None:
    server.begin_drain()
    logger.info("stopping: not ready any more, and serving for %g s until that has been noticed", server.settle_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(server.settle_s):
            await stop.insisted.wait()


async def _drain(server: Server, stop: Stop) -> None:
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
