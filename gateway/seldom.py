"""A log line about what may happen thousands of times a second."""

import logging
import math
import time

_EVERY_S = 10.0


class Seldom:
    """Counts something, and says how often it has happened, every ten seconds at most."""

    def __init__(self, logger: logging.Logger, text: str) -> None:
        """`text` is a warning with a `%d` for the count, and what is given to `happened` after it."""
        self._logger = logger
        self._text = text
        self._count = 0
        self._told = -math.inf

    def happened(self, *details: object) -> None:
        """Count one; `details` are of the last one."""
        self._count += 1
        if (now := time.monotonic()) >= self._told + _EVERY_S:
            self._logger.warning(self._text, self._count, *details)
            self._count, self._told = 0, now
