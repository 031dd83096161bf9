"""Keeps a gateway's copy of the fleet documents as Redis has them, and Redis as the gateways last knew it.

One task per gateway. While Redis answers it waits for an entry in the changes stream; when there is one, or the
revision shows something it did not read of, it loads all documents and hands them on if they differ. While Redis does
not answer, the last known documents stay in force, and it tries again after a jittered, growing pause.

Redis is a rebuildable copy, so the follower also rebuilds it: a family whose epoch is gone or is another one was
emptied, and a stream whose last change went backwards was restored from an old dump. Then the last known documents of
every source are put back, which is how a drain survives a Redis without persistence. The script leaves alone what was
written since, so any number of gateways may do this at once and in any order. (A deletion is remembered by the stream
only: if Redis loses it too, a gateway that did not hear of it in time brings the document back.)

The file's documents are published once per gateway start, and the gateway started last wins. If Redis is down at that
moment the publication is caught up later, unless a gateway that started later has published by then. Where a family has
no publication at all, because it could not be written, the gateway's own file counts.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from router.spec.documents import FAMILIES, DiscoveryReport, Document, Family, Source
from router.state.errors import StateUnavailable
from router.state.store import NO_CHANGE, REDIS_FAILURES, DocumentStore, Mark, Revision, Snapshot

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0

OnDocuments = Callable[[list[Document]], None]


@dataclass(slots=True, frozen=True)
class FleetStatus:
    """How it stands with the shared state, for readiness and metrics."""

    configured: bool = True
    """The fleet file has a `redis` section."""
    connected: bool = False
    lost_since: float | None = None
    """Unix time since when Redis does not answer; None while it does, or before the first try has ended."""
    file_differs: bool = False
    """Another gateway has published a file that is not this one's."""
    error: str | None = None
    """Why Redis is lost, or the last thing it refused."""
    problems: tuple[str, ...] = ()
    discovery: DiscoveryReport | None = None
    """What discovery last said of itself; None if there is none, or it has not spoken for too long."""


class FleetFollower:
    """Follows `store` from `start` to `stop`, calling `on_documents` on each change, always on the event loop.

    `on_documents` gets every document in force. It is not called for the file's documents before the first answer of
    Redis: `FleetState` decides how long to wait for that.
    """

    def __init__(
        self,
        store: DocumentStore,
        file_documents: list[Document],
        content_hash: str,
        on_documents: OnDocuments,
        publishes: bool,
    ) -> None:
        self.status = FleetStatus()
        self.documents: list[Document] = []
        """What was handed on last."""
        self._store = store
        self._file_documents = file_documents
        self._mark = Mark(time.time_ns() // 1_000_000, content_hash)
        self._on_documents = on_documents
        self._publishes = self._publication_due = publishes
        self._first_try = True
        self._stopping = False
        self._known: Snapshot | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._adopted = asyncio.Condition()

    async def start(self, wait_s: float) -> None:
        """Starts following; returns when the first try has ended either way, after `wait_s` seconds at most."""
        self._task = asyncio.create_task(self._run(), name="fleet-follower")
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._settled.wait()
        if self._known is None:
            self._hand_on(self._file_documents)

    async def publish(self, file_documents: list[Document], content_hash: str, wait_s: float) -> None:
        """Publishes another file from now on; returns when that is done, after `wait_s` seconds at most."""
        self._file_documents = file_documents
        self._mark = Mark(time.time_ns() // 1_000_000, content_hash)
        self._publication_due = True
        if self._known is None:
            self._hand_on(file_documents)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._adopted:
                await self._adopted.wait_for(lambda: not self._publication_due)

    async def stop(self) -> None:
        """Ends the task; returns when it has ended, after one read's deadline at most."""
        self._stopping = True  # a cancellation that arrives together with an answer is lost inside redis-py
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def mark(self, source: Source) -> Mark | None:
        """The latest publication of `source`, as far as it is known."""
        marks = (self._known or Snapshot()).marks
        found = [marks[family, source] for family in FAMILIES if (family, source) in marks]
        return max(found, key=lambda mark: mark.published_ms, default=None)

    async def saw(self, change: str, wait_s: float) -> None:
        """Returns when the change with this id has been handed on, after `wait_s` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._adopted:
                await self._adopted.wait_for(
                    lambda: self._known is not None and _order(self._known.last_change) >= _order(change)
                )

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopping:
            try:
                await self._catch_up()
                self._found()
                pause = FIRST_PAUSE_S
                await self._follow()
            except REDIS_FAILURES as error:
                self._lost(self._store.describe(error))
            except Exception:
                log.exception("Following the fleet documents failed; trying again")
                self._lost("An unexpected failure while following the fleet documents; the log has it.")
            self._first_try = False
            self._settled.set()
            await asyncio.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _follow(self) -> None:
        while not self._stopping:
            known = self._known or Snapshot()
            await self._store.wait_for_change(known.last_change)
            revision = await self._store.revision()
            self.status = replace(self.status, discovery=revision.report)
            if self._publication_due or known.broken or self._missed(revision, known):
                await self._catch_up()

    @staticmethod
    def _missed(revision: Revision, known: Snapshot) -> bool:
        return revision.last_change != known.last_change or revision.epochs != known.epochs

    async def _catch_up(self) -> None:
        """Restores, publishes and adopts, as far as each is due."""
        snapshot = await self._store.load()
        refused: list[str] = []
        if self._known is not None and (emptied := self._emptied(snapshot, self._known)):
            try:
                await self._store.restore(_only(self._known, emptied))
                log.warning("Redis at %s had lost documents of the fleet; put them back", self._store.address)
            except StateUnavailable as error:
                refused.append(f"Lost documents cannot be put back: {error}")
            snapshot = await self._store.load()
            if refused:  # still the last known ones, and still to be put back
                snapshot.broken |= frozenset(emptied)
        if self._publication_due and not refused:
            mark = self._mark
            try:
                await self._store.replace_source("file", self._file_documents, mark, even_later=self._first_try)
                self._publication_due = self._mark is not mark  # another file may have been read meanwhile
            except StateUnavailable as error:
                refused.append(f"The fleet file cannot be published: {error}")
            snapshot = await self._store.load()
        await self._adopt(snapshot, refused)

    @staticmethod
    def _emptied(snapshot: Snapshot, known: Snapshot) -> list[Family]:
        if _order(NO_CHANGE) < _order(snapshot.last_change) < _order(known.last_change):
            return [family for family in FAMILIES if family not in snapshot.broken]
        return [
            family
            for family, epoch in snapshot.epochs.items()
            if known.epochs.get(family) is not None and epoch != known.epochs[family]
        ]

    async def _adopt(self, snapshot: Snapshot, refused: list[str]) -> None:
        known = self._known or Snapshot()
        kept = _only(known, snapshot.broken)  # what cannot be read stays as it was
        snapshot.documents |= kept.documents
        snapshot.marks |= kept.marks
        for family in snapshot.broken:
            if family in known.epochs:
                snapshot.epochs[family] = known.epochs[family]
        self._known = snapshot
        published = [snapshot.marks[family, "file"] for family in FAMILIES if (family, "file") in snapshot.marks]
        differs = self._publishes and any(mark.content_hash != self._mark.content_hash for mark in published)
        if differs and not self.status.file_differs:
            log.warning("another gateway has published a different fleet file: that one is served, not this gateway's")
        elif self.status.file_differs and not differs:
            log.info("the published fleet file is this gateway's again")
        self.status = replace(
            self.status,
            file_differs=differs,
            discovery=snapshot.report,
            error=refused[-1] if refused else None,
            problems=(*snapshot.problems, *refused),
        )
        unpublished = [d for d in self._file_documents if (d.family, "file") not in snapshot.marks]
        self._hand_on([*snapshot.documents.values(), *unpublished])
        async with self._adopted:
            self._adopted.notify_all()

    def _hand_on(self, documents: list[Document]) -> None:
        documents = sorted(documents, key=lambda document: (document.family, document.id, document.source))
        if documents == self.documents:
            return
        self.documents = documents
        try:
            self._on_documents(documents)
        except Exception:
            log.exception("A change of the fleet documents could not be applied; the fleet stays as it was")

    def _found(self) -> None:
        if self.status.lost_since is not None:
            log.warning("Redis at %s is back", self._store.address)
        self.status = replace(self.status, connected=True, lost_since=None)
        self._first_try = False
        self._settled.set()

    def _lost(self, reason: str) -> None:
        if self.status.lost_since is None:
            log.warning("%s The fleet stays as last known until Redis is back.", reason)
            self.status = replace(self.status, lost_since=time.time())
        self.status = replace(self.status, connected=False, error=reason)


def _order(change: str) -> tuple[int, int]:
    milliseconds, _, number = (change or NO_CHANGE).partition("-")
    return int(milliseconds), int(number)


def _only(known: Snapshot, families: Collection[Family]) -> Snapshot:
    return replace(
        known,
        documents={key: value for key, value in known.documents.items() if key[0] in families},
        marks={key: value for key, value in known.marks.items() if key[0] in families},
    )
