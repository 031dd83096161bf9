"""Where the lines of the access log go: standard output, or a file that may be moved away under it.

Lines are only ever added at the end, and no line is split over two writes, so that several processes can write to the
same file, or to the same pipe: what is written to a pipe in pieces of at most `PIPE_BUF` bytes is never mixed with what
others write (POSIX, `write`). Before it writes, it looks whether the file is still the one under its name. So whoever
rotates logs may rename the file or truncate it, and need not tell the gateway.

Everything here may block, and is called in a thread of its own.
"""

import errno
import logging
import os
import select
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from router.spec.gateway import STDOUT

LINE_BYTES = select.PIPE_BUF
"""The longest line that is written as a whole everywhere."""
_FILE_BYTES = 256 * 1024
_MODE = 0o640
_STDOUT = 1

logger = logging.getLogger("headrace.access")


class LogFile:
    """A file that lines are added to; opened when the first of them come."""

    def __init__(self, where: str) -> None:
        """`where` is a path, or `STDOUT`."""
        self._path = None if where == STDOUT else where
        self._file = _STDOUT if self._path is None else -1
        self._cut = False
        """What was written last ends within a line."""
        self._failing = False

    def write(self, lines: list[bytes]) -> int:
        """Add lines; how many of them could not be. Raises nothing."""
        written = 0
        try:
            self._follow()
            most = _FILE_BYTES if stat.S_ISREG(os.fstat(self._file).st_mode) else LINE_BYTES
            for count, piece in _pieces(lines, most):
                self._write(piece)
                written += count
        except OSError as error:
            if not self._failing:
                logger.error("the access log cannot be written: %s", os.strerror(error.errno or 0).lower())
            self._failing = True
        else:
            if self._failing:
                logger.warning("the access log is written again")
            self._failing = False
        return len(lines) - written

    def close(self) -> None:
        if self._path is not None and self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _follow(self) -> None:
        """Have the file open that is under the path now."""
        if self._path is None:
            return
        if self._file >= 0:
            try:
                if os.path.samestat(os.stat(self._path), os.fstat(self._file)):  # noqa: PTH116 - Path costs more
                    return
            except FileNotFoundError:
                pass
        opened = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
        self.close()
        self._file, self._cut = opened, False

    def _write(self, piece: bytes) -> None:
        left = memoryview(b"\n" + piece if self._cut else piece)
        while left:
            written = os.write(self._file, left)
            self._cut = written < len(left)
            left = left[written:]


def unwritable(where: str) -> str | None:
    """Why lines cannot be added there, as the end of a sentence; None if they can."""
    if where == STDOUT:
        return None
    if Path(where).is_fifo():  # opened and closed, it would look to its reader as if all had been said
        return None if os.access(where, os.W_OK) else os.strerror(errno.EACCES).lower()
    try:
        os.close(os.open(where, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE))
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    return None


def _pieces(lines: Iterable[bytes], most: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines in pieces of at most `most` bytes, where they fit, each with the number of its lines."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if piece and size + len(line) > most:
            yield len(piece), b"".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        yield len(piece), b"".join(piece)
