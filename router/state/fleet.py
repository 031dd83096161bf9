"""What a gateway uses of the shared state: documents come in by a callback, writes go out by two methods.

With no Redis configured there is nothing to follow and nowhere to write to: the file's documents are the fleet, and a
write says which key to add. With a Redis that cannot be reached the file's documents are the fleet until it can.
"""

import time

from router.spec.documents import DiscoveryReport, Document, Family, Source
from router.state.errors import StateUnavailable
from router.state.follower import FleetFollower, FleetStatus, OnDocuments
from router.state.store import DocumentStore, Mark

START_WAIT_S = 1.5
OWN_WRITE_WAIT_S = 1.0
"""How long a write waits until this gateway itself follows it, so that who wrote can read what was written."""

NO_REDIS = "No Redis is configured, so the fleet is what the file says. Add `redis: {url: ...}` to the fleet file."


class FleetState:
    """A fleet's documents as one gateway sees and writes them.

    `on_documents` is called on the event loop with all documents in force: once before `start` returns, then on every
    change. It must not block. With `publishes` false `file_documents` are whatever is known of the fleet, of
    any source, and never written to Redis: that is somebody else's to do. They count until Redis holds a publication.
    """

    def __init__(
        self,
        redis_url: str | None,
        fleet_name: str,
        file_documents: list[Document],
        content_hash: str,
        on_documents: OnDocuments,
        *,
        publishes: bool = True,
    ) -> None:
        self._file_documents = file_documents
        self._on_documents = on_documents
        self._store: DocumentStore | None = None
        self._follower: FleetFollower | None = None
        if redis_url is not None:
            self._store = DocumentStore(redis_url, fleet_name)
            self._follower = FleetFollower(self._store, file_documents, content_hash, on_documents, publishes)

    @property
    def documents(self) -> list[Document]:
        """The documents in force."""
        return self._follower.documents if self._follower else self._file_documents

    @property
    def status(self) -> FleetStatus:
        return self._follower.status if self._follower else FleetStatus(configured=False)

    async def start(self) -> None:
        """Begins to follow Redis; returns after `START_WAIT_S` at the latest, with Redis or without."""
        if self._follower is None:
            self._on_documents(self._file_documents)
        else:
            await self._follower.start(START_WAIT_S)

    async def stop(self) -> None:
        if self._follower is not None:
            await self._follower.stop()
        if self._store is not None:
            await self._store.close()

    async def publish(self, file_documents: list[Document], content_hash: str) -> None:
        """Puts the documents of a file that was read again in the place of the file's; as at a start, the last one
        wins. While Redis is lost they count when it is back."""
        self._file_documents = file_documents
        if self._follower is None:
            self._on_documents(file_documents)
        else:
            await self._follower.publish(file_documents, content_hash, START_WAIT_S)

    async def put(self, document: Document) -> None:
        """Writes a document. Raises `StateUnavailable`, or `WriteConflict` if the stored one is as new or newer."""
        store, follower = self._writable()
        await follower.saw(await store.put(document), OWN_WRITE_WAIT_S)

    async def delete(self, family: Family, id_: str, source: Source) -> None:
        """Removes a source's document. Raises `StateUnavailable`."""
        store, follower = self._writable()
        await follower.saw(await store.delete(family, id_, source), OWN_WRITE_WAIT_S)

    async def replace_discovered(self, documents: list[Document]) -> bool:
        """Makes `documents` all that discovery says. False if another has published in the meantime: look again at
        who leads. Raises `StateUnavailable`.

        Its mark is later than that of the publication it replaces, whatever this machine's clock says, and a
        publication that is later still is left alone: a leader that slept through the election of another cannot undo
        what that one has published.
        """
        store, follower = self._writable()
        before = follower.mark("discovery")
        mark = Mark(max(time.time_ns() // 1_000_000, before.published_ms + 1 if before else 0), "")
        change = await store.replace_source("discovery", documents, mark, even_later=False)
        if not change:
            return False
        await follower.saw(change, OWN_WRITE_WAIT_S)
        return True

    async def report(self, report: DiscoveryReport) -> None:
        """Says how discovery is, for half a minute. Raises `StateUnavailable`."""
        store, _ = self._writable()
        await store.report(report)

    def _writable(self) -> tuple[DocumentStore, FleetFollower]:
        if self._store is None or self._follower is None:
            raise StateUnavailable(NO_REDIS)
        if not self._follower.status.connected:  # a write that waits in a frozen Redis's socket may still happen later
            raise StateUnavailable(
                self._follower.status.error or f"Redis at {self._store.address} has not answered yet."
            )
        return self._store, self._follower
