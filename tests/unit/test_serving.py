"""Running a server until it is told to stop."""

import asyncio

import pytest

from gateway.reload import Reloaded, ReloadError
from headrace.serving import Stop, serve


class HangingServer:
    """A fake: no real server can be made to hang in its start for certain."""

    settle_s = 0.0
    cut = 0

    def __init__(self) -> None:
        self.starts = asyncio.Event()
        self.start_cancelled = False
        self.stopped = False

    async def start(self) -> None:
        self.starts.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.start_cancelled = True
            raise

    def begin_drain(self) -> None:
        raise AssertionError("it has not served")

    async def reload(self) -> Reloaded:
        raise ReloadError("no")

    async def stop(self) -> None:
        assert self.start_cancelled
        self.stopped = True


class FailingServer(HangingServer):
    """A fake whose start fails."""

    async def start(self) -> None:
        self.start_cancelled = True
        raise OSError("no")


async def test_a_start_that_hangs_is_given_up_when_asked_to_stop() -> None:
    server, stop = HangingServer(), Stop()
    serving = asyncio.create_task(serve(server, stop))
    async with asyncio.timeout(5):
        await server.starts.wait()
        stop.ask()
        await serving
    assert server.stopped


async def test_a_server_that_cannot_start_is_stopped_and_its_error_raised() -> None:
    server = FailingServer()
    with pytest.raises(OSError, match="no"):
        await serve(server, Stop())
    assert server.stopped
