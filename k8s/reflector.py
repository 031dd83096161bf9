"""Does what a mirror asks for: the only place where lists and watches are real.

Nothing but the mirror is told inside the watch's loop, and `changed` only sets a flag: a slow Redis, or a slow
anything, never holds up the news of a pod that is gone.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from k8s.api import Api, ApiError
from k8s.mirror import PAGE_ITEMS, SILENCE_S, ListPage, Mirror, Pause, Watch
from k8s.objects import Object

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Object)


@dataclass(slots=True, frozen=True)
class Collection:
    """Which objects: a path of the API, and what narrows them down."""

    path: str
    label_selector: str = ""
    field_selector: str = ""

    @property
    def query(self) -> dict[str, str]:
        """The parameters of every list and watch of it."""
        narrowed = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {name: value for name, value in narrowed.items() if value}

    def __str__(self) -> str:
        by = self.label_selector or self.field_selector
        return f"{self.path.rpartition('/')[2]} ({by})" if by else self.path.rpartition("/")[2]


class Reflector(Generic[T]):
    """Keeps a mirror of `collection` true while `run` runs; `changed` is called when something is new in it."""

    def __init__(self, api: Api, collection: Collection, kind: type[T], changed: Callable[[], None]) -> None:
        self.collection = collection
        self.mirror: Mirror[T] = Mirror(kind, time.monotonic(), random.random)
        self._api = api
        self._changed = changed

    @property
    def settled(self) -> bool:
        """What can be known is known: it has been listed, or may not be."""
        return self.mirror.synced or self.mirror.refused

    @property
    def stale_s(self) -> float:
        """For how long nothing has been heard of it, if that is too long; else 0."""
        now = time.monotonic()
        since = self.mirror.stale_since(now)
        return now - since if since is not None else 0.0

    def degraded(self) -> str | None:
        """What is wrong with it, for people."""
        mirror, stale = self.mirror, self.stale_s
        if stale and mirror.synced:
            return f"{self.collection}: as it was {stale // 5 * 5:.0f} s ago: {mirror.error or 'the watch is silent'}"
        if stale or mirror.refused:
            return f"{self.collection}: {mirror.error or 'not listed yet'}"
        if mirror.unreadable is not None:
            return f"{self.collection}: an object cannot be read and is passed over: {mirror.unreadable}"
        return None

    async def run(self) -> None:
        """Lists and watches until it is cancelled."""
        while True:
            step, told, error = self.mirror.next(), self.mirror.revision, self.mirror.error
            settled = self.settled
            try:
                await self._do(step)
            except ApiError as failure:
                self.mirror.failed(failure.status, str(failure))
            except Exception:
                logger.exception("watching %s failed; trying again", self.collection)
                self.mirror.failed(None, "an unexpected failure; the log has it")
            if self.mirror.error != error:
                if self.mirror.error is not None:
                    logger.warning("%s: %s; what is known stays", self.collection, self.mirror.error)
                else:
                    logger.info("%s: followed again", self.collection)
            if self.mirror.revision != told or self.settled != settled:
                self._changed()

    async def _do(self, step: ListPage | Watch | Pause) -> None:
        match step:
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case ListPage(token):
                query = {**self.collection.query, "limit": str(PAGE_ITEMS)}
                if token is not None:
                    query["continue"] = token
                body = await self._api.request("GET", self.collection.path, query)
                self.mirror.page(body, time.monotonic())
            case Watch(version, timeout_s):
                query = {
                    **self.collection.query, "watch": "1", "allowWatchBookmarks": "true",
                    "resourceVersion": version, "timeoutSeconds": str(timeout_s),
                }  # fmt: skip
                async with self._api.watch(self.collection.path, query, SILENCE_S) as lines:
                    await self._watch(lines)

    async def _watch(self, lines: AsyncIterator[bytes]) -> None:
        mirror = self.mirror
        mirror.watch_opened(time.monotonic())
        async for line in lines:
            told = mirror.revision
            if not mirror.event(line, time.monotonic()):
                return
            if mirror.revision != told:
                self._changed()
        mirror.watch_ended(time.monotonic())
