"""The access log: one line of JSON for each request that has ended.

A request pays for one line: it is encoded and put into a list. A thread writes what has gathered, since a disk or
whoever reads standard output may be slow at any time; while it writes, lines gather, up to `HELD_BYTES`. More are
dropped, and counted.

Prompts, answers and credentials are not in a line, nor a request's query, where clients put keys.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from gateway.telemetry.log_file import LINE_BYTES, LogFile

HELD_BYTES = 4 * 1024 * 1024
"""Lines that may wait to be written, those being written included."""
_EVERY_S = 0.2
_LAST_LINES_S = 2.0
"""How long the last lines have when the gateway stops."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a request; null is what is not known or does not apply."""

    time: str
    """When it ended, in UTC."""
    request_id: str
    client: str
    user_agent: str
    method: str
    path: str
    """Without its query; over gRPC, the RPC."""
    api: str | None
    tenant: str | None = None
    route: str | None = None
    endpoint: str | None = None
    """That of the last attempt."""
    reason: str | None = None
    """Why it was chosen."""
    attempts: int = 0
    status: int
    code: str | None = None
    """Of the error that the gateway told the client, also when an answer broke off after its status."""
    stream: bool = False
    queue_ms: float | None = None
    """From the request's head until it was sent to the endpoint."""
    ttft_ms: float | None = None
    """From the request's head to the first byte of content of a stream."""
    duration_ms: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    bytes: int | None = None
    """Of the answer's body."""
    finish_reason: str | None = None
    trace_id: str | None = None


class AccessLog:
    """The lines of one process. Made in the event loop that it is used in."""

    def __init__(self, where: str, dropped: Callable[[int], None]) -> None:
        """`dropped` is told how many lines more are lost."""
        self._dropped = dropped
        self._loop = asyncio.get_running_loop()
        self._file = LogFile(where)
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._held = 0
        self._writing = 0
        """Bytes that the thread has."""
        self._due: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        """Set while the thread has nothing to write."""
        self._idle.set()
        self._batches: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._second, self._second_text = 0, ""
        threading.Thread(target=self._write, name="access log", daemon=True).start()

    def add(self, line: Line) -> None:
        """Have a line written, soon."""
        data = self._encode(line) + b"\n"
        if self._held + len(data) > HELD_BYTES or len(data) > LINE_BYTES:
            self._dropped(1)
            return
        self._held += len(data)
        self._lines.append(data)
        if self._due is None:
            self._due = self._loop.call_later(_EVERY_S, self._hand_over)

    def now(self) -> str:
        """The time as lines have it: in milliseconds, UTC (RFC 3339)."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second, self._second_text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{int((now - second) * 1000):03d}Z"

    async def close(self) -> None:
        """Write what there is, if it can be written in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_LINES_S):
                await self._idle.wait()
                if self._lines:
                    self._hand_over()
                    await self._idle.wait()
        self._dropped(len(self._lines))
        if self._due is not None:
            self._due.cancel()
        self._batches.put(None)

    def _hand_over(self) -> None:
        """Give the thread what has gathered, once it has written what it has."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._idle.is_set() and self._lines:
            self._idle.clear()
            self._writing = self._held
            self._batches.put(self._lines)
            self._lines = []

    def _written(self, lost: int) -> None:
        if lost:
            self._dropped(lost)
        self._held -= self._writing
        self._writing = 0
        self._idle.set()
        if self._lines and self._due is None:
            self._due = self._loop.call_later(_EVERY_S, self._hand_over)

    def _write(self) -> None:
        """In the thread: write batches until there is none."""
        while (lines := self._batches.get()) is not None:
            lost = self._file.write(lines)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._written, lost)
        self._file.close()
