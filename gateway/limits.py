"""Tenants' limits on the request path: what a request is going to take is reserved before it is planned.

The arithmetic is pure and elsewhere (`router.admission`). Here its meters are kept, one for each tenant and each of its
routes with limits, and the shared store is asked for them. A request is decided at once, from what this gateway's
leases hold; one task renews them in the background, everything that is due in one round trip. Only a request that the
leases do not cover, as after a pause or near the limit, waits for that task's next round, and so for the store, half a
second at the very most. What the store gave is handed to those who wait before anybody else may take it. When the store
does not answer, all meters go on with this gateway's share of the limits, nobody waits any more, and once a second the
task looks whether it is back.

What a request has reserved hangs on its exchange, which settles it on whichever way out.

Without Redis there is nothing to share: each process holds every limit in full by itself.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable, Sequence

from gateway.exchange import Exchange
from gateway.metrics import Metrics
from router.admission import estimate
from router.admission.limits import (
    Denial,
    Limits,
    Meter,
    Reservation,
    Short,
    TenantLimits,
    Use,
    admit,
    rate_limit_headers,
)
from router.errors import ApiError
from router.fleet import FleetView, Route
from router.prompt import PromptView
from router.state.limits import LimitStore
from router.state.store import REDIS_FAILURES

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
"""How often leases are looked over that no request has touched."""
MAX_METERS = 16_384
"""Beyond these the meter is dropped that was made first, if it is not in use; what it held is lost to its tenant."""
MOST_ASKS = 3
"""How often the store is asked for one request: others may be quicker to take what it gave."""
BATCH = 256
"""Meters asked for in one round trip that no request waits for."""
RETRY_JITTER = 0.5
"""Clients that are refused together are told to come back within this part of the wait after it."""

_WHAT = {
    "requests": "requests a minute",
    "prompt_tokens": "prompt tokens a minute",
    "completion_tokens": "completion tokens a minute",
    "streams": "requests at a time",
}

SHOWN_S = 0.05
SHOWN_PART = 1e-3
"""What `x-ratelimit-*` say is worked out anew after so long, or when a lease holds so much more or less, as a part of
its limit: for who has many requests a second, most answers say the same as the one before."""

Headers = tuple[tuple[str, str], ...]


class _Shown:
    """The `x-ratelimit-*` of some meters, and as long as what they hold they are true."""

    __slots__ = ("_first", "_held", "_until", "headers")

    def __init__(self, meters: Sequence[Meter], now: float) -> None:
        self.headers = rate_limit_headers(meters, now)
        self._first = meters[0]
        self._until = now + SHOWN_S
        leases = [lease for meter in meters for _, lease in meter.leases]
        self._held = [(lease, lease.held, lease.limit * SHOWN_PART) for lease in leases]

    def still(self, first: Meter, now: float) -> bool:
        """Whether it is so now; `first`: of the meters."""
        if now >= self._until or first is not self._first:
            return False
        for lease, held, much in self._held:  # noqa: SIM110 - a generator costs more than this
            if not -much < lease.held - held < much:
                return False
        return True


class NamedMeter(Meter):
    """A meter, whose it is, and the limits it holds."""

    __slots__ = ("limits", "name", "shown", "whose")

    def __init__(self, tenant: str, route: str, limits: Limits, now: float) -> None:
        super().__init__(limits, now)
        self.limits = limits
        self.shown: _Shown | None = None
        """What was last told of it and of those before it, for a request of which it is the last meter."""
        self.name = f"{tenant}:{route}" if route else tenant
        self.whose = f"tenant {tenant} on {route}" if route else f"tenant {tenant}"

    def follow(self, limits: Limits, now: float) -> None:
        """Hold `limits` from now on."""
        if self.limits != limits:
            self.change(limits, now)
            self.shown = None
        self.limits = limits


class _Waiting:
    """A request that the leases do not cover."""

    __slots__ = ("asks", "decided", "meters", "short", "use")

    def __init__(self, meters: Sequence[NamedMeter], use: Use, short: Short) -> None:
        self.meters = meters
        self.use = use
        self.short = short.meters
        self.asks = 1
        """How often the store has been asked for it when it has answered."""
        self.decided: asyncio.Future[Reservation | Denial] = asyncio.get_running_loop().create_future()

    def settled(self, now: float) -> bool:
        """Decide it by what the leases hold now; False if the store is to be asked again."""
        if self.decided.done():  # its client has left
            return True
        decided = admit(self.meters, self.use, now, asked_enough=self.asks == MOST_ASKS)
        if isinstance(decided, Short):
            self.short = decided.meters
            self.asks += 1
            return False
        self.decided.set_result(decided)
        return True

    def leave(self) -> None:
        """Give back what it got in the moment in which its client left, if it did. To be called after the await."""
        if not self.decided.cancelled() and isinstance(got := self.decided.result(), Reservation):
            got.release()


class Limiter:
    """The meters of one gateway process. `run` it as a task before the first request."""

    def __init__(
        self,
        store: LimitStore | None,
        metrics: Metrics,
        view: Callable[[], FleetView],
        now: Callable[[], float],
    ) -> None:
        """`view` gives the fleet as it is: without limits in it the store is left alone. `now` is the time, in seconds
        on any clock that does not go back."""
        self._store = store
        self._metrics = metrics
        self._view = view
        self._seen: FleetView | None = None
        self._limited = False
        self._now = now
        self._meters: dict[tuple[str, str], NamedMeter] = {}
        self._lost = False
        self.gateways = 1
        """How many hold limits together, as was last known."""
        self._due: dict[NamedMeter, None] = {}
        self._waiting: list[_Waiting] = []
        """Those the next round asks for, in order of arrival."""
        self._needed = asyncio.Event()

    def __len__(self) -> int:
        """How many meters there are."""
        return len(self._meters)

    async def reserve(
        self, exchange: Exchange, limits: TenantLimits, prompt: PromptView, route: Route, body_bytes: int = 0
    ) -> Headers:
        """Take from `limits` what the request will need on `route`. Of a prompt that was read in part only,
        `body_bytes` tells how long it may be. Returns the headers that tell what is left; raises a 429 ApiError
        that has them, too."""
        now = self._now()
        meters = self._meters_of(limits, route.name, now)
        if not meters:
            return ()
        use = _estimate(prompt, route.bytes_per_token, body_bytes, meters)
        decided = admit(meters, use, now)
        if isinstance(decided, Short):
            waiting = _Waiting(meters, use, decided)
            self._waiting.append(waiting)
            self._needed.set()
            try:
                decided = await waiting.decided
            except asyncio.CancelledError:
                waiting.leave()
                raise
            now = self._now()
        if isinstance(decided, Denial):
            self._metrics.limit_refusals.values[route.name, decided.of] += 1
            raise _refusal(decided, use, rate_limit_headers(meters, now))
        exchange.reservation = decided
        if self._store is not None and not self._lost:
            for meter in meters:
                if meter.low() and meter.due(now):
                    self._due[meter] = None
                    self._needed.set()
        last = meters[-1]
        if last.shown is None or not last.shown.still(meters[0], now):
            last.shown = _Shown(meters, now)
        return last.shown.headers

    async def run(self) -> None:
        """Keep the leases, until cancelled."""
        loop = asyncio.get_running_loop()
        sweep_at = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(sweep_at):
                    await self._needed.wait()
            self._needed.clear()
            try:
                if loop.time() >= sweep_at:
                    sweep_at = loop.time() + SWEEP_S * random.uniform(0.75, 1.25)
                    await self._sweep()
                if self._store is not None and (self._due or self._waiting):
                    await self._round(self._store)
            except Exception:  # whatever it is, requests must not wait for ever
                logger.exception("limits: asking for leases failed")
                self._lose("Limits cannot be shared; the log has the reason.")

    async def close(self) -> None:
        """Let go of the store; nothing is to be under way any more. Permits for streams are given back: other gateways
        would have to do without them until they expire."""
        if self._store is None:
            return
        holding = [meter for meter in self._meters.values() if meter.streams is not None and meter.streams.permits]
        if holding and not self._lost:
            now = self._now()
            with contextlib.suppress(*REDIS_FAILURES):
                await self._store.grant([(meter.name, meter.ask(None, now)) for meter in holding])
        await self._store.close()

    def _meters_of(self, limits: TenantLimits, route: str, now: float) -> tuple[NamedMeter, ...]:
        """Those that hold for a request to `route`."""
        whole, on_route = limits.whole, limits.routes.get(route)
        if whole is None:
            return (self._meter(limits.tenant, route, on_route, now),) if on_route is not None else ()
        if on_route is None:
            return (self._meter(limits.tenant, "", whole, now),)
        return self._meter(limits.tenant, "", whole, now), self._meter(limits.tenant, route, on_route, now)

    def _meter(self, tenant: str, route: str, limits: Limits, now: float) -> NamedMeter:
        meter = self._meters.get((tenant, route))
        if meter is None:
            if len(self._meters) >= MAX_METERS:
                self._make_room()
            meter = self._meters[tenant, route] = NamedMeter(tenant, route, limits, now)
            if self._store is None:
                meter.own(now)
            elif self._lost:
                meter.failed(None, self.gateways, now)
        elif meter.limits is not limits:
            meter.follow(limits, now)
        return meter

    def _make_room(self) -> None:
        for whose, meter in self._meters.items():
            if not meter.open and not self._is_waited_for(meter):
                del self._meters[whose]
                return

    def _is_waited_for(self, meter: NamedMeter) -> bool:
        return any(meter in waiting.short for waiting in self._waiting)

    async def _round(self, store: LimitStore) -> None:
        """Ask the store for all that requests wait for, and for some of what is due besides."""
        waiting, self._waiting = self._waiting, []
        try:
            wanted = _together(waiting)
            while self._due and len(wanted) < BATCH:
                wanted.setdefault(self._due.popitem()[0], None)
            if self._due:
                self._needed.set()
            now = self._now()
            asks = [(meter, meter.ask(use, now)) for meter, use in wanted.items()]
            lost: str | None = None
            try:
                grants = await store.grant([(meter.name, ask) for meter, ask in asks])
            except REDIS_FAILURES as error:
                lost, grants = store.describe(error), [None] * len(asks)
            now = self._now()
            for (meter, ask), grant in zip(asks, grants, strict=True):
                if grant is not None:
                    meter.granted(ask, grant, now)
                else:
                    meter.failed(ask, self.gateways, now)
            failed = grants.count(None)
            self._metrics.lease_asks.values["failed",] += failed
            self._metrics.lease_asks.values["granted",] += len(asks) - failed
            if lost is not None:
                self._lose(lost)
        finally:
            self._decide(waiting)

    def _decide(self, waiting: list[_Waiting]) -> None:
        """Go on with those for whom the store has been asked, before anybody else can take what it gave."""
        now = self._now()
        again = [one for one in waiting if not one.settled(now)]
        if again:
            self._waiting = again + self._waiting
            self._needed.set()

    async def _sweep(self) -> None:
        """Say that this gateway is there, drop meters that say nothing, and see which are due."""
        view = self._view()
        if view is not self._seen:
            limited = any(tenant.limits is not None for tenant in view.tenants.values())
            if limited and not self._limited and self._store is None:
                logger.info("Tenants' limits hold for this process alone: sharing them among several needs `redis`.")
            self._seen, self._limited = view, limited
        store = self._store
        if store is None:
            now = self._now()
            self._meters = {whose: meter for whose, meter in self._meters.items() if not meter.full(now)}
            return
        if not self._limited and not self._meters:
            return
        try:
            self.gateways = await store.present()
        except REDIS_FAILURES as error:
            self._metrics.lease_asks.values["failed",] += 1
            self._lose(store.describe(error))
            return
        if self._lost:
            self._lost = False
            logger.warning("limits: Redis at %s is back", store.address)
        now = self._now()
        for whose, meter in tuple(self._meters.items()):
            if meter.alone or meter.due(now):
                self._due[meter] = None
            elif meter.quiet and not self._is_waited_for(meter):
                del self._meters[whose]

    def _lose(self, reason: str) -> None:
        """The store is out of reach: nobody waits for it from now on."""
        if not self._lost:
            self._lost = True
            logger.warning("limits: %s Each gateway goes on with its share, one of %d.", reason, self.gateways)
            now = self._now()
            for meter in {*self._meters.values(), *_together(self._waiting)}:
                meter.failed(None, self.gateways, now)
        self._due.clear()
        waiting, self._waiting = self._waiting, []
        self._decide(waiting)


def _together(waiting: Sequence[_Waiting]) -> dict[NamedMeter, Use | None]:
    """What requests wait for, of each meter."""
    wanted: dict[NamedMeter, Use | None] = {}
    for one in waiting:
        for meter in one.short:
            assert isinstance(meter, NamedMeter)
            before = wanted.get(meter)
            wanted[meter] = one.use if before is None else before + one.use
    return wanted


def _estimate(prompt: PromptView, bytes_per_token: float, body_bytes: int, meters: tuple[NamedMeter, ...]) -> Use:
    completion = estimate.completion_tokens(prompt)
    if prompt.completion_tokens is None:  # it is a guess of ours: nobody may be refused for that alone
        for meter in meters:
            if (lease := meter.rates.get("completion_tokens")) is not None:
                completion = min(completion, max(int(lease.limit), 1))
    prompt_tokens = estimate.prompt_tokens(prompt, bytes_per_token)
    if body_bytes:
        prompt_tokens = max(prompt_tokens, estimate.tokens_in(body_bytes, bytes_per_token))
    return Use(prompt_tokens, completion)


def _refusal(denial: Denial, use: Use, headers: Headers) -> ApiError:
    assert isinstance(denial.meter, NamedMeter)
    limit = f"{denial.meter.whose} may have {denial.limit:g} {_WHAT[denial.of]}"
    retry_after: int | None = None
    if math.isinf(denial.retry_after):
        amount = {"prompt_tokens": use.prompt_tokens, "completion_tokens": use.completion_tokens}.get(denial.of, 1)
        message = f"This request is too large: {limit}, and it alone could take {amount}."
    else:
        retry_after = max(1, math.ceil(denial.retry_after * (1 + RETRY_JITTER * random.random())))
        message = f"The limit is reached: {limit}. Try again in {retry_after} s."
    return ApiError(
        429,
        message,
        "rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=retry_after,
        headers=headers,
    )
