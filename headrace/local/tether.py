"""Makes a child process die with the process that started it, even when that one is killed with SIGKILL.

The kernel sends the chosen signal when the *thread* that started the child ends, so children must be started from a
thread that lives as long as its process: the event loop's. Between fork and `prctl` the parent may already be gone;
the child then has another parent and ends itself.
"""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded before any fork: nothing may be imported between fork and exec


def tethered() -> Callable[[], None]:
    """Return a function for `preexec_fn` that ties the new process to this one."""
    parent = os.getpid()

    def tie() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tie
