"""What a run leaves on disk and in shared memory, and how it goes away again, whatever way the run ended.

Each run has its own folder under one base folder, with a lock held while the run lives. A folder whose lock is free
belongs to a run that is over: if it was killed, its shared-memory regions (named after the folder) are still there.
So every start first clears what dead runs left. Logs outlive a failed run for a day, since they are what one wants to
read then; everything else goes at once.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

SHARED_MEMORY = Path("/dev/shm")
KEEP_LOGS_S: Final = 24 * 3600.0
STARTING_S: Final = 60.0
_PREFIX = "headrace-run-"


def base_folder() -> Path:
    """The folder of all runs of this user."""
    return Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"


class RunDir:
    """The folder of one run; use as a context manager.

    On a clean exit the folder is removed. After an exception the logs stay.
    """

    def __init__(self, base: Path | None = None) -> None:
        self._base = base or base_folder()
        self.path = self._base / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        self._lock = -1

    def __enter__(self) -> "RunDir":
        self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
        clear_dead_runs(self._base)
        self.logs.mkdir(mode=0o700, parents=True)
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _clear(self.path, keep_logs=kind is not None)
        os.close(self._lock)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def shared_memory_prefix(self, part: str) -> str:
        """A name for the shared-memory regions of `part`, from which a later run knows whose they are."""
        return f"{self.path.name}-{part}"


def clear_dead_runs(base: Path, now: float | None = None) -> None:
    """Remove what runs that are over left behind. `now` is seconds since the epoch."""
    now = time.time() if now is None else now
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # two runs may clear the same folder at the same time
            if _is_over(folder):
                _clear(folder, keep_logs=now - folder.stat().st_mtime < KEEP_LOGS_S)


def _is_over(folder: Path) -> bool:
    """Whether nobody holds the folder's lock; a folder without one was cleared before, or is being made this moment."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > STARTING_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _clear(folder: Path, *, keep_logs: bool) -> None:
    for region in SHARED_MEMORY.glob(f"{folder.name}-*"):
        region.unlink(missing_ok=True)
    if not keep_logs:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for entry in folder.iterdir():
        if entry.name == "logs":
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
