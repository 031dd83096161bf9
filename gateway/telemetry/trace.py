"""One request's trace, as it comes about: times and names only.

What a span is to be is written down while the request goes its way; the spans themselves are made when it has ended
(`gateway.telemetry.tracing`). Only their ids are needed before: an engine is told which span its own ones are children
of (W3C Trace Context).

Times are taken anew: the loop's own is that of its last turn, and of whole milliseconds in uvloop. Both count from the
same moment.
"""

import random
import time
from dataclasses import dataclass

from gateway.telemetry.record import read_traceparent
from gateway.upstream.base import Headers, UpstreamError
from router.plan import Attempt

_SAMPLED = 0x01
_STATE_CHARACTERS = 512
"""How much of a `tracestate` has to be kept (W3C Trace Context, section 3.3.1.5)."""


@dataclass(slots=True, frozen=True)
class Parent:
    """The span that a client says its request is a child of."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str
    """Its `tracestate`."""


@dataclass(slots=True)
class AttemptSpan:
    """One attempt. Times are those of `time.monotonic`."""

    span_id: int
    attempt: Attempt
    began: float
    ended: float = 0.0
    """0 while it goes on."""
    failed: str = ""
    """The kind of failure; empty if it did not fail."""


class Trace:
    """What is known of a request's spans."""

    __slots__ = ("_clock", "attempts", "decided", "parent", "span_id", "trace_id", "wait_began", "wait_ended")

    def __init__(self, parent: Parent | None) -> None:
        self.parent = parent
        self.trace_id = parent.trace_id if parent is not None else random.getrandbits(128) or 1
        self.span_id = _span_id()
        """Of the request's own span."""
        self.attempts: list[AttemptSpan] = []
        self.decided: tuple[float, float] | None = None
        """When it was decided where the request goes: from, to."""
        self.wait_began = self.wait_ended = 0.0
        """When it waited in its route's queue; 0 if it did not, or still does."""
        self._clock = time.time() - time.monotonic()

    @property
    def shown_id(self) -> str:
        """The trace's id as people and headers have it."""
        return f"{self.trace_id:032x}"

    def at(self, moment: float) -> int:
        """A time of `time.monotonic` as the clock has it, in nanoseconds since 1970."""
        return int((moment + self._clock) * 1e9)

    def begin_wait(self) -> None:
        """The request waits in its route's queue."""
        self.wait_began = time.monotonic()

    def end_wait(self) -> None:
        """It waits no more."""
        self.wait_ended = time.monotonic()

    def begin_attempt(self, attempt: Attempt) -> None:
        """The request goes to an endpoint."""
        now = self.end_attempt()
        self.attempts.append(AttemptSpan(_span_id(), attempt, now))

    def failed(self, error: UpstreamError) -> None:
        """It failed there."""
        self.end_attempt()
        if self.attempts:
            self.attempts[-1].failed = error.failure.value

    def end_attempt(self) -> float:
        """The last attempt ends now, if it has not. Returns the time."""
        now = time.monotonic()
        if self.attempts and not self.attempts[-1].ended:
            self.attempts[-1].ended = now
        return now

    def passed(self, headers: Headers) -> Headers:
        """What of a client's headers goes to the engine: with the attempt as its parent."""
        others = tuple(header for header in headers if header[0] != "traceparent")
        span_id = self.attempts[-1].span_id if self.attempts else self.span_id
        return (*others, ("traceparent", f"00-{self.shown_id}-{span_id:016x}-01"))


def read_parent(traceparent: str, state: str) -> Parent | None:
    """The parent that a client names; None if it names none that can be read."""
    found = read_traceparent(traceparent)
    if found is None:
        return None
    sampled = bool(int(found["flags"], 16) & _SAMPLED)
    kept = state if len(state) <= _STATE_CHARACTERS else ""
    return Parent(int(found["trace"], 16), int(found["span"], 16), sampled, kept)


def _span_id() -> int:
    return random.getrandbits(64) or 1
