"""How a gateway process protects itself: from how much of each resource is used to what it stops doing.

Each resource has a limit, at which the process is in danger; its *pressure* is its use as a share of that. The greatest
pressure decides the stage, in the order in which things can be spared: requests that can come at any other time (the
class `batch`) are refused; where that helps, idle connections are no longer kept, which costs clients a handshake; then
new requests are refused. What has begun is always finished. This is Envoy's overload manager: resource monitors that
trigger actions at thresholds.

A stage is entered at once and left only when the pressure has been below what it is entered at, by a margin, for a
while: what a stage relieves would otherwise bring its cause straight back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class Stage(IntEnum):
    """What the process has stopped doing. Each stage includes those before it."""

    NORMAL = 0
    SHED_BATCH = 1
    STOP_KEEP_ALIVE = 2
    REFUSE = 3


ENTERED_AT = {Stage.SHED_BATCH: 0.8, Stage.STOP_KEEP_ALIVE: 0.8, Stage.REFUSE: 1.0}
"""The pressure from which on a stage holds."""
HARMLESS = frozenset({"cpu"})
"""The resources of which all may be used, as long as no other is short: they are spared for whom it matters to, from
their limit on."""
HELD_BY_IDLE = frozenset({"memory", "files"})
"""The resources that closing idle connections relieves. Time is none of them: new connections cost more of it."""
MARGIN = 0.1
"""How far below that the pressure must have fallen for the stage to be left."""
CALM_S = 5.0
"""And for how long."""


@dataclass(slots=True, frozen=True)
class Change:
    """The stage was `before` and is `now`, because of `resource`, whose pressure is `pressure`."""

    before: Stage
    now: Stage
    resource: str
    pressure: float


class Overload:
    """The stage of one process. Give it the pressures regularly."""

    __slots__ = ("_calm_since", "stage")

    def __init__(self) -> None:
        self.stage = Stage.NORMAL
        self._calm_since: float | None = None
        """Since when the pressure has been low enough to leave the stage."""

    def update(self, pressures: Mapping[str, float], now: float) -> Change | None:
        """Take note of the pressures at `now` (seconds); a change of stage, if they bring one. Stages are left one at a
        time."""
        before = self.stage
        reached, pressure, resource = max((_reached(name, used), used, name) for name, used in pressures.items())
        if reached > before:
            self.stage, self._calm_since = reached, None
        elif any(_reached(name, used + MARGIN) >= before for name, used in pressures.items()):
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= CALM_S:
            self.stage, self._calm_since = Stage(before - 1), now
        return Change(before, self.stage, resource, pressure) if self.stage is not before else None


def _reached(resource: str, pressure: float) -> Stage:
    """The stage that a resource's pressure calls for."""
    if resource in HARMLESS:
        return Stage.SHED_BATCH if pressure >= 1.0 else Stage.NORMAL
    if pressure >= ENTERED_AT[Stage.REFUSE]:
        return Stage.REFUSE
    if pressure >= ENTERED_AT[Stage.STOP_KEEP_ALIVE] and resource in HELD_BY_IDLE:
        return Stage.STOP_KEEP_ALIVE
    return Stage.SHED_BATCH if pressure >= ENTERED_AT[Stage.SHED_BATCH] else Stage.NORMAL
