"""A model of the script by which gateways share limits (`router.state.lease_script`): the same arithmetic in Python.

A contract test holds it equal to the script in a real server, so that simulations may use it in place of one.
"""

import math
from dataclasses import dataclass, field

from router.admission.leases import MINUTE_S, PERMITS_EXPIRE_S, RateGrant
from router.admission.limits import Ask, Grant, Kind


@dataclass
class LeaseStore:
    """One tenant's hash."""

    at: float | None = None
    levels: dict[Kind, float] = field(default_factory=dict)
    permits: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By gateway: how many, and until when."""

    def grant(self, gateway: str, ask: Ask, now: float) -> Grant:
        at = now if self.at is None else self.at
        elapsed = max(0.0, now - at)
        self.at = now = max(now, at)
        rates = []
        for kind, rate in ask.rates:
            stored = self.levels.get(kind)
            filled = rate.believed if stored is None else stored + elapsed * rate.limit / MINUTE_S
            level = min(rate.limit, min(rate.limit, filled) - rate.settle)
            units = max(0, math.floor(min(rate.want, level)))
            self.levels[kind] = level - units
            rates.append(RateGrant(units, level - units))
        granted = 0
        if (streams := ask.streams) is not None:
            self.permits = {name: held for name, held in self.permits.items() if name == gateway or held[1] > now}
            others = sum(count for name, (count, _) in self.permits.items() if name != gateway)
            granted = max(streams.keep, min(streams.want, streams.limit - others))
            self.permits.pop(gateway, None)
            if granted > 0:
                self.permits[gateway] = (granted, now + PERMITS_EXPIRE_S)
        return Grant(tuple(rates), granted)
