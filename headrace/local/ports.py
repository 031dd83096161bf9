"""Loopback ports for the parts of a run.

Free ports are looked for below the range the kernel hands to outgoing connections: a restarted engine must get its old
port back, and a port from that range could meanwhile belong to somebody's connection. The search starts at a random
place, so that two runs starting together rarely meet.
"""

import random
import socket
from collections.abc import Collection

from headrace.local.errors import LocalFleetError

LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 18000, 31999


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there now; a connection in TIME_WAIT does not count as a user of the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int, taken: Collection[int] = (), *, chance: random.Random | None = None) -> list[int]:
    """Find `count` different free ports that are not in `taken`.

    Raises:
        LocalFleetError: the whole range is in use.
    """
    size = LAST_PORT - FIRST_PORT + 1
    start = (chance or random.Random()).randrange(size)
    found: list[int] = []
    for step in range(size):
        if len(found) == count:
            return found
        port = FIRST_PORT + (start + step) % size
        if port not in taken and is_free(port):
            found.append(port)
    if len(found) == count:
        return found
    raise LocalFleetError(f"no {count} free ports from {FIRST_PORT} to {LAST_PORT}: end what uses them", exit_code=2)


def require_free(port: int, *, what: str, option: str) -> None:
    """Check a port the user chose.

    Raises:
        LocalFleetError: it is in use; names the part and the option that chooses another.
    """
    if not is_free(port):
        raise LocalFleetError(
            f"port {port} for the {what} is in use: end the program that listens there or choose another with {option}",
            exit_code=2,
        )
