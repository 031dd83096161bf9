"""CPU time and memory of a process tree, as the kernel counts them.

CPU time is the time processes of the tree have run, not how busy the machine was. It is read from each process's own
CPU clock, in nanoseconds; of children that have ended, their parent's sum is counted, in steps of 10 ms. Where another
process's clock cannot be read, everything comes in such steps.

The peak of the resident set is the kernel's own high-water mark (`VmHWM`), which is set back first by writing 5 to
`clear_refs`. Where that is not permitted, a thread looks every 2 ms instead and may miss the tip. Peaks of several
processes are added, as if they came at the same moment.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_SAMPLE_S: Final = 0.002
_RESET_PEAK: Final = "5"


@dataclass(slots=True)
class Peak:
    """Filled when the measured stretch is over."""

    bytes: int = 0


class ProcessTree:
    """A process and its descendants. Its methods raise psutil.NoSuchProcess once the process has ended."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        total = 0.0
        for process in self._processes():
            times = process.cpu_times()
            total += times.children_user + times.children_system
            try:
                total += time.clock_gettime(_cpu_clock(process.pid))
            except OSError:
                total += times.user + times.system
        return total

    def rss_bytes(self) -> int:
        """The resident set now."""
        return sum(int(process.memory_info().rss) for process in self._processes())

    @contextmanager
    def peak_rss(self) -> Iterator[Peak]:
        """Measure the largest resident set while the block runs."""
        peak = Peak()
        if self._reset_peak():
            yield peak
            peak.bytes = sum(_high_water_mark(process.pid) for process in self._processes())
            return
        done = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(peak, done), name="RSS sampler", daemon=True)
        sampler.start()
        try:
            yield peak
        finally:
            done.set()
            sampler.join()

    def _processes(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]

    def _reset_peak(self) -> bool:
        try:
            for process in self._processes():
                Path(f"/proc/{process.pid}/clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return False
        return True

    def _sample(self, peak: Peak, done: threading.Event) -> None:
        try:
            while True:
                peak.bytes = max(peak.bytes, self.rss_bytes())
                if done.wait(_SAMPLE_S):
                    return
        except psutil.NoSuchProcess:
            return


def _cpu_clock(pid: int) -> int:
    """The clock of the CPU time of a process, as clock_getcpuclockid(3) makes it on Linux: the inverted process number
    above three bits, of which 2 means the scheduler's own account."""
    return ~pid << 3 | 2


def _high_water_mark(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise psutil.NoSuchProcess(pid)
