"""How the documents of one fleet lie in Redis: one hash per family, one capped stream of changes.

    headrace:{<fleet>}:endpoints | pools | routes     field `<source>/<id>`, value a JSON `Document`
    headrace:{<fleet>}:changes                        one entry per write
    headrace:{<fleet>}:discovery                      how discovery is, forgotten if it does not say so again

The braces are literal: a cluster hash tag that keeps all keys of a fleet in one slot, so that a script may touch them
together. The stream only says that something changed. Whoever reads it loads all documents again (a fleet has
hundreds, not millions), so a trimmed or lost entry costs nothing.

Every call here is bounded by the sockets' timeouts and is tried once; who calls decides about trying again.
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from router.spec.documents import FAMILIES, SOURCES, DiscoveryReport, Document, Family, Source
from router.state import scripts
from router.state.errors import StateUnavailable, WriteConflict

SOCKET_TIMEOUT_S = 1.0
"""Longest wait for Redis to accept a connection or to answer a command."""
CHANGE_WAIT_S = 0.5
"""How long one blocking read of the changes waits; below the socket's timeout, so that a frozen Redis is told apart
from a quiet one. Also the longest time an emptied Redis goes unnoticed."""

REDIS_FAILURES = (RedisError, OSError, asyncio.TimeoutError)
REPORT_TTL_S = 30
"""How long a report of discovery counts: longer than another replica needs to take over from one that died."""
NO_CHANGE = "0-0"
UNREADABLE = ""
"""In place of the last change's id where the key of the changes holds no stream."""


@dataclass(slots=True, frozen=True)
class Mark:
    """A source's latest publication as a whole: when (Unix ms) and of what."""

    published_ms: int
    content_hash: str

    def __str__(self) -> str:
        return f"{self.published_ms}:{self.content_hash}"

    @classmethod
    def parse(cls, text: str) -> "Mark":
        published, _, content_hash = text.partition(":")
        return cls(int(published) if published.isdecimal() else -1, content_hash)


@dataclass(slots=True)
class Snapshot:
    """All that Redis held at one moment."""

    last_change: str = NO_CHANGE
    documents: dict[tuple[Family, Source, str], Document] = field(default_factory=dict)
    epochs: dict[Family, str | None] = field(default_factory=dict)
    marks: dict[tuple[Family, Source], Mark] = field(default_factory=dict)
    broken: frozenset[Family] = frozenset()
    """Families whose key could not be read as a hash."""
    problems: tuple[str, ...] = ()
    report: DiscoveryReport | None = None


@dataclass(slots=True, frozen=True)
class Revision:
    """The cheap part of a snapshot, by which a follower notices that it missed something."""

    last_change: str
    epochs: dict[Family, str | None]
    report: DiscoveryReport | None = None


class DocumentStore:
    """The documents of the fleet `fleet` in the Redis at `url`. Use it on one event loop and `close` it."""

    def __init__(self, url: str, fleet: str) -> None:
        self.address = without_credentials(url)
        self._keys = {family: f"headrace:{{{fleet}}}:{family}" for family in FAMILIES}
        self._changes = f"headrace:{{{fleet}}}:changes"
        self._report = f"headrace:{{{fleet}}}:discovery"
        self._redis = client(url, SOCKET_TIMEOUT_S)
        keys = [*self._keys.values(), self._changes]
        self._scripts = {
            name: (self._redis.register_script(text), keys)
            for name, text in (
                ("put", scripts.PUT),
                ("delete", scripts.DELETE),
                ("replace", scripts.REPLACE_SOURCE),
                ("restore", scripts.RESTORE),
            )
        }

    async def close(self) -> None:
        await self._redis.aclose()

    async def load(self) -> Snapshot:
        """Everything at one moment. Raises one of `REDIS_FAILURES`."""
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.xrevrange(self._changes, count=1)
            for key in self._keys.values():
                transaction.hgetall(key)
            transaction.get(self._report)
            answers = await transaction.execute(raise_on_error=False)
        snapshot = Snapshot()
        problems: list[str] = []
        if isinstance(answers[0], Exception):
            problems.append(_refused(self._changes, answers[0]))
            snapshot.last_change = UNREADABLE
        else:
            snapshot.last_change = _last_id(answers[0])
        broken: set[Family] = set()
        for family, answer in zip(FAMILIES, answers[1:-1], strict=True):
            if isinstance(answer, Exception):
                problems.append(_refused(self._keys[family], answer))
                broken.add(family)
            else:
                snapshot.epochs[family] = None
                for name, value in answer.items():
                    _read_field(snapshot, problems, family, name, value)
        snapshot.broken = frozenset(broken)
        snapshot.problems = tuple(problems)
        snapshot.report = _read_report(answers[-1])
        return snapshot

    async def revision(self) -> Revision:
        """Where the changes and epochs are. Raises one of `REDIS_FAILURES`."""
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.xrevrange(self._changes, count=1)
            for key in self._keys.values():
                transaction.hget(key, "@epoch")
            transaction.get(self._report)
            last, *epochs, report = await transaction.execute(raise_on_error=False)
        return Revision(
            UNREADABLE if isinstance(last, Exception) else _last_id(last),
            {
                family: epoch.decode(errors="replace") if epoch else None
                for family, epoch in zip(FAMILIES, epochs, strict=True)
                if not isinstance(epoch, Exception)
            },
            _read_report(report),
        )

    async def wait_for_change(self, after: str) -> None:
        """Returns when there is a change later than `after`, at the latest after `CHANGE_WAIT_S`.

        Raises one of `REDIS_FAILURES`.
        """
        try:
            await self._redis.xread({self._changes: after}, count=1, block=int(CHANGE_WAIT_S * 1000))
        except ResponseError:  # a wrong type at the key: no change will show, so look at regular times
            await asyncio.sleep(CHANGE_WAIT_S)

    async def put(self, document: Document) -> str:
        """Writes a document; the id of the change.

        Raises `WriteConflict` when the stored one is not older, `StateUnavailable` when Redis does not do it.
        """
        change = await self._run("put", [_index(document.family), _field_of(document), _encoded(document)])
        if not change:
            raise WriteConflict(f"{document.family}/{document.id} was changed by somebody else at the same time.")
        return change

    async def delete(self, family: Family, id_: str, source: Source) -> str:
        """Removes one source's document, if it is there; the id of the change. Raises `StateUnavailable`."""
        return await self._run("delete", [_index(family), f"{source}/{id_}"])

    async def replace_source(
        self, source: Source, documents: Iterable[Document], mark: Mark, *, even_later: bool = True
    ) -> str:
        """Makes `documents` all there is of `source`; the id of the change.

        With `even_later` false a publication that is later than `mark` is left in place, and the id is empty.
        Raises `StateUnavailable`.
        """
        arguments = [source, str(mark), "1" if even_later else "0"]
        for document in documents:
            if document.source != source:
                raise ValueError(f"a document of source {document.source} among those of {source}")
            arguments += [_index(document.family), _field_of(document), _encoded(document)]
        return await self._run("replace", arguments)

    async def report(self, report: DiscoveryReport) -> None:
        """Says how discovery is, for `REPORT_TTL_S`. Raises `StateUnavailable`."""
        try:
            await self._redis.set(self._report, msgspec.json.encode(report), ex=REPORT_TTL_S)
        except REDIS_FAILURES as error:
            raise StateUnavailable(self.describe(error)) from error

    async def restore(self, known: Snapshot) -> None:
        """Puts back the documents of `known` that are gone, leaving what was written since. Raises `StateUnavailable`.

        What was deleted since is left alone as long as the stream remembers the deletion.
        """
        arguments = [known.last_change or NO_CHANGE, str(len(known.marks))]
        for (family, source), mark in known.marks.items():
            arguments += [_index(family), source, str(mark)]
        for (family, source, _), document in known.documents.items():
            arguments += [_index(family), source, _field_of(document), _encoded(document)]
        await self._run("restore", arguments)

    async def _run(self, name: str, arguments: list[str]) -> str:
        script, keys = self._scripts[name]
        try:
            answer = await script(keys=keys, args=[secrets.token_hex(8), *arguments])
        except REDIS_FAILURES as error:
            raise StateUnavailable(self.describe(error)) from error
        return answer.decode() if isinstance(answer, bytes) else str(answer)

    def describe(self, error: BaseException) -> str:
        """One sentence about why Redis did not do what it should."""
        return why(self.address, error, SOCKET_TIMEOUT_S)


def client(url: str, timeout_s: float) -> Redis:
    """A client of the Redis at `url` that waits `timeout_s` for a connection or an answer, and tries once."""
    made: Redis = Redis.from_url(
        url,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        client_name="headrace",
    )
    return made


def why(address: str, error: BaseException, timeout_s: float) -> str:
    """One sentence about why the Redis at `address` did not do what it should."""
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return f"Redis at {address} did not answer within {timeout_s:g} s."
    if isinstance(error, ResponseError):
        return f"Redis at {address} refused: {error}"
    return f"Redis at {address} cannot be reached: {error}"


def _index(family: Family) -> str:
    return str(FAMILIES.index(family) + 1)


def _field_of(document: Document) -> str:
    return f"{document.source}/{document.id}"


def _encoded(document: Document) -> str:
    return msgspec.json.encode(document).decode()


def _last_id(entries: list[tuple[bytes, Mapping[bytes, bytes]]]) -> str:
    return entries[0][0].decode() if entries else NO_CHANGE


def _refused(key: str, error: Exception) -> str:
    return f"The key {key} in Redis cannot be read ({error}); remove it with: DEL '{key}'"


def _read_field(snapshot: Snapshot, problems: list[str], family: Family, name: bytes, value: bytes) -> None:
    text = name.decode(errors="replace")
    if text == "@epoch":
        snapshot.epochs[family] = value.decode(errors="replace")
        return
    if text.startswith("@"):
        for source in SOURCES:
            if text == f"@{source}":
                snapshot.marks[family, source] = Mark.parse(value.decode(errors="replace"))
        return
    try:
        value.decode()  # what is kept unread is written back one day
        document = msgspec.json.decode(value, type=Document)
        msgspec.json.decode(document.spec)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problems.append(f"The document {text!r} of {family} in Redis cannot be read and is skipped: {error}")
        return
    if document.family != family or _field_of(document) != text:
        problems.append(f"The document {text!r} of {family} in Redis says it is another one and is skipped.")
        return
    snapshot.documents[family, document.source, document.id] = document


def _read_report(answer: Any) -> DiscoveryReport | None:
    if not isinstance(answer, bytes):
        return None
    try:
        return msgspec.json.decode(answer, type=DiscoveryReport)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def without_credentials(url: str) -> str:
    parts: Any = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
