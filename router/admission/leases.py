"""How gateways share one limit: each holds a lease, a small part of it, and decides alone while that lasts.

A rate is a token bucket in the shared store: it holds a minute's worth at most and fills at the limit. That is what the
`x-ratelimit-*` headers of the OpenAI API describe: `remaining` comes back continuously and `reset` is when it is full
again. It takes a level and a time whatever the traffic, can be corrected when a request turns out to be shorter or
longer than reserved, and can be in debt. (A sliding window would have to remember when each reservation was made to
take it back. The price: after a quiet minute, a minute's worth may come at once.)

A gateway takes units out of the bucket ahead of need and spends what it holds; only what was taken is ever spent, so
together the gateways never spend more than the bucket gave. What is in doubt is always given up: units whose way back
failed are not spent again. What a lease costs is that its units are out of the others' reach, so it is small (what the
limit yields in `LEASE_S`, less if demand is lower; more only for one request that needs more) and what is not used is
given back after as long. It is renewed before it runs out, so that only the first request after a pause, and requests
at the limit itself, wait for the store.

When the store is out of reach, a gateway fills its lease itself at its share of the limit, limit ÷ known gateways, up
to a minute's worth of the share. All gateways together then fill at the limit, so they overshoot by what they held when
it went and no more: one lease each. What they have filled themselves is settled when the store is back.

Concurrent streams are counted, not spent: a gateway holds permits for those it has open and a few more. They expire in
the store if they are not renewed, so a dead gateway's streams are not counted for ever.
"""

import math

import msgspec

MINUTE_S = 60.0
LEASE_S = 1.0
"""Seconds for which a lease is meant to last, and after which what is left of it goes back."""
RENEW_AHEAD_S = 0.25
"""A lease is renewed when it would last no longer than this."""
ASK_PAUSE_S = 0.1
"""Least time between two asks for a bucket that was empty."""
PERMITS_EXPIRE_S = 10.0
"""After this time the store no longer counts the streams of a gateway that has not renewed their permits."""
PERMITS_RENEW_S = 3.0
SPARE_PERMITS = 1 / 32
"""Permits that are held for streams to come, as a part of the limit; one at least."""


class RateAsk(msgspec.Struct, frozen=True):
    """What a gateway wants of one bucket."""

    limit: float
    """Units a minute."""
    want: int
    """Units to take, if they are there. Whole ones only, as requests and tokens are."""
    believed: float
    """The level of the bucket if the store has lost it."""
    owed: float = 0.0
    """Units to take first and in any case, because they were spent beyond the lease."""
    filled: float = 0.0
    """Likewise, because this gateway gave them to itself while it was alone."""
    back: float = 0.0
    """Units that go back."""

    @property
    def settle(self) -> float:
        """What the bucket loses before anything is taken of it."""
        return self.owed + self.filled - self.back


class RateGrant(msgspec.Struct, frozen=True):
    """What the store gave, and the level it left."""

    units: int
    level: float


class RateLease:
    """A gateway's hold on one bucket."""

    __slots__ = (
        "_asked_at", "_demand", "_demand_at", "_filled", "_filled_at", "_level", "_level_at", "_newest",
        "_paused_until", "_spent", "_spent_at", "alone", "held", "limit", "low",
    )  # fmt: skip

    def __init__(self, limit: float, now: float) -> None:
        """`limit` is in units a minute."""
        self.limit = limit
        self.held = 0.0
        """Units that may be spent; below 0, units that have been spent and still have to be taken."""
        self.alone = 0
        """Among how many gateways the limit is divided while the store is out of reach; 0 if it is not."""
        self.low = 0.0
        """Below so much, `due` is worth asking between two sweeps."""
        self._demand = 0.0
        """Units a second, as an average over `LEASE_S`, but for what has been spent since it was last looked at."""
        self._demand_at = now
        self._spent = 0.0
        self._spent_at = now
        self._newest = 0.0
        """What the newest request took."""
        self._level = limit
        """Of the bucket, as it was last told."""
        self._level_at = now
        self._asked_at = now
        self._paused_until = -math.inf
        self._filled = 0.0
        """Units this gateway has given itself since the store went."""
        self._filled_at = now

    @property
    def most(self) -> float:
        """How much a lease holds at most, but for a single request that needs more."""
        return max(self.limit * LEASE_S / MINUTE_S, 1.0)

    def covers(self, need: float, now: float) -> bool:
        """Whether `need` units may be spent now."""
        if self.alone:
            self._fill(now)
            # What is more than the share could ever hold is let through at a full share, and paid back.
            return self.held >= min(need, self._share)
        return self.held >= need

    def spend(self, need: float, now: float) -> None:
        self.held -= need
        self._spent += need
        self._spent_at = now
        self._newest = need

    def level(self, now: float) -> float:
        """What can be spent now, here and in the bucket, as far as is known."""
        if self.alone:
            self._fill(now)
            return self.held
        limit = self.limit
        bucket = self._level + (now - self._level_at) * limit / MINUTE_S
        return self.held + min(limit, bucket)

    def wait(self, need: float, now: float) -> float:
        """Seconds until `need` units are there if nobody else takes any; infinity if they never are."""
        if need > self.limit:
            return math.inf
        rate = self.limit / MINUTE_S
        if self.alone:
            return max(0.0, min(need, self._share) - self.level(now)) / (rate / self.alone)
        return max(0.0, need - self.level(now)) / rate

    def may_ask(self, now: float) -> bool:
        """Whether it is worth asking the store for what is missing."""
        return now >= self._paused_until

    def due(self, now: float) -> bool:
        """Whether the lease should be renewed, what is left of it given back, or what is owed paid."""
        since = now - self._asked_at
        if self.alone or since < ASK_PAUSE_S:
            return False
        held, most = self.held, self.limit / MINUTE_S
        if held >= most * RENEW_AHEAD_S and since < LEASE_S:
            return False
        ahead = self._ahead(now)
        return held < min(ahead / LEASE_S, most) * RENEW_AHEAD_S or (since >= LEASE_S and (held < 0 or held > ahead))

    def ask(self, need: float, now: float) -> RateAsk:
        """What to ask for so that `need` units are covered, if any. What goes back is no longer held from now on."""
        self._asked_at = now
        ahead = self._ahead(now)
        target = max(need, ahead)
        self.low = ahead * RENEW_AHEAD_S / LEASE_S
        # While it is unsure whether anybody is there, nothing is sent back: it would be lost with every failure.
        back = 0.0 if self.alone else max(0.0, self.held - target)
        owed = max(0.0, -self.held)
        self.held += owed - back
        # After a minute alone the shared bucket is as full as it can be, and so was ours: no more than that is missing.
        filled, self._filled = min(self._filled, self._share), 0.0
        return RateAsk(self.limit, max(0, math.ceil(target - self.held)), self._bucket(now), owed, filled, back)

    def granted(self, ask: RateAsk, grant: RateGrant, now: float) -> None:
        """The store has answered."""
        self.held += grant.units
        self._level, self._level_at = grant.level, now
        self.alone = 0
        if grant.units < ask.want:
            self._paused_until = now + ASK_PAUSE_S

    def failed(self, ask: RateAsk | None, gateways: int, now: float) -> None:
        """The store did not answer `ask`, or is known not to (None): go on with the share of one of `gateways`.

        What was to go back is lost, what is owed still is. A limit that was not in use before begins with a lease.
        """
        if ask is not None:
            self.held -= ask.owed
            self._filled += ask.filled
        if self.alone:
            self._fill(now)
        else:
            self._filled_at = now
        self.alone = max(gateways, 1)
        if ask is None:
            self._give(max(0.0, min(self.most, self._share) - self.held))

    def own(self, now: float) -> None:
        """There is no store: the whole limit is this gateway's, and it begins with a full bucket."""
        self.alone, self.held, self._filled_at = 1, self.limit, now

    @property
    def _share(self) -> float:
        return self.limit / max(self.alone, 1)

    def _fill(self, now: float) -> None:
        elapsed = now - self._filled_at
        if elapsed <= 0:
            return  # as nearly always: a request looks several times at one moment
        self._filled_at = now
        share = self._share
        units = min(elapsed * share / MINUTE_S, share - self.held)
        if units > 0:
            self._give(units)

    def _give(self, units: float) -> None:
        self.held += units
        self._filled += units

    def _bucket(self, now: float) -> float:
        return min(self.limit, self._level + max(0.0, now - self._level_at) * self.limit / MINUTE_S)

    def _demanded(self, now: float) -> float:
        """Units a second; what has been spent since the last look counts as if all of it had been by the last one."""
        if self._spent:
            at = self._spent_at
            self._demand = self._demand * math.exp(-max(0.0, at - self._demand_at) / LEASE_S) + self._spent / LEASE_S
            self._demand_at, self._spent = at, 0.0
        return self._demand * math.exp(-max(0.0, now - self._demand_at) / LEASE_S)

    def _ahead(self, now: float) -> int:
        """Units to hold ahead of need: what is spent in `LEASE_S`, if that is several requests; else each asks for
        itself, which costs no more and keeps nothing from the other gateways."""
        demanded = self._demanded(now)
        return math.floor(min(demanded * LEASE_S, self.most)) if demanded * RENEW_AHEAD_S >= self._newest else 0


class StreamAsk(msgspec.Struct, frozen=True):
    """How many permits a gateway wants."""

    limit: int
    keep: int
    """Permits it holds and does not give up."""
    want: int
    """In all."""


class StreamLease:
    """A gateway's permits for concurrent streams."""

    __slots__ = ("_asked_at", "_paused_until", "alone", "limit", "open", "permits")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        self.permits = 0
        self.alone = 0
        """As in `RateLease`."""
        self._asked_at = -math.inf
        self._paused_until = -math.inf

    def covers(self) -> bool:
        """Whether one more stream may be opened. Alone, a gateway has its share of the limit, but one at least."""
        most = max(self.limit // self.alone, min(self.limit, 1)) if self.alone else self.permits
        return self.open < most

    def may_ask(self, now: float) -> bool:
        """As `RateLease.may_ask`."""
        return self.open < self.limit and now >= self._paused_until

    def due(self, now: float) -> bool:
        """Whether the permits should be renewed, or some given back."""
        since = now - self._asked_at
        if self.alone or since < LEASE_S:
            return False
        return (self.permits > 0 and since >= PERMITS_RENEW_S) or self.permits > self._target(0) + self._spare

    def ask(self, need: int, now: float) -> StreamAsk:
        """What to ask for so that `need` more streams are covered. Permits that are given up are so from now on."""
        self._asked_at = now
        want = self._target(need)
        self.permits = min(self.permits, want)
        return StreamAsk(self.limit, max(self.open, self.permits), want)

    def granted(self, ask: StreamAsk, permits: int, now: float) -> None:
        """The store has answered."""
        self.permits = permits
        self.alone = 0
        if permits < ask.want:
            self._paused_until = now + ASK_PAUSE_S

    def failed(self, gateways: int) -> None:
        """The store did not answer, or is known not to."""
        self.alone = max(gateways, 1)

    @property
    def _spare(self) -> int:
        return max(1, int(self.limit * SPARE_PERMITS))

    def _target(self, need: int) -> int:
        in_use = self.open + need
        return max(self.open, min(in_use + self._spare, self.limit)) if in_use else 0
