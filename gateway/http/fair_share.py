"""How many connections each worker of a gateway has, so that they accept about as many each.

Workers accept from one socket, and the kernel wakes all of them for every connection: the first to come gets it. Which
that is hangs on where the scheduler puts them, not on how many it has: of connections that come now and then, one of
four workers got up to three quarters, and who keeps them for hours has that worker busy and the others idle. So workers
tell each other, in memory that they share, how many they have, and one that has more than another leaves a connection
to the others for a moment. Nobody waits longer than that: if it is still there then, it is accepted.
"""

import mmap
import os

_MORE = 2
"""How many more than another worker one may have."""
_BYTES = 4


def shared_memory(workers: int) -> int:
    """The descriptor of memory in which so many workers can count."""
    memory = os.memfd_create("connections")
    os.ftruncate(memory, workers * _BYTES)
    return memory


class FairShare:
    """A worker's own count, at its `place` in the `memory` of all, which it takes over."""

    def __init__(self, memory: int, place: int, workers: int) -> None:
        self._counts = memoryview(mmap.mmap(memory, workers * _BYTES)).cast("I")
        os.close(memory)
        self._place = place
        self.has(0)

    def has(self, connections: int) -> None:
        """Tell the others."""
        self._counts[self._place] = connections

    @property
    def exceeded(self) -> bool:
        """Whether another worker should have the next connection."""
        return self._counts[self._place] > min(self._counts) + _MORE
