"""Calls to a Triton, without one: what closing them leaves behind."""

from typing import Any

import pytest

from gateway.grpc.call import StreamCall
from gateway.upstream.base import UpstreamError
from gateway.upstream.triton.vitals import Vitals


class Stream:
    """An RPC, and the channel it was made on, that does nothing but end."""

    paced = False

    def __init__(self) -> None:
        self.vitals = Vitals("e", lambda: 0.0)

    async def read(self) -> bytes:
        return b""

    def cancel(self, *_: Any) -> None: ...


async def test_closing_requests_gathers_no_tracebacks() -> None:
    raised = []
    for _ in range(2):
        stream: Any = Stream()
        call = StreamCall(stream, stream, versioned=False)
        call.close()
        with pytest.raises(UpstreamError) as error:
            await call.read()
        raised.append(error.value)
        assert not error.value.endpoint_fault
    assert raised[0] is not raised[1]
