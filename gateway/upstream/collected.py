"""A sink for answers that are read by the gateway itself, whole: those to probes, and errors."""

from gateway.upstream.base import Failure, UpstreamError

_BODY_LIMIT = 4 * 1024 * 1024
"""Bytes of an answer that is kept whole."""


class Collected:
    """A sink that keeps a body whole, up to `limit` bytes."""

    chunks = None

    def __init__(self, limit: int = _BODY_LIMIT) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._limit = limit

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def write(self, payload: bytes) -> None:
        self._size += len(payload)
        if self._size > self._limit:
            raise UpstreamError(Failure.PROTOCOL, f"An engine answered with more than {self._limit} bytes.")
        self._pieces.append(payload)
