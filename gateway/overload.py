"""What a gateway process uses of what it may: measured once a second, for `router.overload` to judge.

- *loop*: how late the event loop runs a timer. Everything on it waits as long.
- *memory*: of the container's limit (cgroup) what cannot be given back, else of the machine's memory what the process
  holds.
- *files*: open files of those the process may open.
- *cpu*: how much of a core the event loop's thread uses. That it uses all of it harms nobody as long as the loop keeps
  up; so only requests that can wait for another day are kept from it then.
"""

import asyncio
import contextlib
import logging
import os
import random
import resource
import time
from collections import deque
from pathlib import Path

from gateway.metrics import Metrics
from router.errors import ApiError, unavailable
from router.overload import Change, Measure, Overload
from router.spec.gateway import OverloadSpec
from router.spec.units import seconds, share

_EVERY_S = 1.0
_RETRY_AFTER_S = 2
_BATCH_RETRY_AFTER_S = (10, 20)
_LEAST = 1e-6
"""In place of a limit of nothing."""
_READ_BYTES = 16 * 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")
_CLEARED = b"inactive_file "
"""Of a cgroup's memory, pages of files that the kernel takes back when it needs them."""

logger = logging.getLogger(__name__)

_WORDS = {
    Measure.SHED_BATCH: "requests of class batch are refused",
    Measure.STOP_KEEP_ALIVE: "connections are closed after their answer",
    Measure.REFUSE: "new requests are refused",
}
_LAGS = 3
"""How many times in a row the loop must have been late: a single time says little."""


class OverloadWatch:
    """Keeps an eye on one process."""

    def __init__(self, spec: OverloadSpec, metrics: Metrics) -> None:
        self._overload = Overload()
        self._lag_limit = seconds(spec.loop_lag) or _LEAST
        self._memory_share = share(spec.memory) or _LEAST
        self._files_share = share(spec.files) or _LEAST
        self._cpu_share = share(spec.cpu) or _LEAST
        self._cpu_s = 0.0
        self._lags: deque[float] = deque([0.0] * _LAGS, _LAGS)
        self._metrics = metrics

    @property
    def keeps_connections(self) -> bool:
        """Whether connections of clients are kept after their answer."""
        taken = self._overload.taken  # looked at for emptiness first, because an enumeration's hash is Python
        return not taken or Measure.STOP_KEEP_ALIVE not in taken

    def admit(self) -> None:
        """Raises a 503 ApiError if no new request is taken."""
        if self._overload.taken and Measure.REFUSE in self._overload.taken:
            raise refused()

    def admit_batch(self) -> None:
        """Raises a 503 ApiError if no new request of class `batch` is taken."""
        if not self._overload.taken.isdisjoint((Measure.SHED_BATCH, Measure.REFUSE)):
            message = "The gateway is busy and takes no requests of class batch now. Try again in a while."
            raise unavailable(message, code="overloaded", retry_after=random.randint(*_BATCH_RETRY_AFTER_S))

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        self._cpu_s = time.thread_time()
        with contextlib.closing(_Memory()) as memory:
            now = loop.time()
            while True:
                await asyncio.sleep(_EVERY_S)
                before, now = now, loop.time()
                pressures = self._measure(max(now - before - _EVERY_S, 0.0), now - before, memory)
                for change in self._overload.update(pressures, now):
                    _tell(change)
                for measure in self._overload.taken:
                    self._metrics.overloaded.values[measure.value,] += now - before

    def _measure(self, lag: float, elapsed: float, memory: "_Memory") -> dict[str, float]:
        before, self._cpu_s = self._cpu_s, time.thread_time()
        self._lags.append(lag)
        return {
            "cpu": (self._cpu_s - before) / elapsed / self._cpu_share,
            "loop": min(self._lags) / self._lag_limit,
            "memory": memory.used() / self._memory_share,
            "files": _files_used() / self._files_share,
        }


def refused() -> ApiError:
    """What a client is told while no new request is taken."""
    message = "The gateway is overloaded and takes no new requests now. Try again in a moment."
    return unavailable(message, code="overloaded", retry_after=_RETRY_AFTER_S)


def _tell(change: Change) -> None:
    where = change.resource, change.pressure * 100
    if change.taken:
        logger.warning("overload: %s: %s is at %.0f%% of its limit", _WORDS[change.measure], *where)
    else:
        text = "overload: it is over that %s: %s is at %.0f%% of its limit"
        logger.info(text, _WORDS[change.measure], *where)


def _files_used() -> float:
    """About the share of files that are open: the system hands out the lowest number that is free."""
    try:
        lowest = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return 1.0
    os.close(lowest)
    return lowest / resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class _Memory:
    """The memory in use, of what may be. What tells of it is kept open: files may be what runs out."""

    def __init__(self) -> None:
        self._limit = os.sysconf("SC_PHYS_PAGES") * _PAGE
        self._files = [os.open("/proc/self/statm", os.O_RDONLY)]
        with contextlib.suppress(OSError, ValueError):  # no cgroup of version 2, or "max": no limit
            self._limit = min(int((_CGROUP / "memory.max").read_text()), self._limit)
            self._files += [os.open(_CGROUP / name, os.O_RDONLY) for name in ("memory.current", "memory.stat")]

    def used(self) -> float:
        """The share."""
        process, *container = (os.pread(file, _READ_BYTES, 0) for file in self._files)
        if not container:
            return int(process.split()[1]) * _PAGE / self._limit
        used, statistics = container
        cleared = (int(line[len(_CLEARED) :]) for line in statistics.splitlines() if line.startswith(_CLEARED))
        return (int(used) - sum(cleared)) / self._limit

    def close(self) -> None:
        for file in self._files:
            os.close(file)
