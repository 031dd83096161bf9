"""Calls to a Triton server as one request sees them: something to wait for, to give up, and to close.

gRPC's asyncio calls cancel their RPC as soon as a task that waits on them is cancelled, but a Triton before 2.53 must
not get many cancels at once (`gateway.upstream.triton.cancels`). So nobody waits on them in a task that can be
cancelled: a unary call to such a server is waited for through a future of our own, and streams are read by tasks that
only ever end by themselves, when the RPC under them does.
"""

import asyncio
from typing import Any

import grpc

from gateway.upstream.base import UpstreamError, closed
from gateway.upstream.triton.raw import RawTriton


class RawCall:
    """An RPC with its deadlines; see `gateway.upstream.base.LiveCall`."""

    def __init__(self, raw: RawTriton, rpc: Any, *, versioned: bool, request_id: str = "") -> None:
        self._loop = asyncio.get_running_loop()
        self.last_read = self._loop.time()
        self.answering = False
        self._raw = raw
        self._rpc = rpc
        self._versioned = versioned
        self.request_id = request_id
        """The id that its client gave the request which is to be answered; empty if there is none."""
        self._error: UpstreamError | None = None

    def abort(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error
            self._raw.cancel(self._rpc, self.request_id)

    def close(self) -> None:
        self.abort(closed())

    def _failed(self, error: grpc.aio.AioRpcError) -> UpstreamError:
        return self._error or self._raw.judged(error, received=self.answering, versioned=self._versioned)

    def _cancelled(self) -> UpstreamError:
        """The error for an RPC that is cancelled; raises CancelledError if it is this task that is."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return self._error or self._raw.left()


class UnaryCall(RawCall):
    """A call that is answered once."""

    def __init__(self, raw: RawTriton, rpc: Any, *, versioned: bool, request_id: str = "") -> None:
        super().__init__(raw, rpc, versioned=versioned, request_id=request_id)
        self._ended: asyncio.Future[None] | None = None
        if raw.paced:
            self._ended = self._loop.create_future()
            rpc.add_done_callback(self._end)

    async def response(self) -> bytes:
        """The answer. Raises UpstreamError."""
        if self._ended is not None:
            await self._ended
            if self._error is not None:
                raise self._error
        try:
            message: bytes = await self._rpc
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from None
        except asyncio.CancelledError:
            raise self._cancelled() from None
        finally:
            if self._rpc.done():
                self._rpc = _ENDED  # it holds the answer, and would keep it as long as the request lives
        self.answering = True
        return message

    def abort(self, error: UpstreamError) -> None:
        super().abort(error)
        self._end()

    def _end(self, _: object = None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class StreamCall(RawCall):
    """A call that is answered with a stream of messages. To be read by a task that nobody cancels. Its silence is
    listened to while it is read: Triton tells nobody that the process of a model has died."""

    def __init__(self, raw: RawTriton, rpc: Any, *, versioned: bool, request_id: str = "") -> None:
        super().__init__(raw, rpc, versioned=versioned, request_id=request_id)
        self.paused = False
        raw.vitals.watch(self)

    async def read(self) -> bytes | None:
        """The next message, None at the end. Raises UpstreamError."""
        if self.paused:
            self.paused = False
            self.last_read = self._loop.time()  # the engine has not been listened to
        try:
            message = await self._rpc.read()
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from None
        except asyncio.CancelledError:
            raise self._cancelled() from None
        finally:
            self.paused = True
        if self._error is not None:
            raise self._error
        self.last_read = self._loop.time()
        if message is grpc.aio.EOF:
            return None
        self.answering = True
        found: bytes = message
        return found

    def abort(self, error: UpstreamError) -> None:
        if self._error is None:
            self._raw.vitals.given_up(self, error)
        super().abort(error)

    def close(self) -> None:
        self._raw.vitals.unwatch(self)
        super().close()


class _Ended:
    """An RPC that has been answered."""

    def cancel(self) -> bool:
        return False

    def done(self) -> bool:
        return True


_ENDED = _Ended()
