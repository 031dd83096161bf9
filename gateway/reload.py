"""A fleet file that is read again by a gateway that runs: what of it can be in force at once, and what cannot.

Pools, routes and tenants are documents, which change all the time. What is in `gateway` is built into the servers when
they start. One process therefore takes over the documents only; a gateway of several processes starts new ones, which
take over everything but the ports, which stay open, and Redis, which the gateway itself follows.
"""

import logging
from collections.abc import Awaitable, Callable, Collection

from msgspec import Struct, structs

from router.spec.fleet import FleetSpec

logger = logging.getLogger(__name__)


class ReloadError(Exception):
    """Nothing has been reloaded. The message is for the operator, in sentences."""


class Reloaded(Struct, frozen=True):
    """What became of a file that was read again."""

    needs_restart: list[str]
    """Keys of the file that differ from what is in force, and are in force after a restart only."""

    def tell(self) -> None:
        """Log it."""
        logger.info("the fleet file was read again and is in force")
        for key in self.needs_restart:
            logger.warning("%s: what the file says now is in force only after a restart", key)


ReadAgain = Callable[[], Awaitable[tuple[FleetSpec, str, frozenset[str]]]]
"""Gives the fleet as the file describes it now, its content's hash, and the paths of what the file says. Raises
ReloadError."""


def what_can_change(before: FleetSpec, after: FleetSpec, fixed: Collection[str]) -> tuple[FleetSpec, Reloaded]:
    """`after` with what stays as it was `before`: `redis`, and the fields of `gateway` that are `fixed`. Raises
    ReloadError for the file of another fleet."""
    if after.fleet != before.fleet:
        raise ReloadError(
            f"The file is now that of the fleet {after.fleet}; start a gateway of its own for it, this one is of the "
            f"fleet {before.fleet}."
        )
    needs_restart = ["redis"] if after.redis != before.redis else []
    needs_restart += [
        f"gateway.{name}" for name in fixed if getattr(after.gateway, name) != getattr(before.gateway, name)
    ]
    kept = structs.replace(after.gateway, **{name: getattr(before.gateway, name) for name in fixed})
    return structs.replace(after, redis=before.redis, gateway=kept), Reloaded(needs_restart)
