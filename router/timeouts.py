"""The deadlines of a request: its pool's, as far as the client does not ask for others.

A client asks with one header, in the words of the fleet file: `x-headrace-timeouts: first_byte=10s, total=2m`. What it
may ask for is bounded by the pool's `timeout_limits`, by default the pool's own timeouts: then a request may wait less
long than others, but not longer. What goes beyond the bound is cut to it and no error, because a client cannot know
which pool it will meet.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from router.errors import ApiError, invalid
from router.spec.fleet import PoolSpec, TimeoutSpec
from router.spec.units import DURATION_PATTERN, seconds

TIMEOUTS_HEADER = "x-headrace-timeouts"
_NAMES = ("connect", "first_byte", "idle", "total")
_DURATION = re.compile(DURATION_PATTERN)

Asked = Mapping[str, float]
"""Seconds by the name of a deadline."""


@dataclass(slots=True, frozen=True)
class Timeouts:
    """Deadlines in seconds; infinity where off."""

    connect: float
    first_byte: float
    idle: float
    total: float

    @classmethod
    def of(cls, spec: TimeoutSpec) -> "Timeouts":
        return cls(*(seconds(getattr(spec, name)) for name in _NAMES))

    @property
    def shortest(self) -> float:
        """The shortest of the deadlines that the sweep enforces."""
        return min(self.first_byte, self.idle, self.total)

    def asked(self, asked: Asked, limits: "Timeouts") -> "Timeouts":
        """What holds for a request that asks for `asked`, within `limits`."""
        return Timeouts(
            *(min(asked[name], getattr(limits, name)) if name in asked else getattr(self, name) for name in _NAMES)
        )


def timeout_limits(spec: PoolSpec, usual: Timeouts) -> Timeouts:
    """How far requests to a pool may go: as far as those that ask for nothing, in any case."""
    limits = spec.timeout_limits
    if limits is None:
        return usual
    given = (getattr(limits, name) for name in _NAMES)
    return Timeouts(
        *(
            getattr(usual, name) if limit is None else max(seconds(limit), getattr(usual, name))
            for name, limit in zip(_NAMES, given, strict=True)
        )
    )


def read_timeouts(header: str) -> Asked:
    """What a client asks for. Raises a 400 ApiError for what is no such list."""
    asked = {}
    for item in header.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in _NAMES:
            raise _malformed(f"{name[:40]!r} is none of {', '.join(_NAMES)}")
        if value == "off":
            asked[name] = inf
        elif _DURATION.match(value) is None or not seconds(value):
            raise _malformed(f"{value[:40]!r} is not a duration like 500ms, 30s or 2m")
        else:
            asked[name] = seconds(value)
    return asked


def _malformed(reason: str) -> ApiError:
    return invalid(
        f"Invalid {TIMEOUTS_HEADER} header: {reason}. Write it like 'first_byte=10s, total=2m'.", code="invalid_header"
    )
