"""Tenants' limits on the request path: what a request is going to take is reserved before it is planned.

The arithmetic is pure and elsewhere (`router.admission`). Here its meters are kept, one for each tenant and each of its
routes with limits, and the shared store is asked for them. A request is decided at once, from what this gateway's
leases hold; one task renews them in the background, everything that is due in one round trip. Only a request that the
leases do not cover, as after a pause or near the limit, waits for that task's next round, and so for the store, half a
second at the very most. When the store does not answer, all meters go on with this gateway's share of the limits,
nobody waits any more, and once a second the task looks whether it is back.

What a request has reserved hangs on its exchange, which settles it on whichever way out.

Without Redis there is nothing to share: each process holds every limit in full by itself.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable

from gateway.exchange import Exchange
from gateway.metrics import Metrics
from router.admission import estimate
from router.admission.limits import (
    Denial,
    Limits,
    Meter,
    Short,
    TenantLimits,
    Use,
    admit,
    rate_limit_headers,
)
from router.errors import ApiError
from router.fleet import FleetView
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

Headers = tuple[tuple[str, str], ...]


class NamedMeter(Meter):
    """A meter, whose it is, and the limits it holds."""

    __slots__ = ("limits", "name", "whose")

    def __init__(self, tenant: str, route: str, limits: Limits, now: float) -> None:
        super().__init__(limits, now)
        self.limits = limits
        self.name = f"{tenant}:{route}" if route else tenant
        self.whose = f"tenant {tenant} on {route}" if route else f"tenant {tenant}"

    def follow(self, limits: Limits, now: float) -> None:
        """Hold `limits` from now on."""
        if self.limits != limits:
            self.change(limits, now)
        self.limits = limits


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
        self._waited_for: dict[NamedMeter, Use] = {}
        """What requests wait for, together."""
        self._needed = asyncio.Event()
        self._answered = asyncio.Event()
        """Set when the next round has been answered, either way."""

    def __len__(self) -> int:
        """How many meters there are."""
        return len(self._meters)

    async def reserve(
        self, exchange: Exchange, limits: TenantLimits, prompt: PromptView, body_bytes: int = 0
    ) -> Headers:
        """Take from `limits` what the request will need on its exchange's route. Of a prompt that was read in part
        only, `body_bytes` tells how long it may be. Returns the headers that tell what is left; raises a 429 ApiError
        that has them, too."""
        now = self._now()
        meters = self._meters_of(limits, exchange.route, now)
        if not meters:
            return ()
        use = _estimate(prompt, body_bytes, meters)
        decided = admit(meters, use, now)
        asks = 0
        while isinstance(decided, Short):
            asks += 1
            await self._ask([meter for meter in decided.meters if isinstance(meter, NamedMeter)], use)
            now = self._now()
            decided = admit(meters, use, now, asked_enough=asks == MOST_ASKS)
        if isinstance(decided, Denial):
            self._metrics.limit_refusals.values[exchange.route, decided.of] += 1
            raise _refusal(decided, use, rate_limit_headers(meters, now))
        exchange.reservation = decided
        if self._store is not None and not self._lost:
            for meter in meters:
                if meter.due(now):
                    self._due[meter] = None
                    self._needed.set()
        return rate_limit_headers(meters, now)

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
                if self._store is not None and (self._due or self._waited_for):
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
            if not meter.open and meter not in self._waited_for:
                del self._meters[whose]
                return

    async def _ask(self, meters: list[NamedMeter], use: Use) -> None:
        """Wait until the store has been asked for what `meters` lack."""
        for meter in meters:
            before = self._waited_for.get(meter)
            self._waited_for[meter] = use if before is None else before + use
        self._needed.set()
        await self._answered.wait()

    async def _round(self, store: LimitStore) -> None:
        """Ask the store for all that requests wait for, and for some of what is due besides."""
        answered, self._answered = self._answered, asyncio.Event()
        try:
            wanted: dict[NamedMeter, Use | None] = {**self._waited_for}
            self._waited_for = {}
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
            answered.set()

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
            elif meter.quiet and meter not in self._waited_for:
                del self._meters[whose]

    def _lose(self, reason: str) -> None:
        """The store is out of reach: nobody waits for it from now on."""
        if not self._lost:
            self._lost = True
            logger.warning("limits: %s Each gateway goes on with its share, one of %d.", reason, self.gateways)
            now = self._now()
            for meter in {*self._meters.values(), *self._waited_for}:
                meter.failed(None, self.gateways, now)
        self._due.clear()
        self._waited_for.clear()
        answered, self._answered = self._answered, asyncio.Event()
        answered.set()


def _estimate(prompt: PromptView, body_bytes: int, meters: tuple[NamedMeter, ...]) -> Use:
    completion = estimate.completion_tokens(prompt)
    if prompt.completion_tokens is None:  # it is a guess of ours: nobody may be refused for that alone
        for meter in meters:
            if (lease := meter.rates.get("completion_tokens")) is not None:
                completion = min(completion, max(int(lease.limit), 1))
    return Use(max(estimate.prompt_tokens(prompt), -(-body_bytes // estimate.BYTES_PER_TOKEN)), completion)


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
