"""A copy of one kind of objects as the API server has them: list, then watch, as a state machine without I/O.

The mirror says what to do next (`Step`), whoever does the I/O tells it what came of that, and it never waits for
anything itself. The rules are the Kubernetes API's ("Efficient detection of changes"):

- a list, in pages, gives all objects and a resourceVersion; a watch from there tells every change after it, in order;
- every event and bookmark moves the resourceVersion on, so a watch that ended is resumed where it was and misses
  nothing;
- 410 Gone, as a status or as an event, means that the server no longer knows that version: only a new list helps, and
  what is not in it was deleted meanwhile without a word. The objects of before stay until that list is complete: an API
  server that is away takes no endpoint away;
- a resourceVersion says nothing but equal or not, so no two are ever compared.

Lists ask for no version and so are answered from a quorum: a list from a server's cache could show the past, and a pod
that was gone would come back.

Failures are answered by a jittered pause that doubles up to `LONGEST_PAUSE_S`. A watch that told something, or lasted,
was none: it is resumed at once. So a server that accepts and closes watches at once is not hammered, and a restart of
the server costs a tenth of a second.

Staleness: an open watch with nothing to tell proves nothing, so the server is asked to end each after `WATCH_S`, and
the mirror is stale when there was no sign of life for a little longer than that, or no watch for `STALE_AFTER_S`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from k8s.objects import Bookmark, Event, Object, Page, Status

PAGE_ITEMS: Final = 500
WATCH_S: Final = 20.0
"""After that, and up to half of it more, the server is asked to end a watch."""
SILENCE_S: Final = 1.5 * WATCH_S + 5
"""A watch that has neither told anything nor ended for so long is dead."""
STALE_AFTER_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 10.0
_LASTED_S: Final = 1.0
"""A watch that was open for so long was no failure, even if it told nothing."""
_GONE: Final = 410
_REFUSALS: Final = (403, 404)

T = TypeVar("T", bound=Object)


@dataclass(slots=True, frozen=True)
class ListPage:
    """Ask for a page of the list: the first, or the one that `token` leads to."""

    token: str | None


@dataclass(slots=True, frozen=True)
class Watch:
    """Watch from `resource_version` on, for `timeout_s` seconds, with bookmarks."""

    resource_version: str
    timeout_s: int


@dataclass(slots=True, frozen=True)
class Pause:
    """Do nothing for `seconds`."""

    seconds: float


Step = ListPage | Watch | Pause


class Mirror(Generic[T]):
    """The objects of type `kind` that one list and the watches after it tell of. Times are seconds of any clock;
    `chance` gives numbers from 0 to 1."""

    def __init__(self, kind: type[T], now: float, chance: Callable[[], float]) -> None:
        self.revision = 0
        """Moves with every change of the objects."""
        self.synced = False
        """A list has been complete: what is not among the objects is not there."""
        self.error: str | None = None
        """Why it could not list or watch the last time it tried; None when it can."""
        self.refused = False
        """The server answers that this client may not, or that there is nothing of this kind."""
        self.unreadable: str | None = None
        """The last object that could not be read and was passed over."""
        self._decoder = msgspec.json.Decoder(kind)
        self._chance = chance
        self._objects: dict[str, T] = {}
        self._listing: dict[str, T] = {}
        self._token: str | None = None
        self._version: str | None = None
        self._pause_s = FIRST_PAUSE_S
        self._pausing = False
        self._opened: float | None = None
        self._told = False
        """The watch has told something since the last list or failure."""
        self._in_touch = now

    @property
    def objects(self) -> Mapping[str, T]:
        """By `NAMESPACE/NAME`, or `/NAME` for objects of the cluster."""
        return self._objects

    @property
    def resource_version(self) -> str | None:
        """Up to where the objects are known; None while a list is needed."""
        return self._version

    def stale_since(self, now: float) -> float | None:
        """When what is here was last known to be true, if that is too long ago; else None."""
        limit = SILENCE_S if self._opened is not None else STALE_AFTER_S
        return self._in_touch if now - self._in_touch > limit else None

    def next(self) -> Step:
        """What to do now. A pause is asked for once and then taken as over."""
        if self._pausing:
            self._pausing = False
            pause = self._pause_s * (0.5 + self._chance() / 2)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return Pause(pause)
        if self._version is None:
            return ListPage(self._token)
        return Watch(self._version, int(WATCH_S * (1 + self._chance() / 2)))

    def page(self, body: bytes, now: float) -> None:
        """A page of the list came."""
        try:
            page = msgspec.json.decode(body, type=Page)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.failed(None, f"the list cannot be read: {error}")
            return
        for raw in page.items or ():
            if (item := self._read(raw)) is not None:
                self._listing[_key(item)] = item
        self._token = page.metadata.continue_ or None
        if self._token is not None:
            return
        if not page.metadata.resource_version:
            self.failed(None, "the list has no resourceVersion")
            return
        if self._listing != self._objects or not self.synced:
            self._objects = self._listing
            self.revision += 1
        self._listing = {}
        self._version = page.metadata.resource_version
        self.synced, self.error, self.refused = True, None, False
        self._told = False
        self._in_touch = now

    def watch_opened(self, now: float) -> None:
        """The server has begun to answer a watch."""
        self._opened = self._in_touch = now
        self.error, self.refused = None, False

    def event(self, line: bytes, now: float) -> bool:
        """A line of the watch came, whole. False if the watch is over: no more of its lines count."""
        try:
            event = msgspec.json.decode(line, type=Event)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=Status)
                self.failed(status.code, status.message or status.reason or "the watch ended with an error")
                return False
            version = msgspec.json.decode(event.object, type=Bookmark).metadata.resource_version
            gone = _key(msgspec.json.decode(event.object, type=Object)) if event.type == "DELETED" else None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.failed(None, f"an event of the watch cannot be read: {error}")
            return False
        if gone is not None:
            if self._objects.pop(gone, None) is not None:
                self.revision += 1
        elif event.type != "BOOKMARK" and (item := self._read(event.object)) is not None:
            key = _key(item)
            if self._objects.get(key) != item:
                self._objects[key] = item
                self.revision += 1
        self._version = version or self._version
        self._pause_s = FIRST_PAUSE_S
        self._told = True
        self._in_touch = now
        return True

    def watch_ended(self, now: float) -> None:
        """The watch ended without an error: by its time, by the server, by a connection that broke."""
        lasted = self._opened is not None and now - self._opened >= _LASTED_S
        self._opened = None
        if lasted or self._told:
            self._told = False
            self._pause_s = FIRST_PAUSE_S
        else:
            self._pausing = True

    def failed(self, status: int | None, why: str) -> None:
        """A list or a watch was answered with an error, `status` if it was one of HTTP's, or not at all."""
        self._opened = None
        self._listing, self._token = {}, None
        if status == _GONE:
            # The first list after a watch that worked is due at once; the next one, if that did not help, is not.
            self._version = None
            self._pausing = not self._told
        else:
            self.error = why
            self.refused = status in _REFUSALS
            self._pausing = True
        self._told = False

    def _read(self, raw: bytes | msgspec.Raw) -> T | None:
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.unreadable = str(error)
            return None


def _key(item: Object) -> str:
    return f"{item.metadata.namespace}/{item.metadata.name}"
