"""Starts the parts, watches them, restarts what crashes, and ends everything when it is time.

One task keeps each part: it spawns the process, asks it for readiness until it is ready, waits for its end, and then
decides. An end before the part was ever ready fails the start at once: ports and files are fresh, so a second try
would end the same way. Later ends are answered with a restart after a back-off, except for a vital part, whose end
is the end of the run. A part may name a helper process (Triton's model runs in one); Triton stays "healthy" when its
helper dies while running streams hang, so the helper is watched by a process handle and its death restarts the part.

Three nets keep processes from outliving the run: an orderly end here, a kill of each part's process group after it,
and the kernel's parent-death signal for the case that this process itself is killed.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Protocol

from headrace.local.errors import LocalFleetError
from headrace.local.part import Part
from headrace.local.tether import tethered
from headrace.restarts import Backoff, how_it_ended

START_DEADLINE_S: Final = 60.0
PROBE_EVERY_S: Final = 0.05
LAST_WORDS_S: Final = 3.0
"""How long a part that was told to end twice may still take."""
KILL_DEADLINE_S: Final = 5.0
LOG_TAIL_LINES: Final = 15


class Reporter(Protocol):
    """Told about every change a person would want to see."""

    def starting(self, part: Part) -> None: ...

    def ready(self, part: Part, seconds: float) -> None: ...

    def restarting(self, part: Part, reason: str, delay_s: float) -> None: ...


class Supervisor:
    """Owner of all child processes; use as an async context manager, from the main thread's event loop."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._parts: dict[str, Part] = {}
        self._ready: dict[str, asyncio.Event] = {}
        self._served: set[str] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = False

    async def __aenter__(self) -> "Supervisor":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, parts: Sequence[Part]) -> None:
        """Start parts side by side and return when all are ready.

        Raises:
            LocalFleetError: one ended or was not ready in time; the message holds the last lines of its log.
        """
        for part in parts:
            self._parts[part.name] = part
            self._ready[part.name] = asyncio.Event()
            self._keepers[part.name] = asyncio.create_task(self._keep(part), name=f"keep-{part.name}")
        ready = asyncio.create_task(self._all_ready(parts))
        try:
            waits: list[asyncio.Future[Any]] = [ready, self._failed]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        finally:
            ready.cancel()

    async def _all_ready(self, parts: Sequence[Part]) -> None:
        for part in parts:
            await self._ready[part.name].wait()

    async def wait(self) -> None:
        """Wait until the run must end.

        Raises:
            LocalFleetError: a vital part ended.
        """
        await asyncio.shield(self._failed)

    def pid(self, name: str) -> int:
        """The process now behind a part. For tests."""
        return self._processes[name].pid

    async def crash(self, name: str) -> None:
        """Kill the process behind a part, as a fault would; the restart follows by itself. For tests."""
        self._ready[name].clear()
        process = self._processes[name]
        process.kill()
        await process.wait()

    async def until_ready(self, name: str) -> None:
        """Wait until a part is ready (again). For tests."""
        await self._ready[name].wait()

    async def stop(self) -> None:
        """End all parts: vital ones first, so that none of them sees its engines vanish."""
        self._stopping = True
        for keeper in self._keepers.values():
            keeper.cancel()
        try:
            await asyncio.gather(*self._keepers.values(), return_exceptions=True)
            for vital in (True, False):
                names = [name for name, part in self._parts.items() if part.vital is vital and name in self._processes]
                await asyncio.gather(*(self._end(name) for name in names))
        finally:
            self.kill()
        if not self._failed.done():
            self._failed.cancel()
        elif not self._failed.cancelled():
            self._failed.exception()  # whoever waited for it has raised it already

    def kill(self) -> None:
        """End all parts at once, without asking them."""
        for process in self._processes.values():
            _kill_group(process.pid)

    async def _keep(self, part: Part) -> None:
        backoff = Backoff()
        try:
            while True:
                started = time.monotonic()
                reason = await self._run_once(part)
                self._ready[part.name].clear()
                if part.vital or part.name not in self._served:
                    raise LocalFleetError(f"{part.name} {reason}; the end of its log {part.log}:\n{_tail(part)}")
                delay = backoff.next_delay(time.monotonic() - started)
                self._reporter.restarting(part, reason, delay)
                await asyncio.sleep(delay)
        except LocalFleetError as error:
            if not self._failed.done():
                self._failed.set_exception(error)
        except OSError as error:
            if not self._failed.done():
                self._failed.set_exception(LocalFleetError(f"{part.name} cannot be started: {error}"))

    async def _run_once(self, part: Part) -> str:
        """Run the part until it ends; say how it ended."""
        self._reporter.starting(part)
        started = time.monotonic()
        if part.helper_pid:
            part.helper_pid.unlink(missing_ok=True)
        with part.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *part.command,
                env=dict(part.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C on the terminal is for this process only
                preexec_fn=tethered(),
            )
        self._processes[part.name] = process
        ended = asyncio.create_task(process.wait())
        try:
            if not await self._becomes_ready(part, ended):
                return f"was not ready within {START_DEADLINE_S:.0f} s"
            if not ended.done():
                self._ready[part.name].set()
                self._served.add(part.name)
                self._reporter.ready(part, time.monotonic() - started)
                if not await _outlives_helper(part, ended):
                    return "lost its model process"
            return how_it_ended(await ended)
        finally:
            ended.cancel()
            if not self._stopping:
                _kill_group(process.pid)
                await process.wait()

    async def _becomes_ready(self, part: Part, ended: asyncio.Task[int]) -> bool:
        """True once the part is ready or has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_DEADLINE_S):
                while not ended.done():
                    if await part.ready():
                        return True
                    await asyncio.wait([ended], timeout=PROBE_EVERY_S)
                return True
        return False

    async def _end(self, name: str) -> None:
        process = self._processes[name]
        # Told a second time, a gateway ends the streams it still has with an error event instead of cutting them.
        for patience in (self._parts[name].stop_s, LAST_WORDS_S):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience):
                        await process.wait()
        _kill_group(process.pid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_DEADLINE_S):
                await process.wait()


async def _outlives_helper(part: Part, ended: asyncio.Task[int]) -> bool:
    """Wait for the end of the part or of its helper; true if it was the part's."""
    if part.helper_pid is None:
        await asyncio.wait([ended])
        return True
    try:
        handle = os.pidfd_open(int(part.helper_pid.read_text()))
    except (OSError, ValueError):
        return ended.done()
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(handle, gone.set)
    helper_ended = asyncio.create_task(gone.wait())
    try:
        await asyncio.wait([ended, helper_ended], return_when=asyncio.FIRST_COMPLETED)
        # the helper of a part that crashed goes with it: give the part's own end a moment to show
        await asyncio.wait([ended], timeout=0.2)
        return ended.done()
    finally:
        helper_ended.cancel()
        loop.remove_reader(handle)
        os.close(handle)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _tail(part: Part) -> str:
    with contextlib.suppress(OSError), part.log.open("rb") as log:
        log.seek(max(0, part.log.stat().st_size - 16384))
        lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(empty)"
    return "(no log)"
