"""One leader among the replicas of discovery, by a Lease (coordination.k8s.io/v1), as Kubernetes' own components do it.

A replica that sees the lease unchanged for as long as it lasts takes it, by a write that the API server refuses if
anybody wrote in between. No two clocks are ever compared: what counts is how long *this* replica has seen no change.
The leader stops believing in itself well before others may take over, counted from before it sent the renewal that
succeeded; so even one that was frozen leads no longer when it wakes up.

When the API server is away nobody leads after `RENEW_DEADLINE_S`, and nothing is published: nothing can be known then
that is not published already.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from msgspec import Raw, Struct, field

from k8s.api import Api, ApiError

DURATION_S = 15.0
"""How long a lease lasts that is not renewed."""
RENEW_DEADLINE_S = 10.0
RETRY_S = 2.0

_NOT_FOUND, _CONFLICT = 404, 409

logger = logging.getLogger(__name__)


class LeaseSpec(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Who holds it. Times are for people; they are not compared."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Struct, frozen=True):
    """A lease as the API server has it."""

    metadata: Raw
    """Written back as it came: its resourceVersion is what makes a write conditional."""
    spec: LeaseSpec = field(default_factory=LeaseSpec)


class Candidate:
    """The rules, without I/O: what one replica makes of the lease that it sees. Times are seconds of its own clock."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._seen: LeaseSpec | None = None
        self._seen_at = 0.0
        self._renewed_at: float | None = None

    def leads(self, now: float) -> bool:
        """Whether it may act as the leader."""
        return self._renewed_at is not None and now < self._renewed_at + RENEW_DEADLINE_S

    def claim(self, lease: LeaseSpec | None, now: float, time_text: str) -> LeaseSpec | None:
        """What to write in the place of `lease`, None to leave it to its holder. Without a lease, the first one."""
        if lease is None:
            lease = LeaseSpec()
        if lease != self._seen:
            self._seen, self._seen_at = lease, now
        mine = lease.holder_identity == self.identity
        if not mine:
            self._renewed_at = None
            if lease.holder_identity and now < self._seen_at + (lease.lease_duration_seconds or DURATION_S):
                return None
        return LeaseSpec(
            holder_identity=self.identity,
            lease_duration_seconds=int(DURATION_S),
            acquire_time=lease.acquire_time if mine else time_text,
            renew_time=time_text,
            lease_transitions=(lease.lease_transitions or 0) + (not mine),
        )

    def claimed(self, asked_at: float) -> None:
        """The API server has written its claim, which it asked for at `asked_at`."""
        self._renewed_at = asked_at

    def resign(self) -> None:
        """It leads no longer."""
        self._renewed_at = None


class Election:
    """Takes part in the election for the lease `name` while `run` runs; `changed` is called when it won or lost."""

    def __init__(self, api: Api, namespace: str, name: str, identity: str, changed: Callable[[], None]) -> None:
        self._api = api
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._candidate = Candidate(identity)
        self._changed = changed
        self.error: str | None = None
        """Why it could not take part the last time it tried."""

    @property
    def leads(self) -> bool:
        """Whether this replica is the one that publishes, right now."""
        return self._candidate.leads(time.monotonic())

    async def run(self) -> None:
        """Takes part until it is cancelled."""
        led = False
        while True:
            asked_at = time.monotonic()
            try:
                await self._take_part(asked_at)
                self.error = None
            except ApiError as error:
                if error.status == _CONFLICT:
                    self.error = None  # another was faster
                else:
                    if self.error is None:
                        logger.warning("lease %s: %s", self._name, error)
                    self.error = str(error)
            except Exception:
                logger.exception("lease %s: an unexpected failure; trying again", self._name)
                self.error = "an unexpected failure; the log has it"
            if self.leads != led:
                led = not led
                logger.info("this replica %s", "leads and publishes" if led else "does not lead any more")
                self._changed()
            await asyncio.sleep(random.uniform(0.8, 1.2) * RETRY_S)

    async def resign(self) -> None:
        """Gives the lease back, if it is its own, so that another takes over at once."""
        if not self.leads:
            return
        self._candidate.resign()
        try:
            lease = await self._read()
            if lease is not None and lease.spec.holder_identity == self._candidate.identity:
                free = LeaseSpec(lease_duration_seconds=1, lease_transitions=lease.spec.lease_transitions)
                await self._write(lease, free)
        except ApiError as error:
            logger.warning("lease %s could not be given back, and ends by itself: %s", self._name, error)

    async def _take_part(self, now: float) -> None:
        lease = await self._read()
        text = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        claim = self._candidate.claim(lease.spec if lease is not None else None, now, text)
        if claim is not None:
            await self._write(lease, claim)
            self._candidate.claimed(now)

    async def _read(self) -> Lease | None:
        try:
            body = await self._api.request("GET", f"{self._collection}/{self._name}", {})
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        try:
            return msgspec.json.decode(body, type=Lease)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(None, f"the lease cannot be read: {error}") from error

    async def _write(self, lease: Lease | None, spec: LeaseSpec) -> None:
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        told = msgspec.to_builtins(spec)
        if lease is None:
            body = {**kind, "metadata": {"name": self._name}, "spec": told}
            await self._api.request("POST", self._collection, {}, body)
        else:
            body = {**kind, "metadata": msgspec.json.decode(lease.metadata), "spec": told}
            await self._api.request("PUT", f"{self._collection}/{self._name}", {}, body)
