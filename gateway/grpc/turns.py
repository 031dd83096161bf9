"""The order of the answers in a client's stream, which is Triton's.

Measured on 2.51: the answers of models that answer once come in the order in which they were asked for, over the whole
stream and whichever models they are from, and so do refusals of requests whose model or version is not there. What
comes from decoupled models, refusals included, waits for nothing, and nothing waits for it.
"""

import asyncio


class Turn:
    """A request's place among those that are answered in order; one without anybody before it never waits."""

    __slots__ = ("_before", "_over")

    def __init__(self, before: "Turn | None" = None) -> None:
        self._over = asyncio.Event()
        self._before: asyncio.Event | None = before._over if before is not None else None

    async def comes(self) -> None:
        """Wait until everything before has been answered. Whoever is before ends by its own deadlines."""
        if self._before is not None:
            await self._before.wait()
            self._before = None

    def ends(self) -> None:
        """The request has been answered, or never will be."""
        self._over.set()
