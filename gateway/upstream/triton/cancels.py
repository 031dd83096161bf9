"""Telling Triton to stop: a cancel of the RPC and, where the engine takes one, a stop request (`stops`).

**Cancels** of one server follow one another. Triton before 2.53 (container 24.12) can crash when several streams of one
server are cancelled at nearly the same time before their first token: a race between its cancel notifications
(triton-inference-server/server issue 7368, mended by pull request 7840). Measured on 2.51: four streams cancelled
together take the server down after a few dozen cancels, 5 ms apart as well; 20 ms apart a thousand do it no harm. A
crash ends every stream of the server, so for such servers the cancels of one gateway are spread: each waits its turn,
and the stream it belongs to is nobody's meanwhile.

**Stop requests** are sent at once and nobody waits for them. Each has `STOP_TIMEOUT_S`; while `STOP_LIMIT` are under
way no more are sent.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc

FIXED_IN = (2, 53)
"""The first Triton version that takes cancels as they come."""
GAP_S = 0.025
"""Seconds between two cancels of an older server."""
STOP_TIMEOUT_S = 2.0
STOP_LIMIT = 256

_VERSION = re.compile(r"^(\d+)\.(\d+)")


class Rpc(Protocol):
    """What of a gRPC call is needed here."""

    def cancel(self) -> bool: ...

    def done(self) -> bool: ...


class Canceller:
    """The cancels of one server."""

    __slots__ = ("_stopping", "_turn", "_waiting", "paced", "send_stop")

    def __init__(self) -> None:
        self.paced = True
        """Whether cancels wait for one another; until the server's version is known, they do."""
        self.send_stop: Callable[[str, float], Any] | None = None
        """Starts the RPC of a stop request, for the running request's id and with a deadline in seconds; None where
        the engine takes none."""
        self._waiting: deque[Rpc] = deque()
        self._turn: asyncio.TimerHandle | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    def learn_version(self, version: str) -> None:
        """Decide by the server's version; one that cannot be read is taken for a recent one."""
        found = _VERSION.match(version)
        self.paced = found is not None and (int(found[1]), int(found[2])) < FIXED_IN

    def cancel(self, rpc: Rpc, request_id: str | None = None) -> None:
        """Cancel `rpc`, now or when it is its turn; one that has ended takes no turn. With the id of its request, the
        engine is told to stop as well."""
        if rpc.done():
            return
        if request_id is not None:
            self.stop(request_id)
        if not self.paced:
            rpc.cancel()
            return
        self._waiting.append(rpc)
        if self._turn is None:
            self._take_turn()

    def stop(self, request_id: str) -> None:
        """Tell the engine to stop, where it takes that."""
        if self.send_stop is not None and len(self._stopping) < STOP_LIMIT:
            task = asyncio.create_task(_stop(self.send_stop, request_id), name=f"stop {request_id}")
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    def _take_turn(self) -> None:
        """Cancel the next. The gap is counted from when that really happened: a loop that was busy would otherwise make
        up for its delay with several cancels at once."""
        self._turn = None
        while self._waiting:
            rpc = self._waiting.popleft()
            if not rpc.done():
                rpc.cancel()
                self._turn = asyncio.get_running_loop().call_later(GAP_S, self._take_turn)
                return

    async def close(self) -> None:
        """Let the stop requests under way end; each has its deadline."""
        await asyncio.gather(*self._stopping)


def seen(future: "asyncio.Future[Any]") -> None:
    """Take note of an exception that nobody may be left to raise to."""
    if not future.cancelled():
        future.exception()


async def _stop(send: Callable[[str, float], Any], request_id: str) -> None:
    try:
        rpc = send(request_id, STOP_TIMEOUT_S)
        while await rpc.read() is not grpc.aio.EOF:
            pass
    except (grpc.aio.AioRpcError, grpc.aio.UsageError):
        return  # the cancelled RPC has to do
    except asyncio.CancelledError:
        # A channel that closes cancels its RPCs; only a cancelled task may end as one.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
