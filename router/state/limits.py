"""Asking Redis for leases on limits: all that gateways ask for at a time goes in one round trip.

The scripts (`router.state.lease_script`) are run by their hashes; a server that does not know them, because it is new
or has lost them, says so without having done anything, and is given them. A request may wait for the answer, so the
deadline is short, and nothing is tried twice: a gateway whose ask failed goes on with its share of the limit.
"""

from collections.abc import Sequence
from hashlib import sha1
from typing import Any, Final

from redis.exceptions import NoScriptError

from router.admission.leases import PERMITS_EXPIRE_S
from router.admission.limits import Ask, Grant
from router.state import lease_script
from router.state.store import client, why, without_credentials

ASK_TIMEOUT_S: Final = 0.25
"""Longest wait for a connection, or for an answer."""

Call = tuple[str, str, Sequence[str]]
"""A script, its key and its arguments."""


class LimitStore:
    """The limits of the fleet `fleet` in the Redis at `url`, as the gateway `gateway` asks for them. Use it on one
    event loop, one call at a time, and `close` it."""

    def __init__(self, url: str, fleet: str, gateway: str) -> None:
        self.address = without_credentials(url)
        self._prefix = f"headrace:{{{fleet}}}:"
        self._gateway = gateway
        self._redis = client(url, ASK_TIMEOUT_S)

    async def close(self) -> None:
        await self._redis.aclose()

    async def present(self) -> int:
        """Tell that this gateway is there. Returns how many there are; raises one of `REDIS_FAILURES`."""
        arguments = (self._gateway, repr(PERMITS_EXPIRE_S))
        (answer,) = await self._run([(lease_script.PRESENT, f"{self._prefix}limiters", arguments)])
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    async def grant(self, asks: Sequence[tuple[str, Ask]]) -> list[Grant | None]:
        """What the store gives for each ask, made for the limits of that name; None where it cannot.

        Raises one of `REDIS_FAILURES`; whether the store has done anything is then not known.
        """
        answers = await self._run(
            [
                (lease_script.SCRIPT, f"{self._prefix}limits:{name}", lease_script.arguments(self._gateway, ask))
                for name, ask in asks
            ]
        )
        return [None if isinstance(answer, Exception) else lease_script.grant(answer) for answer in answers]

    def describe(self, error: BaseException) -> str:
        """One sentence about a failure."""
        return why(self.address, error, ASK_TIMEOUT_S)

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        """The answer to each call, or the error that it met."""
        answers = await self._send(calls)
        unknown = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            for script in {calls[place][0] for place in unknown}:
                await self._redis.script_load(script)
            again = await self._send([calls[place] for place in unknown])
            for place, answer in zip(unknown, again, strict=True):
                answers[place] = answer
        return answers

    async def _send(self, calls: Sequence[Call]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for script, key, arguments in calls:
                pipeline.evalsha(_HASHES[script], 1, key, *arguments)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers


_HASHES = {
    script: sha1(script.encode(), usedforsecurity=False).hexdigest()
    for script in (lease_script.SCRIPT, lease_script.PRESENT)
}
