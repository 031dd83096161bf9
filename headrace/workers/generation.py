"""Workers that were started together, to serve the same: a generation.

A gateway has one that is in force. When it is to serve something else (its file was read again, or another headrace has
been installed) a new generation is started beside it, and only when all of that serves is the old one told to drain: it
takes no new connections, finishes what it has, and ends. So there are workers that accept at every moment.
"""

import asyncio
import os
from collections.abc import Iterable

from headrace.workers.slot import Slot

_BETWEEN_STOPS_S = 0.5


class Generation:
    """Workers' places, each kept by a task of its own."""

    def __init__(self, slots: Iterable[Slot], counts: int) -> None:
        """`counts` is the descriptor of the memory that they share."""
        self.slots = tuple(slots)
        self._counts = counts
        self.keepers = [asyncio.create_task(slot.keep(), name=f"worker {slot.number}") for slot in self.slots]
        self._told_to_stop: set[int] = set()

    async def served(self) -> None:
        """Wait until all of them have served, or are told to stop. Raises ListenError or WorkerError if one ends before
        it serves."""
        all_served = asyncio.create_task(self._each_served())
        try:
            await asyncio.wait([all_served, *self.keepers], return_when=asyncio.FIRST_COMPLETED)
            for keeper in self.keepers:
                if keeper.done():
                    keeper.result()
        finally:
            all_served.cancel()

    async def _each_served(self) -> None:
        for slot in self.slots:
            await slot.served.wait()

    def settle(self, *, accepting: bool) -> None:
        """Let the workers that serve do so without keeping connections, and start no others for them. Without
        `accepting`, another generation takes the new ones."""
        for slot in self.slots:
            if slot.served.is_set():
                slot.settle(accepting=accepting)

    async def stop_in_turn(self) -> None:
        """Let the workers drain and end, one after another: a gRPC client that is sent away by one connects anew at
        once, and would be reset by another that stops at the same moment."""
        for slot in self.slots:
            self._stop(slot)
            await asyncio.sleep(_BETWEEN_STOPS_S)

    def stop(self) -> None:
        """Let the workers drain and end."""
        for slot in self.slots:
            self._stop(slot)

    def _stop(self, slot: Slot) -> None:
        if slot.number not in self._told_to_stop:  # one that is told twice cuts its streams
            self._told_to_stop.add(slot.number)
            slot.stop()

    def ended(self) -> None:
        """None of them is any more."""
        os.close(self._counts)

    def cut(self) -> None:
        """Have workers that drain wait for streams no longer."""
        for slot in self.slots:
            slot.stop()
