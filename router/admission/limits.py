"""What a tenant has bought, and whether one more request is within it: reserved at admission, settled at the end.

A limit is on requests, prompt tokens and completion tokens per minute, and on concurrent streams. A `Meter` is one
gateway's view of the limits of one tenant, as a whole or on one route; a request has to be within all meters that apply
to it, and takes from all of them or from none. How much a request will take is estimated when it is admitted, and put
right when it ends: a `Reservation` is settled with what was used, or released if the request came to nothing, once,
whichever comes first. What was estimated too low is owed and comes off what later requests may take, so averages are
exact whatever the estimate.

`admit` never waits. Where this gateway's leases (`router.admission.leases`) do not cover a request but the shared store
may, it says which meters to ask for more, and is called again with what the store said. A meter has one ask under way
at a time.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from router.admission.leases import RateAsk, RateGrant, RateLease, StreamAsk, StreamLease

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


class Use(msgspec.Struct, frozen=True):
    """What one request takes, by estimate or in truth."""

    prompt_tokens: int
    completion_tokens: int

    def amounts(self) -> tuple[int, int, int]:
        """In the order of `KINDS`."""
        return (1, self.prompt_tokens, self.completion_tokens)


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

    __slots__ = ("rates", "streams")

    def __init__(self, limits: Limits, now: float) -> None:
        self.rates: dict[Kind, RateLease] = {}
        self.streams: StreamLease | None = None
        self.change(limits, now)

    def change(self, limits: Limits, now: float) -> None:
        """Other limits are in force from now on; what is held and open stays so."""
        for kind in KINDS:
            limit: float | None = getattr(limits, kind)
            if limit is None:
                self.rates.pop(kind, None)
            elif kind in self.rates:
                self.rates[kind].limit = limit
            else:
                self.rates[kind] = RateLease(limit, now)
        if limits.streams is None:
            self.streams = None
        elif self.streams is not None:
            self.streams.limit = limits.streams
        else:
            self.streams = StreamLease(limits.streams)

    @property
    def quiet(self) -> bool:
        """Nothing is held, owed or open: forgetting it loses nothing."""
        if any(lease.held or lease.alone for lease in self.rates.values()):
            return False
        return self.streams is None or not (self.streams.open or self.streams.permits)

    def due(self, now: float) -> bool:
        """Whether the store should be asked, though no request needs it now."""
        if any(lease.due(now) for lease in self.rates.values()):
            return True
        return self.streams is not None and self.streams.due(now)

    def ask(self, use: Use | None, now: float) -> Ask:
        """What to ask for; `use` is the request that is not covered, if there is one."""
        amounts = dict(zip(KINDS, use.amounts(), strict=True)) if use is not None else {}
        rates = tuple((kind, self.rates[kind].ask(amounts.get(kind, 0), now)) for kind in KINDS if kind in self.rates)
        return Ask(rates, self.streams.ask(int(use is not None), now) if self.streams is not None else None)

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


class Short(msgspec.Struct, frozen=True):
    """The leases do not cover a request, but the store may: ask it for `meters`, then try again."""

    meters: tuple[Meter, ...]


class Reservation:
    """What one request holds of its meters. `settle` or `release` it; whatever comes second does nothing."""

    __slots__ = ("_meters", "_use")

    def __init__(self, meters: Sequence[Meter], use: Use, now: float) -> None:
        self._meters: Sequence[Meter] = meters
        self._use = use
        for meter in meters:
            for kind, amount in zip(KINDS, use.amounts(), strict=True):
                if kind in meter.rates:
                    meter.rates[kind].spend(amount, now)
            if meter.streams is not None:
                meter.streams.open += 1

    def settle(self, used: Use) -> None:
        """The request has ended and took this."""
        self._end((1, used.prompt_tokens, used.completion_tokens))

    def release(self) -> None:
        """The request came to nothing: nothing of it counts."""
        self._end((0, 0, 0))

    def _end(self, used: tuple[int, int, int]) -> None:
        meters, self._meters = self._meters, ()
        for meter in meters:
            for kind, actual, reserved in zip(KINDS, used, self._use.amounts(), strict=True):
                if kind in meter.rates:
                    meter.rates[kind].correct(actual - reserved)
            if meter.streams is not None:
                meter.streams.open = max(0, meter.streams.open - 1)


def admit(meters: Sequence[Meter], use: Use, now: float) -> Reservation | Short | Denial:
    """Reserve `use` of all `meters`, if all cover it."""
    short: list[Meter] = []
    denial: Denial | None = None
    for meter in meters:
        missing = _missing(meter, use, now)
        if missing:
            short.append(meter)
            final = [denied for denied, may_ask in missing if not may_ask]
            denial = max([*final, *([denial] if denial else [])], key=lambda d: d.retry_after, default=None)
    if denial is not None:
        return denial
    return Short(tuple(short)) if short else Reservation(meters, use, now)


def _missing(meter: Meter, use: Use, now: float) -> list[tuple[Denial, bool]]:
    """What `meter` does not cover of `use`, and whether the store may."""
    found: list[tuple[Denial, bool]] = []
    for kind, amount in zip(KINDS, use.amounts(), strict=True):
        lease = meter.rates.get(kind)
        if lease is not None and (amount > lease.limit or not lease.covers(amount, now)):
            may_ask = amount <= lease.limit and not lease.alone and lease.may_ask(now)
            found.append((Denial(kind, lease.limit, lease.wait(amount, now)), may_ask))
    streams = meter.streams
    if streams is not None and not streams.covers():
        found.append((Denial("streams", streams.limit, 1.0), not streams.alone and streams.may_ask(now)))
    return found


def rate_limit_headers(meters: Sequence[Meter], now: float) -> tuple[tuple[str, str], ...]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` as OpenAI's API has them.

    Of the limits that apply, they show the one of which least is left. `reset` is when it would be whole again.
    """
    found: list[tuple[str, str]] = []
    for name, kinds in (("requests", KINDS[:1]), ("tokens", KINDS[1:])):
        leases = [meter.rates[kind] for meter in meters for kind in kinds if kind in meter.rates]
        if leases:
            tightest = min(leases, key=lambda lease: lease.level(now) / max(lease.limit, 1.0))
            left = min(max(tightest.level(now), 0.0), tightest.limit)
            reset = (tightest.limit - left) / max(tightest.limit, 1e-9) * 60.0
            found += [
                (f"x-ratelimit-limit-{name}", f"{tightest.limit:.0f}"),
                (f"x-ratelimit-remaining-{name}", f"{math.floor(left)}"),
                (f"x-ratelimit-reset-{name}", _duration(reset)),
            ]
    return tuple(found)


def _duration(seconds: float) -> str:
    """As `6m0s`, `12s` or `20ms`."""
    if seconds < 1:
        return f"{math.ceil(round(seconds * 1000, 3))}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
