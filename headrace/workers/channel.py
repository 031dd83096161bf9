"""What a supervisor and a worker tell each other, over one socketpair.

A message is four bytes of length, then that many of msgpack. The supervisor sends `Start` first, later perhaps
`Settle`, then `Stop`; the worker sends a `Report` of itself a few times a second while it serves, and `Failed` if it
never can. What operators ask about single requests is a `Question`, which the worker gives an `Answer` to. Reports come
unasked, so nothing that reads them (a scrape, a readiness probe) ever waits for a worker, and the figures of one that
is killed are at most `REPORT_EVERY_S` old. That an end is closed means that its process is gone, which is how either
side learns of the other's death however it died.
"""

import asyncio
import contextlib
import socket

import msgspec
from msgspec import Struct

from gateway.live_requests import RequestFilter, RequestList
from gateway.log_levels import LogLevel
from gateway.series import Examples, Rows
from headrace.settings import LogFormat
from router.fleet import Phase
from router.spec.fleet import FleetSpec

REPORT_EVERY_S = 0.25
MESSAGE_LIMIT = 64 * 1024 * 1024
"""Bytes of a message: a fleet with dozens of the largest chat templates, or a report on tens of thousands of
endpoints."""
CLOSE_S = 2.0
_LENGTH_BYTES = 4


class Start(Struct, tag=True, frozen=True, kw_only=True):
    """What the worker is to serve. It reads no file and no environment, and is told what the supervisor knows when it
    is started: all workers serve the same, however often one is replaced, and whether Redis answers then or not."""

    number: int
    """The worker's, from 1."""
    spec: FleetSpec
    """Without pools and routes: those are in the documents."""
    documents: bytes
    """The documents that the supervisor follows now, as a JSON array of `Document`. They are all that the worker knows
    of the fleet until Redis answers it."""
    http: list[int]
    """File descriptors of the sockets bound to `gateway.http`."""
    workers: int
    """How many there are."""
    counts: int
    """The file descriptor of the memory in which they count their connections (`gateway.http.fair_share`)."""
    place: int
    """The worker's there."""
    log_level: LogLevel
    log_format: LogFormat
    log_levels: dict[str, LogLevel]
    """What was set while the gateway ran, by logger. The supervisor's own, so that it is as it is when this is sent."""


class Settle(Struct, tag=True, frozen=True):
    """Go on serving, but keep no connection: `Stop` will follow."""

    accepting: bool
    """Take new ones, too: there are no other workers that do."""


class Stop(Struct, tag=True, frozen=True):
    """Drain and end; the second one: end without waiting for streams."""


class ListRequests(Struct, tag=True, frozen=True):
    """Answer with the open requests that are wanted."""

    question: int
    wanted: RequestFilter


class CancelRequest(Struct, tag=True, frozen=True):
    """End a request, if it is here, and answer whether it was."""

    question: int
    id: str


class Answer(Struct, tag=True, frozen=True, kw_only=True):
    """What a worker says to a question."""

    question: int
    listed: RequestList | None = None
    cancelled: bool = False


class SetLogLevel(Struct, tag=True, frozen=True):
    """Have a logger say more or less, or what it said at the start."""

    name: str
    level: LogLevel | None


class EndpointReport(Struct, array_like=True, frozen=True):
    """An endpoint as a worker sees it."""

    phase: Phase
    detail: str
    in_flight: int
    drained: bool
    """The worker follows its drain, and has no requests there."""


class Report(Struct, tag=True, frozen=True, kw_only=True):
    """How a worker is."""

    serving: bool
    """It takes requests: it does not while it drains."""
    live_requests: int
    cut: int
    """Requests that it has ended because it stopped."""
    redis_connected: bool | None
    endpoints: dict[str, EndpointReport]
    queues: dict[str, tuple[int, int]]
    """By route: how many requests wait, and how many bytes of theirs."""
    rows: dict[str, Rows]
    """Its counters and histograms, whole."""
    examples: dict[str, Examples] = {}
    """The histograms' examples."""
    degraded: list[str]
    """As `AdminView.degraded`."""


class Failed(Struct, tag=True, frozen=True):
    """The worker cannot listen; as `ListenError`."""

    what: str
    message: str


Question = ListRequests | CancelRequest
Message = Start | Settle | Stop | SetLogLevel | Question | Answer | Report | Failed


class ChannelClosedError(Exception):
    """The other side is gone, or has sent what is no message."""


class Channel:
    """One end of the socketpair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> "Channel":
        """The channel over `end`, which it closes in the end."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: Message) -> None:
        """Send without waiting; whether it arrives shows in what comes back."""
        body = msgspec.msgpack.encode(message)
        self._writer.write(len(body).to_bytes(_LENGTH_BYTES) + body)

    async def sent(self) -> None:
        """Wait until the other side has taken nearly all that was sent. Raises ChannelClosedError."""
        try:
            await self._writer.drain()
        except ConnectionError:
            raise ChannelClosedError from None

    async def receive(self) -> Message:
        """The next message. Raises ChannelClosedError."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
            if length > MESSAGE_LIMIT:
                raise ChannelClosedError
            return msgspec.msgpack.decode(await self._reader.readexactly(length), type=Message)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            raise ChannelClosedError from None

    async def close(self) -> None:
        """Close it; the other side has `CLOSE_S` to take what was sent."""
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._writer.wait_closed()
