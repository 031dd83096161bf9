"""One worker's place: a process that is started, listened to, and followed by another when it has ended.

A worker that ends before its slot ever served ends the command: what it stumbled over will not be gone a second later,
and whoever has just started the gateway is there to read why. Later ends are answered with a restart after a back-off.
A worker that has not reported for `SILENT_S` hangs; it is killed, which turns it into one that ended. Silence is
counted in looks of `_LOOK_S`: while this process stands still (it was stopped, or its machine moved) no worker is
heard, but that is one look however long it was, and what they have said meanwhile is read in the next.

The process is started anew (never forked from this one) in a session of its own, so that Ctrl-C is for the supervisor
only. `-P` keeps the folder it was started in out of its import path.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable

from gateway.listening import ListenError
from headrace.restarts import Backoff, how_it_ended
from headrace.workers.channel import (
    Answer,
    Channel,
    ChannelClosedError,
    Failed,
    Question,
    Report,
    SetLogLevel,
    Settle,
    Start,
    Stop,
)

START_S = 60.0
"""How long a worker may take until it serves."""
SILENT_S = 30.0
"""How long a worker may say nothing; several thousand times longer than anything on its event loop should take."""
ANSWER_S = 2.0
"""How long a worker may take to answer a question of the operator's."""
_LOOK_S = 1.0
STALE_S = 3.0
"""When a silent worker no longer counts as serving."""
_EXIT_S = 5.0
"""How long a process may take to end after its channel has, or when it is to stop before it has served."""

logger = logging.getLogger(__name__)


class WorkerError(Exception):
    """A worker did not come to serve when the gateway was started. The message is one sentence for the operator."""


class Slot:
    """One worker's place. `keep` it in a task until it has been told to `stop`."""

    def __init__(self, number: int, make_start: Callable[[], Start], ended: Callable[[Report], None]) -> None:
        """`make_start` gives each worker's first message when it is started; `ended` gets the last report of each that
        is no more."""
        self.number = number
        self._make_start = make_start
        self._ended = ended
        self._heard = 0.0
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._stopping = asyncio.Event()
        self.served = asyncio.Event()
        """Set since a worker served here for the first time."""
        self.report: Report | None = None
        """What the worker that is here now said last."""
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def leaving(self) -> bool:
        """No other worker is started here."""
        return self._stopping.is_set()

    @property
    def serving(self) -> bool:
        """There is a worker, it takes requests, and it is not stuck."""
        return self.report is not None and self.report.serving and time.monotonic() - self._heard < STALE_S

    @property
    def _patience_s(self) -> float:
        """How long the worker may be silent. Until its first report it has hardly a stream to wait for."""
        if self.report is not None:
            return SILENT_S
        return _EXIT_S if self._stopping.is_set() else START_S

    def settle(self, *, accepting: bool) -> None:
        """Let the worker serve on without keeping connections, perhaps `accepting` new ones, and start no other."""
        self._tell(Settle(accepting))

    def stop(self) -> None:
        """Let the worker drain and start no other; the second time, let it wait for streams no longer."""
        self._tell(Stop())

    def _tell(self, message: Settle | Stop) -> None:
        self._stopping.set()
        if self._channel is not None:
            self._channel.send(message)

    def set_log_level(self, message: SetLogLevel) -> None:
        """Tell the worker; one that comes later learns of it from its first message."""
        if self._channel is not None:
            self._channel.send(message)

    async def ask(self, question: Question) -> Answer | None:
        """What the worker says; None if it does not, in time."""
        if self._channel is None:
            return None
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[question.question] = answer
        self._channel.send(question)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._asked[question.question]

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def keep(self) -> None:
        """Have a worker until told to stop. Raises ListenError or WorkerError if the first one never serves."""
        backoff = Backoff()
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                reason = await self._run_once()
            except OSError as error:  # no memory, no process, no descriptor to be had
                reason = f"could not be started ({error})"
            if self._stopping.is_set():
                if reason:
                    logger.warning(
                        "worker %d %s; it had not drained, and streams it still had are cut", self.number, reason
                    )
                break
            if not self.served.is_set():
                raise WorkerError(
                    f"Worker {self.number} {reason} before it served; if it said why, it is in the log above."
                )
            delay = backoff.next_delay(time.monotonic() - started)
            logger.warning("worker %d %s; another one is started in %.2g s", self.number, reason, delay)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()
            self.restarts += 1

    async def _run_once(self) -> str:
        """Start a worker and stay with it to its end; how it ended, or nothing if as it was told. Raises OSError if it
        cannot be started."""
        start = self._make_start()
        ours, theirs = socket.socketpair()
        channel = await Channel.over(ours)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "headrace.workers", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), start.counts, *start.http),
                    start_new_session=True,
                )
            return await self._stay_with(process, channel, start)
        finally:
            await channel.close()

    async def _stay_with(self, process: Process, channel: Channel, start: Start) -> str:
        self._process, self._channel = process, channel
        try:
            channel.send(start)
            if self._stopping.is_set():
                channel.send(Stop())
            reason = await self._listen(channel)
            if not reason:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT_S):
                        await process.wait()
        finally:
            self.kill()
            code = await process.wait()
            self._process = self._channel = None
            last, self.report = self.report, None
            if last is not None:
                self._ended(last)
        if not reason and not (self._stopping.is_set() and code == 0):
            reason = f"(process {process.pid}) {how_it_ended(code)}"
        return reason

    async def _listen(self, channel: Channel) -> str:
        """Take the worker's reports until it has no more to say; why it must not live on, or nothing."""
        while True:
            silent = 0.0
            receiving = asyncio.create_task(channel.receive())
            try:
                while not (await asyncio.wait([receiving], timeout=_LOOK_S))[0]:
                    silent += _LOOK_S
                    if silent >= self._patience_s:
                        return f"(process {self.pid}) was killed: it had said nothing for {silent:g} s"
                message = receiving.result()
            except ChannelClosedError:
                return ""
            finally:
                receiving.cancel()
            if isinstance(message, Failed):
                if not self.served.is_set():
                    raise ListenError(message.what, message.message)
                return f"ended: {message.message}"
            if isinstance(message, Answer):
                asked = self._asked.get(message.question)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            if isinstance(message, Report):
                if self.report is None and message.serving:
                    logger.info("worker %d (process %d) serves", self.number, self.pid)
                    self.served.set()
                self.report, self._heard = message, time.monotonic()
