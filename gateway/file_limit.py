"""How many files a process may open: every stream through a gateway holds two, and systems begin with few."""

import contextlib
import resource


def raise_file_limit() -> int:
    """Let this process, and those it starts from now on, open as many files as the system allows; return how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
