"""What a tenant has bought, and whether one more request is within it: reserved at admission, settled at the end.

A limit is on requests, prompt tokens and completion tokens per minute, and on concurrent streams. A `Meter` is one
gateway's view of the limits of one tenant, as a whole or on one route; a request has to be within all meters that apply
to it, and takes from all of them or from none. How much a request will take is estimated when it is admitted, and put
right when it ends: a `Reservation` is settled with what was used, or released if the request came to nothing, once,
whichever comes first. What was estimated too low is owed and comes off what later requests may take, so averages are
exact whatever the estimate.

`admit` never waits. Where this gateway's leases (`router.admission.leases`) do not cover a request but the shared store
may, it says which meters to ask for more, and is called again with what the store said. A meter has one ask under way
at a time; it may be for several requests that wait for it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from router.admission.leases import MINUTE_S, RateAsk, RateGrant, RateLease, StreamAsk, StreamLease

Kind = Literal["requests", "prompt_tokens", "completion_tokens"]
KINDS: tuple[Kind, ...] = ("requests", "prompt_tokens", "completion_tokens")


class Limits(msgspec.Struct, frozen=True):
    """The limits of one tenant, as a whole or on one route; None is no limit."""

    requests: float | None = None
    """A minute, as are both kinds of tokens."""
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    streams: int | None = None
    """At a time."""


class TenantLimits(msgspec.Struct, frozen=True):
    """All limits of one tenant."""

    tenant: str
    whole: Limits | None
    """Of its requests to all routes together."""
    routes: Mapping[str, Limits]
    """Of those to single routes, by name."""


class Use(msgspec.Struct, frozen=True):
    """What one request, or several, take: by estimate or in truth."""

    prompt_tokens: int
    completion_tokens: int
    requests: int = 1

    def amounts(self) -> tuple[int, int, int]:
        """In the order of `KINDS`."""
        return (self.requests, self.prompt_tokens, self.completion_tokens)

    def __add__(self, other: "Use") -> "Use":
        return Use(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.requests + other.requests,
        )


_NOTHING = Use(0, 0, requests=0)


class Ask(msgspec.Struct, frozen=True):
    """What a meter wants of the store: of each bucket that it limits, in the order of `KINDS`, and of permits."""

    rates: tuple[tuple[Kind, RateAsk], ...]
    streams: StreamAsk | None


class Grant(msgspec.Struct, frozen=True):
    """The store's answer, in the order of the ask."""

    rates: tuple[RateGrant, ...]
    permits: int


class Meter:
    """One gateway's hold on the limits of one tenant, as a whole or on one route."""

    __slots__ = ("leases", "open", "rates", "streams")

    def __init__(self, limits: Limits, now: float) -> None:
        self.open = 0
        """Reservations that have not ended."""
        self.rates: dict[Kind, RateLease] = {}
        self.leases: tuple[tuple[int, RateLease], ...] = ()
        """The same, each with its place in the order of `KINDS`."""
        self.streams: StreamLease | None = None
        self.change(limits, now)

    def change(self, limits: Limits, now: float) -> None:
        """Other limits are in force from now on; what is held and open stays so, as far as it is within them."""
        alone = self.alone
        for kind in KINDS:
            limit: float | None = getattr(limits, kind)
            if limit is None:
                self.rates.pop(kind, None)
            elif (lease := self.rates.get(kind)) is not None:
                lease.limit, lease.held = limit, min(lease.held, limit)
            else:
                lease = self.rates[kind] = RateLease(limit, now)
                if alone:
                    lease.failed(None, alone, now)
        self.leases = tuple([(place, self.rates[kind]) for place, kind in enumerate(KINDS) if kind in self.rates])
        if limits.streams is None:
            self.streams = None
        elif self.streams is not None:
            self.streams.limit = limits.streams
        else:
            self.streams = StreamLease(limits.streams)
            self.streams.open, self.streams.alone = self.open, alone

    def own(self, now: float) -> None:
        """There is no store: the limits are this gateway's alone, and it begins with full buckets."""
        for lease in self.rates.values():
            lease.own(now)
        if self.streams is not None:
            self.streams.failed(1)

    @property
    def alone(self) -> int:
        """Among how many gateways the limits are divided without the store; 0 if it is asked."""
        streams = self.streams.alone if self.streams is not None else 0
        return max((lease.alone for lease in self.rates.values()), default=streams)

    @property
    def quiet(self) -> bool:
        """Nothing is held, owed or open: forgetting it loses nothing."""
        if self.open or any(lease.held or lease.alone for lease in self.rates.values()):
            return False
        return self.streams is None or not (self.streams.permits or self.streams.alone)

    def full(self, now: float) -> bool:
        """As `quiet`, of one that is on its `own`."""
        return not self.open and all(lease.level(now) >= lease.limit for lease in self.rates.values())

    def covers(self, amounts: tuple[int, int, int], now: float) -> bool:
        """Whether it covers a request that takes `amounts`, in the order of `KINDS`."""
        for place, lease in self.leases:
            amount = amounts[place]
            if amount > lease.limit or not (lease.covers(amount, now) if lease.alone else lease.held >= amount):
                return False
        streams = self.streams
        return streams is None or (streams.open < streams.permits and not streams.alone) or streams.covers()

    def low(self) -> bool:
        """Whether it holds so little that `due` is worth asking."""
        for _, lease in self.leases:  # noqa: SIM110 - every request comes by here, and a generator costs more than this
            if lease.held < lease.low:
                return True
        return False

    def due(self, now: float) -> bool:
        """Whether the store should be asked, though no request needs it now."""
        if any(lease.due(now) for lease in self.rates.values()):
            return True
        return self.streams is not None and self.streams.due(now)

    def ask(self, use: Use | None, now: float) -> Ask:
        """What to ask for; `use` is what the requests need that are not covered, if there are any."""
        amounts = dict(zip(KINDS, use.amounts(), strict=True)) if use is not None else {}
        rates = tuple((kind, self.rates[kind].ask(amounts.get(kind, 0), now)) for kind in KINDS if kind in self.rates)
        streams = self.streams.ask(use.requests if use is not None else 0, now) if self.streams is not None else None
        return Ask(rates, streams)

    def granted(self, ask: Ask, grant: Grant, now: float) -> None:
        """The store has answered."""
        for (kind, asked), given in zip(ask.rates, grant.rates, strict=True):
            if kind in self.rates:
                self.rates[kind].granted(asked, given, now)
        if ask.streams is not None and self.streams is not None:
            self.streams.granted(ask.streams, grant.permits, now)

    def failed(self, ask: Ask | None, gateways: int, now: float) -> None:
        """The store did not answer `ask`, or is known not to answer any (None): go on with a share of the limits.

        `gateways` is how many share them, as far as is known.
        """
        asked = dict(ask.rates) if ask is not None else {}
        for kind, lease in self.rates.items():
            lease.failed(asked.get(kind), gateways, now)
        if self.streams is not None:
            self.streams.failed(gateways)


class Denial(msgspec.Struct, frozen=True):
    """A request is over a limit."""

    of: Kind | Literal["streams"]
    limit: float
    retry_after: float
    """Seconds until it would be within it if nobody else came; infinity if the request alone is over it."""
    meter: Meter
    """Whose limit it is."""


class Short(msgspec.Struct, frozen=True):
    """The leases do not cover a request, but the store may: ask it for `meters`, then try again."""

    meters: tuple[Meter, ...]


class Reservation:
    """What one request holds of its meters. `settle` or `release` it; whatever comes second does nothing."""

    __slots__ = ("_amounts", "_meters", "use")

    def __init__(self, meters: Sequence[Meter], use: Use, amounts: tuple[int, int, int], now: float) -> None:
        """`amounts` are those of `use`."""
        self._meters: Sequence[Meter] = meters
        self.use = use
        """What was reserved."""
        self._amounts = amounts
        for meter in meters:
            meter.open += 1
            for place, lease in meter.leases:
                lease.spend(amounts[place], now)
            if meter.streams is not None:
                meter.streams.open += 1

    def release(self) -> None:
        """The request came to nothing: nothing of it counts."""
        self.settle(_NOTHING)

    def settle(self, used: Use) -> None:
        """The request has ended and took this."""
        meters, self._meters = self._meters, ()
        amounts, reserved = (used.requests, used.prompt_tokens, used.completion_tokens), self._amounts
        for meter in meters:
            meter.open -= 1
            for place, lease in meter.leases:
                lease.held += reserved[place] - amounts[place]
            streams = meter.streams
            if streams is not None and streams.open:
                streams.open -= 1


def admit(meters: Sequence[Meter], use: Use, now: float, *, asked_enough: bool = False) -> Reservation | Short | Denial:
    """Reserve `use` of all `meters`, if all cover it. `asked_enough`: the store is not to be asked again."""
    amounts = use.amounts()
    for meter in meters:
        if not meter.covers(amounts, now):
            break
    else:
        return Reservation(meters, use, amounts, now)
    short: list[Meter] = []
    denial: Denial | None = None
    for meter in meters:
        missing = _missing(meter, use, now)
        if missing:
            short.append(meter)
            final = [denied for denied, may_ask in missing if asked_enough or not may_ask]
            denial = max([*final, *([denial] if denial else [])], key=lambda d: d.retry_after, default=None)
    return denial if denial is not None else Short(tuple(short))


def _missing(meter: Meter, use: Use, now: float) -> list[tuple[Denial, bool]]:
    """What `meter` does not cover of `use`, and whether the store may."""
    found: list[tuple[Denial, bool]] = []
    amounts = use.amounts()
    for place, lease in meter.leases:
        kind, amount = KINDS[place], amounts[place]
        if amount > lease.limit or not lease.covers(amount, now):
            may_ask = amount <= lease.limit and not lease.alone and lease.may_ask(now)
            found.append((Denial(kind, lease.limit, lease.wait(amount, now), meter), may_ask))
    streams = meter.streams
    if streams is not None and not streams.covers():
        wait = 1.0 if streams.limit else math.inf
        found.append((Denial("streams", streams.limit, wait, meter), not streams.alone and streams.may_ask(now)))
    return found


def rate_limit_headers(meters: Sequence[Meter], now: float) -> tuple[tuple[str, str], ...]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` as OpenAI's API has them.

    Of the limits that apply, they show the one of which least is left. `reset` is when it would be whole again.
    """
    requests = tokens = _NONE
    for meter in meters:
        for place, lease in meter.leases:
            level = lease.level(now)
            part = level / lease.limit if lease.limit else 0.0
            if not place:
                if part < requests[0]:
                    requests = (part, level, lease.limit)
            elif part < tokens[0]:
                tokens = (part, level, lease.limit)
    if requests is _NONE:
        return _told("tokens", tokens) if tokens is not _NONE else ()
    return _told("requests", requests) + _told("tokens", tokens) if tokens is not _NONE else _told("requests", requests)


_NONE = (math.inf, 0.0, 0.0)


def _told(name: str, tightest: tuple[float, float, float]) -> tuple[tuple[str, str], ...]:
    """The headers for what `name` counts: of the limit, what part of it is left, how much that is, and the whole."""
    _, level, limit = tightest
    left = min(max(level, 0.0), limit)
    reset = (limit - left) / limit * MINUTE_S if limit else 0.0
    return (
        (f"x-ratelimit-limit-{name}", str(int(limit))),
        (f"x-ratelimit-remaining-{name}", str(int(left))),
        (f"x-ratelimit-reset-{name}", _duration(reset)),
    )


def _duration(seconds: float) -> str:
    """As `6m0s`, `12s` or `20ms`."""
    if seconds < 1:
        return f"{math.ceil(round(seconds * 1000, 3))}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
