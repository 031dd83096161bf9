"""How many requests may be tried at a second endpoint: the budget that keeps retries from becoming an outage.

When engines fail because they are overloaded, trying every failed request elsewhere loads those that are left, which
fail in their turn. So retries get a share of what is going on, and a small rate of their own so that a quiet gateway
may retry at all. The share is Envoy's (`retry_budget.budget_percent`: concurrent retries against active requests), the
rate is Finagle's and linkerd's (`minRetriesPerSec`, a token bucket).

Two things differ from Envoy. A retry holds its place until the engine answers or fails, not to the end of the answer:
a stream that runs for minutes is then a request like any other, and must not keep the budget spent after one incident.
And it holds it for `HOLD_S` at least: engines that fail within a millisecond would otherwise have a place free again
at once, and the share would limit nothing.
"""

from collections import deque

HOLD_S = 1.0
"""Seconds for which a retry counts at least."""


class RetryPlace:
    """A retry's place in the budget. `used`: it has been sent."""

    __slots__ = ("taken_at", "used")

    def __init__(self, taken_at: float) -> None:
        self.taken_at = taken_at
        self.used = False


class RetryBudget:
    """The budget of one process. Times are seconds on any clock that does not go back."""

    def __init__(self, share: float, min_per_second: float) -> None:
        """`share` of the live requests may be retries (infinity: no limit), and `min_per_second` whatever the share."""
        self._share = share
        self._rate = min_per_second
        self._tokens = float(min_per_second)
        self._filled_at = 0.0
        self._open = 0
        self._held: deque[float] = deque()
        """When the retries that are over cease to count, in the order in which they ended."""

    def in_use(self, now: float) -> int:
        """How many retries count."""
        held = self._held
        while held and held[0] <= now:
            held.popleft()
        return self._open + len(held)

    def take(self, live: int, now: float) -> RetryPlace | None:
        """A place for one more retry while `live` requests are open, or None if the budget is spent."""
        if self.in_use(now) + 1 > self._share * live and not self._take_token(now):
            return None
        self._open += 1
        return RetryPlace(now)

    def give_back(self, place: RetryPlace, now: float) -> None:
        """The retry has been answered or has failed. To be called once."""
        self._open -= 1
        if place.used:
            self._held.append(max(place.taken_at + HOLD_S, self._held[-1] if self._held else 0.0))

    def _take_token(self, now: float) -> bool:
        self._tokens = min(self._rate, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
