"""Cancelling Triton's streams one after another.

Triton before 2.53 (container 24.12) can crash when several streams of one server are cancelled at nearly the same time
before their first token: a race between its cancel notifications (triton-inference-server/server issue 7368, mended by
pull request 7840). Measured on 2.51: four streams cancelled together take the server down after a few dozen cancels, 5
ms apart as well; 20 ms apart a thousand do it no harm. A crash ends every stream of the server, so for such servers the
cancels of one gateway are spread: each waits its turn, and the stream it belongs to is nobody's meanwhile.
"""

import asyncio
import re
from typing import Protocol

FIXED_IN = (2, 53)
"""The first Triton version that takes cancels as they come."""
GAP_S = 0.025
"""Seconds between two cancels of an older server."""

_VERSION = re.compile(r"^(\d+)\.(\d+)")


class Rpc(Protocol):
    """What of a gRPC call is needed here."""

    def cancel(self) -> bool: ...

    def done(self) -> bool: ...


class Canceller:
    """The cancels of one server."""

    __slots__ = ("_free_at", "paced")

    def __init__(self) -> None:
        self.paced = True
        """Whether cancels wait for one another; until the server's version is known, they do."""
        self._free_at = 0.0

    def learn_version(self, version: str) -> None:
        """Decide by the server's version; one that cannot be read is taken for a recent one."""
        found = _VERSION.match(version)
        self.paced = found is not None and (int(found[1]), int(found[2])) < FIXED_IN

    def cancel(self, rpc: Rpc) -> None:
        """Cancel `rpc`, now or when it is its turn; one that has ended takes no turn."""
        if rpc.done():
            return
        if not self.paced:
            rpc.cancel()
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        turn = max(now, self._free_at)
        self._free_at = turn + GAP_S
        if turn > now:
            loop.call_at(turn, rpc.cancel)
        else:
            rpc.cancel()
