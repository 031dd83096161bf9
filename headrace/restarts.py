"""What is to be said and how long to wait before a process that ended is started again.

The wait doubles, with a ceiling, and is forgotten after a good run.
"""

import signal
from dataclasses import dataclass

FIRST_S = 0.25
CEILING_S = 15.0
GOOD_RUN_S = 30.0
"""A process that lived this long has recovered: its next crash starts from the first delay."""


@dataclass(slots=True)
class Backoff:
    """Delays of one process."""

    failures: int = 0

    def next_delay(self, lived_s: float) -> float:
        """Seconds to wait after a run of `lived_s` seconds."""
        if lived_s >= GOOD_RUN_S:
            self.failures = 0
        delay = min(FIRST_S * 2.0 ** min(self.failures, 16), CEILING_S)
        self.failures += 1
        return delay


def how_it_ended(code: int) -> str:
    """The end of a sentence about a process with this return code, which is minus the signal if one ended it."""
    if code >= 0:
        return f"ended with exit status {code}"
    return f"was ended by {signal.Signals(-code).name}"
