"""How long to wait before a crashed part is started again: doubling, with a ceiling, forgotten after a good run."""

from dataclasses import dataclass

FIRST_S = 0.25
CEILING_S = 15.0
GOOD_RUN_S = 30.0
"""A part that lived this long has recovered: its next crash starts from the first delay."""


@dataclass(slots=True)
class Backoff:
    """Delays of one part."""

    failures: int = 0

    def next_delay(self, lived_s: float) -> float:
        """Seconds to wait after a run of `lived_s` seconds."""
        if lived_s >= GOOD_RUN_S:
            self.failures = 0
        delay = min(FIRST_S * 2.0 ** min(self.failures, 16), CEILING_S)
        self.failures += 1
        return delay
