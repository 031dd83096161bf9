"""A heap whose items can be moved and taken out: the one structure behind every order that admission keeps.

`heapq` cannot find an item again, so an item that moves or leaves only has its entry marked dead, and dead entries are
skipped when they reach the top. Every operation is O(log n) amortised. When more than half of the entries are dead the
heap is built anew, which is paid for by the operations that killed them: memory stays proportional to what is in it.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

_Item = TypeVar("_Item", bound=Hashable)
_Key = tuple[float, int]

_SLACK = 32
"""Dead entries that are never worth a rebuild."""


class Heap(Generic[_Item]):
    """Items by key, smallest first; among equal keys, whichever was put there first."""

    __slots__ = ("_entries", "_heap", "_puts")

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, int, _Item]] = []
        self._entries: dict[_Item, int] = {}
        """The number of the put by which an item is where it is."""
        self._puts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: _Item) -> bool:
        return item in self._entries

    def put(self, item: _Item, key: float, then: int = 0) -> None:
        """Put `item` at (`key`, `then`), wherever it was before."""
        self._puts += 1
        self._entries[item] = self._puts
        heapq.heappush(self._heap, ((key, then), self._puts, item))
        self._compact()

    def discard(self, item: _Item) -> None:
        """Take `item` out, if it is there."""
        if self._entries.pop(item, None) is not None:
            self._compact()

    def first(self) -> tuple[_Key, _Item] | None:
        """The smallest item and its key."""
        heap = self._heap
        while heap:
            key, put, item = heap[0]
            if self._entries.get(item) == put:
                return key, item
            heapq.heappop(heap)
        return None

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
