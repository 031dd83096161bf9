"""How many files a process may open: every stream through a gateway holds two, and systems begin with few.

The last of them are not for clients. When none is left the event loop closes every new connection at once and says
nothing, on the admin port, too: a liveness probe would then end a gateway that has too many clients.
"""

import contextlib
import logging
import resource

from gateway.seldom import Seldom

_MOST_KEPT = 128
"""Files that clients leave to others, where there are many; a quarter where there are few."""

logger = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Let this process, and those it starts from now on, open as many files as the system allows; return how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class ClientFiles:
    """Which connections of clients are one too many."""

    def __init__(self) -> None:
        self._refused = Seldom(
            logger,
            "closed %d new client connections: nearly all of the %d files that this process may open are in use; raise "
            "its limit (ulimit -n, LimitNOFILE) or have fewer clients",
        )

    def refuses(self, descriptor: int) -> bool:
        """Whether the new connection with this file descriptor is to be closed. The system hands out the lowest number
        that is free, so all below it are in use."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptor < limit - min(limit // 4, _MOST_KEPT):
            return False
        self._refused.happened(limit)
        return True
