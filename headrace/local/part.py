"""One child process of the embedded fleet, described: what to run, when it is ready, what its end means."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.local.probe import Probe


@dataclass(frozen=True, slots=True)
class Part:
    """A part is only data; the supervisor gives it life."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment of the process."""
    log: Path
    """Standard output and error go here, appended over restarts."""
    ready: Probe
    address: str
    """For the progress line: where the part is reached."""
    vital: bool = False
    """Its end is the end of everything, instead of a restart."""
    helper_pid: Path | None = None
    """A file in which the part names a process it cannot do without; when that one ends, the part is restarted."""
    stop_s: float = 5.0
    """How long it may take to end when asked."""
