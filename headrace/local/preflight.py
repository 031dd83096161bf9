"""What is checked before anything is started, because a clear sentence now is worth more than a crash in a log."""

import platform
from pathlib import Path
from typing import Final

from headrace.local.errors import LocalFleetError

NEEDED_MIB: Final = 2048
"""Three engines of 420 MiB each, 100 MiB of shared weights, the rest of the parts, and prompts kept in memory."""


def require_linux() -> None:
    """Check that this is the one system the wheels are built for.

    Raises:
        LocalFleetError: it is not.
    """
    if platform.system() != "Linux":
        raise LocalFleetError(
            f"the embedded engines run on Linux only, not on {platform.system()}: run `headrace gateway` against "
            "engines of your own",
            exit_code=2,
        )


def require_memory(available_mib: int) -> None:
    """Check the memory that may still be used.

    Raises:
        LocalFleetError: too little for three engines.
    """
    if available_mib < NEEDED_MIB:
        raise LocalFleetError(
            f"the embedded engines need {NEEDED_MIB} MiB of memory and {available_mib} MiB are available: end other "
            "programs or raise this container's memory limit",
            exit_code=2,
        )


def available_memory_mib(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The smaller of what the machine has left and what the control group allows, in MiB."""
    lines = (proc / "meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) // 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:  # the root group, or no control groups: no limit
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used) // 2**20)
