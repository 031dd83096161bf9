"""How a gateway process protects itself: from how much of each resource is used to what it stops doing.

Each resource has a limit, at which the process is in danger; its *pressure* is its use as a share of that. A `Measure`
is taken from a pressure on, of any of the resources that it relieves: closing idle connections gives back memory and
files, but costs time, for clients come back with a handshake. What has begun is always finished. This is Envoy's
overload manager: resource monitors that trigger actions at thresholds.

A measure is taken at once, and given up only when each pressure has been below what it is taken at, by a margin, for a
while: what it relieves would otherwise bring its cause straight back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class Measure(Enum):
    """What a process can do to protect itself."""

    SHED_BATCH = "shed_batch"
    """New requests of class `batch` are refused."""
    STOP_KEEP_ALIVE = "stop_keep_alive"
    """Connections of clients are closed after their answer, idle ones at once."""
    REFUSE = "refuse"
    """All new requests are refused."""


TAKEN_AT: Mapping[Measure, Mapping[str, float]] = {
    Measure.SHED_BATCH: {"cpu": 1.0, "loop": 0.8, "memory": 0.8, "files": 0.8},
    Measure.STOP_KEEP_ALIVE: {"memory": 0.8, "files": 0.8},
    Measure.REFUSE: {"loop": 1.0, "memory": 1.0, "files": 1.0},
}
"""The pressure of each resource from which on a measure is taken. All of a core may be used, as long as the loop keeps
up: only what can come at any other time is kept from it."""
MARGIN = 0.1
"""How far below that the pressures must have fallen for a measure to be given up."""
CALM_S = 5.0
"""And for how long."""


@dataclass(slots=True, frozen=True)
class Change:
    """A measure was `taken`, or given up. `resource` is the one nearest to what it is taken at, with its pressure."""

    measure: Measure
    taken: bool
    resource: str
    pressure: float


class Overload:
    """The measures that one process has taken. Give it the pressures regularly."""

    __slots__ = ("_calm_since", "taken")

    def __init__(self) -> None:
        self.taken: set[Measure] = set()
        self._calm_since: dict[Measure, float] = {}
        """Since when the pressures have been low enough to give a measure up."""

    def update(self, pressures: Mapping[str, float], now: float) -> Iterable[Change]:
        """Take note of the pressures at `now` (seconds), and return what follows."""
        changes = []
        for measure, limits in TAKEN_AT.items():
            above, resource = max(
                (pressures[name] - limit, name) for name, limit in limits.items() if name in pressures
            )
            if above >= 0:
                self._calm_since.pop(measure, None)
                if measure not in self.taken:
                    self.taken.add(measure)
                    changes.append(Change(measure, True, resource, pressures[resource]))
            elif above >= -MARGIN:
                self._calm_since.pop(measure, None)
            elif measure in self.taken and now - self._calm_since.setdefault(measure, now) >= CALM_S:
                self.taken.remove(measure)
                del self._calm_since[measure]
                changes.append(Change(measure, False, resource, pressures[resource]))
        return changes
