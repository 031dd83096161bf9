"""What the queue of a route is made of: requests with their places, and what each tenant has waiting and in flight."""

import math
from collections import OrderedDict
from enum import Enum
from typing import Final, Literal

import msgspec

from router.spec.fleet import Priority

PRIORITIES: Final[tuple[Priority, ...]] = ("interactive", "standard", "batch")

Reason = Literal["if_available", "queue_full", "tenant_share", "too_large", "displaced", "deadline"]
"""Why a request does not get in: it asked not to wait; the queue is full of others who have no more of it; its tenant
has its part of the queue; no queue is that large; it gave way to a smaller party; it will not start in time."""

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""What a prompt token and an answer's token cost, as in the evaluation of the virtual token counters' paper."""


class Usage:
    """How many slots are in use, now and as an exponential average over time. Averages over one `span` add up."""

    __slots__ = ("_at", "in_flight", "mean")

    def __init__(self) -> None:
        self.in_flight = 0
        self.mean = 0.0
        self._at = 0.0

    def advance(self, now: float, span: float) -> None:
        """Bring the average to `now`; it forgets over `span` seconds."""
        elapsed = now - self._at
        if elapsed > 0:
            self.mean = self.in_flight + (self.mean - self.in_flight) * math.exp(-elapsed / span)
        self._at = now

    def occupy(self, slots: int, now: float, span: float) -> None:
        """From `now` on, so many more (or fewer) are in use."""
        elapsed = now - self._at
        if elapsed > 0:
            self.mean = self.in_flight + (self.mean - self.in_flight) * math.exp(-elapsed / span)
            self._at = now
        self.in_flight += slots


class Flow:
    """What one tenant asks of one class."""

    __slots__ = ("away_since", "bytes", "counter", "counts", "joined", "tenant", "usage", "waiting", "weight")

    def __init__(self, tenant: str, weight: float, counter: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.counter = counter
        self.waiting: OrderedDict[int, Ticket] = OrderedDict()
        """By number, which rises in order of arrival."""
        self.bytes = 0
        """Of what is waiting."""
        self.usage = Usage()
        self.joined = 0.0
        """The virtual time when its first waiting request became that."""
        self.counts = False
        """It is among those the slots are divided by."""
        self.away_since = 0.0


class Arrival(msgspec.Struct, frozen=True):
    """A request that wants a slot."""

    tenant: str
    prompt_tokens: float
    """As far as they have to be computed; an estimate, as is the other."""
    completion_tokens: float
    priority: Priority = "standard"
    weight: float = 1.0
    """The tenant's."""
    bytes: int = 0
    """What is kept in memory for it while it waits."""
    deadline: float = math.inf
    """When it must have started."""
    if_available: bool = False
    """It would rather be refused than wait (`Prefer: if-available`)."""


class Refusal(msgspec.Struct, frozen=True):
    """A request that was not let in."""

    reason: Reason
    retry_after: int
    """Seconds, for the header."""


class State(Enum):
    WAITING = 1
    RUNNING = 2
    OVER = 3


class Ticket:
    """A request's place, in the queue and then in a slot. Whoever holds it ends it with `RouteQueue.end`."""

    __slots__ = ("arrival", "displaced", "flow", "number", "position", "rank", "since", "state")

    flow: Flow
    """Known once the queue has entered it into its books."""

    def __init__(self, arrival: Arrival, rank: int, number: int, now: float) -> None:
        self.arrival = arrival
        self.rank = rank
        self.number = number
        self.state = State.WAITING
        self.since = now
        """When its state began."""
        self.position = 0
        """About how many requests were to start before it, itself included, when it began to wait."""
        self.displaced: tuple[Ticket, ...] = ()
        """Those who gave way to it: they are over, and must be told."""

    @property
    def cost(self) -> float:
        """What it is charged, by estimate."""
        return token_cost(self.arrival.prompt_tokens, self.arrival.completion_tokens)


def token_cost(prompt_tokens: float, completion_tokens: float) -> float:
    """What a request is charged in its tenant's virtual token counter."""
    return INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * completion_tokens
