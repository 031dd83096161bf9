"""One issuer that the gateway trusts, and its keys, kept fresh.

The keys are fetched by a task of their own: when it begins, every few minutes, and at once when a token comes with a
key that is not among them, which may be new. That a token can name any key must not make the gateway ask its issuer
all the time, so it is asked out of turn once in `OUT_OF_TURN_S`, whatever comes.

While an issuer cannot be asked, the keys that are known go on counting: an issuer's outage stops nobody who has a token
already. So does a set without a usable key, which is a mistake of its author's. A key that is not in the next good set
is withdrawn, and with it every token that it signed.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from gateway.metrics import Metrics
from gateway.oidc.callers import Signer
from gateway.oidc.fetch import FetchError, fetch_keys
from gateway.oidc.keys import Keys, KeySetError, read_keys
from router.spec.gateway import JwtSpec
from router.spec.units import seconds

REFRESH_S = 300.0
OUT_OF_TURN_S = 10.0
_LONGEST_RETRY_S = 60.0
_JITTER = 0.1
"""The gateways of a fleet do not ask in step."""

logger = logging.getLogger(__name__)


class Issuer:
    """An issuer. Its keys are fetched while `keep` runs."""

    def __init__(self, spec: JwtSpec, metrics: Metrics, changed: Callable[[], None]) -> None:
        """`changed` is called when there are other keys than before."""
        self.spec = spec
        self.leeway = seconds(spec.leeway)
        self._metrics = metrics
        self._changed = changed
        self._keys: Keys = {}
        self._fetched_at: datetime | None = None
        self._failures = 0
        self._problem: str | None = None
        self._wake = asyncio.Event()
        self._fetching: asyncio.Future[None] | None = None
        self._free_at = 0.0
        """Loop time from which it may be asked out of turn."""

    @property
    def stale(self) -> bool:
        """The keys are not known to be those of now."""
        return self._problem is not None or self._fetched_at is None

    def signers(self, algorithm: str) -> Mapping[str, Signer]:
        """The keys for an algorithm by their ids."""
        return self._keys.get(algorithm, {})

    def degraded(self) -> str | None:
        """What is wrong, for the operator; None if nothing is."""
        if self._problem is None:
            return None
        at = self._fetched_at
        then = f"those of {at:%Y-%m-%dT%H:%M:%SZ} go on counting" if at is not None else "none of its tokens is taken"
        return f"jwt: the keys of {self.spec.issuer} cannot be had: {self._problem}; {then}."

    def ask(self) -> asyncio.Future[None] | None:
        """Have the keys fetched now, unless that was done a moment ago; done when they have been."""
        if self._fetching is None and self.wait() <= 0:
            self._fetching = asyncio.get_running_loop().create_future()
            self._wake.set()
        return self._fetching

    def wait(self) -> float:
        """Seconds until its keys may be fetched out of turn."""
        return self._free_at - asyncio.get_running_loop().time()

    def take(self, body: bytes) -> None:
        """Have the keys of a JWK set in place of those before. Raises KeySetError."""
        keys = read_keys(body, self.spec.algorithms, self._keys)
        if self.stale:
            count = len({kid for signers in keys.values() for kid in signers})
            logger.info("jwt: %s has %d keys for %s", self.spec.issuer, count, ", ".join(keys))
        self._problem, self._failures, self._fetched_at = None, 0, datetime.now(UTC)
        if keys != self._keys:
            self._keys = keys
            self._changed()

    async def keep(self) -> None:
        """Fetch the keys again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            if self._fetching is None:
                self._fetching = loop.create_future()
            else:
                self._free_at = loop.time() + OUT_OF_TURN_S
            await self._fetch()
            self._fetching.set_result(None)
            self._fetching = None
            rest = REFRESH_S if not self._failures else min(2.0 ** min(self._failures, 10), _LONGEST_RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest * random.uniform(1 - _JITTER, 1 + _JITTER)):
                    await self._wake.wait()

    async def _fetch(self) -> None:
        try:
            self.take(await fetch_keys(self.spec.issuer, self.spec.jwks))
        except FetchError as error:
            self._failed(str(error))
        except KeySetError as error:
            self._failed(f"it {error}")
        except Exception as error:  # whatever else it is, the keys that are known go on counting
            logger.exception("fetching the keys of %s", self.spec.issuer)
            self._failed(f"fetching them failed: {error}")
        else:
            self._metrics.jwks_fetches.values[self.spec.issuer, "ok"] += 1

    def _failed(self, problem: str) -> None:
        self._failures += 1
        self._metrics.jwks_fetches.values[self.spec.issuer, "failed"] += 1
        if self._problem != problem:
            self._problem = problem
            logger.warning("%s", self.degraded())
