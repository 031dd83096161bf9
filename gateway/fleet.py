"""The fleet this gateway routes over: the view, its engines, and the probes that keep their phases true.

Documents come in as they change; each time the view is compiled anew and the engines follow it: new endpoints get an
engine and a probing task, endpoints that left are retired. A retired engine takes nothing new but is closed only when
its last request has ended, since taking an endpoint out of the fleet must not cut a stream.

Every endpoint is probed by a task of its own, so that one that hangs delays no other. A failed request wakes its task
at once: whether the endpoint is really down is known milliseconds later, not an interval later. What the requests
themselves show is kept apart (`router.outlier`): an endpoint that they keep failing at is ejected whatever it says of
itself.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable

import msgspec

from gateway.credentials import Credentials
from gateway.metrics import Metrics
from gateway.upstream.base import Engine, Failure, Headers, ProbeReport, UpstreamError
from gateway.upstream.openai import OpenAIEngine
from gateway.upstream.triton.engine import TritonEngine
from router import health, outlier
from router.fleet import Endpoint, FleetView, Pool, compile_view
from router.merge import MergedFleet, merge
from router.plan import SERVING, Attempt
from router.spec.documents import Document
from router.spec.fleet import Protocol
from router.spec.units import seconds

logger = logging.getLogger(__name__)

_ENGINES: dict[Protocol, type[OpenAIEngine] | type[TritonEngine]] = {"openai": OpenAIEngine, "triton": TritonEngine}
_RETIRED_CHECK_S = 0.5
_CONNECTION_FAILURES = frozenset({Failure.CONNECT, Failure.NO_CONNECTION, Failure.LOST_BEFORE_ANSWER, Failure.DIED})
_PROBE_JITTER = 0.1
"""Probes are spread by this share of their interval, so that gateways do not probe in step."""


class Member:
    """An endpoint of the fleet with its engine and what the engine says of its models."""

    __slots__ = ("ejection", "endpoint", "engine", "models", "pool", "probed", "probing", "wake")

    def __init__(self, endpoint: Endpoint, pool: Pool, credentials: Credentials) -> None:
        self.endpoint = endpoint
        self.pool = pool
        self.engine: Engine = _ENGINES[pool.spec.protocol](endpoint, pool, lambda: credentials.own(self.pool.spec))
        self.models: tuple[msgspec.Raw, ...] = ()
        self.wake = asyncio.Event()
        self.probed = asyncio.Event()
        self.probing: asyncio.Task[None] | None = None
        self.ejection: asyncio.TimerHandle | None = None
        """Ends its ejection."""

    def end_ejection(self) -> None:
        """It ends otherwise than by its time."""
        if self.ejection is not None:
            self.ejection.cancel()


class LiveFleet:
    """The current view and everything that belongs to its endpoints. Implements dispatch's `Engines`."""

    def __init__(self, metrics: Metrics, processes: int = 1) -> None:
        """`processes` of the same gateway share what an endpoint may have in flight."""
        self.changed: Callable[[], None] = _nobody_waits
        """Called when an endpoint may take requests that did not, or not as many, or the other way round."""
        self._processes = processes
        self.view = FleetView()
        self.merged: MergedFleet = merge(())
        self._metrics = metrics
        self._credentials = Credentials()
        self._members: dict[str, Member] = {}
        self._retired: set[asyncio.Task[None]] = set()

    def apply(self, documents: Iterable[Document]) -> None:
        """Take over changed documents. Synchronous: view and engines never disagree."""
        merged = merge(documents)
        view = compile_view(merged, self.view)
        for id_, endpoint in view.endpoints.items():
            member = self._members.get(id_)
            pool = view.pools[endpoint.pool]
            if member is not None and member.endpoint.state is endpoint.state:
                member.endpoint, member.pool = endpoint, pool
                continue
            if member is not None:
                self._retire(self._members.pop(id_))
            try:
                self._members[id_] = member = Member(endpoint, pool, self._credentials)
            except Exception as error:  # whatever is wrong with one endpoint, the others go on
                logger.exception("endpoint %s cannot be used", id_)
                endpoint.state.detail = f"it cannot be used: {error}"
                continue
            member.probing = asyncio.create_task(self._keep_probing(member), name=f"probe {id_}")
        for id_ in self._members.keys() - view.endpoints.keys():
            self._retire(self._members.pop(id_))
            self._metrics.forget_endpoint(id_)
        for problem in view.problems:
            if problem not in self.view.problems:
                logger.warning("fleet: %s", problem)
        for name in self.view.routes.keys() - view.routes.keys():
            self._metrics.forget_route(name)
        self.view, self.merged = view, merged
        for endpoint in view.endpoints.values():
            endpoint.state.limit(view.pools[endpoint.pool].spec, self._processes)
        for pool in view.pools.values():
            self._spare_the_last(pool)
        self.changed()

    def engine(self, endpoint: Endpoint) -> Engine:
        """The engine of a planned endpoint, unless it was drained, replaced or taken out since the plan was made."""
        member = self._members.get(endpoint.id)
        if member is None or member.endpoint.state is not endpoint.state or member.endpoint.phase not in SERVING:
            raise UpstreamError(Failure.BUSY, f"Engine {endpoint.id} takes no requests any more.", 503, "engine_gone")
        return member.engine

    def models(self, pool: Pool) -> tuple[msgspec.Raw, ...]:
        """What the first of a pool's engines that says anything says of its models."""
        members = (self._members.get(endpoint.id) for endpoint in pool.endpoints)
        return next((member.models for member in members if member is not None and member.models), ())

    def credentials(self, attempt: Attempt, clients: str) -> Headers:
        """What goes to an attempt's engine as Authorization; `clients` is the client's own, if there is one. Raises
        UpstreamError."""
        return self._credentials.of(attempt.pool.spec, attempt.endpoint, clients)

    def pools(self) -> Iterable[Pool]:
        """Those there are now."""
        return self.view.pools.values()

    def attempted(self, attempt: Attempt) -> None:
        self._metrics.attempts.values[attempt.endpoint.id, attempt.reason] += 1

    def failed(self, attempt: Attempt, error: UpstreamError) -> None:
        """Count a failed request; one that speaks against the endpoint's health has it probed at once."""
        endpoint = attempt.endpoint
        member = self._members.get(endpoint.id)
        if member is None or member.endpoint.state is not endpoint.state:
            return  # it has left the fleet, and its series with it
        self._metrics.upstream_failures.values[endpoint.id, error.failure.value] += 1
        if not error.endpoint_fault:
            return
        if error.failure is Failure.CONNECT:
            health.down(endpoint.state, error.message)
            self._spare_the_last(member.pool)
        member.wake.set()
        self._judge(member, attempt, error)

    def answered(self, attempt: Attempt) -> None:
        """An endpoint on trial that answers is readmitted."""
        record = attempt.endpoint.state.outlier
        if record.trial is attempt:
            limit = attempt.pool.spec.outlier.failures
            outlier.answered(record, attempt, asyncio.get_running_loop().time(), limit=limit)
            logger.info("endpoint %s: it answers again and is readmitted", attempt.endpoint.id)

    def succeeded(self, endpoint: Endpoint) -> None:
        outlier.succeeded(endpoint.state.outlier)

    def retry_refused(self, route: str) -> None:
        self._metrics.retries_refused.values[route,] += 1

    def _judge(self, member: Member, attempt: Attempt, error: UpstreamError) -> None:
        """Count a failure that is an endpoint's fault; one too many ejects it."""
        endpoint, loop = member.endpoint, asyncio.get_running_loop()
        broke = error.failure in _CONNECTION_FAILURES
        lasts = health.request_failed(
            endpoint, member.pool, attempt, error.message, loop.time(), connection=broke, jitter=random.random()
        )
        if lasts is not None:
            record = endpoint.state.outlier
            member.ejection = loop.call_later(lasts, outlier.put_on_trial, record)
            self._metrics.ejections.values[endpoint.id,] += 1
            logger.warning("endpoint %s: %s", endpoint.id, record.detail)

    def _spare_the_last(self, pool: Pool) -> None:
        for endpoint in health.spare_the_last(pool, asyncio.get_running_loop().time()):
            self._members[endpoint.id].end_ejection()
            logger.warning("endpoint %s: readmitted, since no other of pool %s is left", endpoint.id, pool.name)

    async def probed_once(self, timeout: float) -> None:
        """Wait until every endpoint has been probed, for `timeout` seconds at most: the first requests of a gateway
        that knows only half its fleet would land where their conversations do not belong."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for member in tuple(self._members.values()):
                    await member.probed.wait()

    async def close(self) -> None:
        """Stop probing and close every engine."""
        for member in self._members.values():
            self._retire(member, at_once=True)
        self._members.clear()
        await asyncio.gather(*self._retired)

    def _retire(self, member: Member, *, at_once: bool = False) -> None:
        if member.probing is not None:
            member.probing.cancel()
        member.end_ejection()
        task = asyncio.create_task(_close_when_idle(member, at_once), name=f"retire {member.endpoint.id}")
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    async def _keep_probing(self, member: Member) -> None:
        while True:
            probe = member.pool.spec.probe
            member.wake.clear()
            await self._probe(member, seconds(probe.timeout), probe.failures)
            member.probed.set()
            interval = seconds(probe.interval) * random.uniform(1 - _PROBE_JITTER, 1 + _PROBE_JITTER)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await member.wake.wait()

    async def _probe(self, member: Member, timeout: float, limit: int) -> None:
        state = member.endpoint.state
        before, downs = state.phase, state.downs
        try:
            async with asyncio.timeout(timeout):
                if (why := self._credentials.refresh(member.pool)) is not None:
                    report = ProbeReport(ready=False, detail=why)
                else:
                    report = await member.engine.probe(member.pool)
        except TimeoutError:
            health.probe_failed(state, f"no answer to a probe within {timeout:g} s", refused=False, limit=limit)
        except UpstreamError as error:
            if error.failure is Failure.GATEWAY:
                logger.warning("endpoint %s could not be probed: %s", member.endpoint.id, error)
            else:
                health.probe_failed(state, error.message, refused=error.failure is Failure.CONNECT, limit=limit)
        except Exception as error:  # a probe that fails in a way nobody thought of must not end the probing
            logger.exception("probing endpoint %s", member.endpoint.id)
            health.probe_failed(state, f"probing it failed: {error}", refused=False, limit=limit)
        else:
            if report.ready and state.downs != downs:
                member.wake.set()  # a request has found nobody there meanwhile: what was said before counts no more
            else:
                self._learn(member, report)
        never_answered = state.phase == "starting" and state.failed_probes == 1
        if state.phase != before:
            self._spare_the_last(member.pool)
            self.changed()
            level = logging.INFO if state.phase == "ready" else logging.WARNING
            logger.log(level, "endpoint %s: %s -> %s (%s)", member.endpoint.id, before, state.phase, state.detail)
        elif never_answered:
            logger.warning("endpoint %s: no answer yet (%s)", member.endpoint.id, state.detail)

    def _learn(self, member: Member, report: ProbeReport) -> None:
        state = member.endpoint.state
        if report.ready:
            state.capabilities = report.capabilities
            state.kv_block_tokens = report.kv_block_tokens
            state.slots = report.slots
            state.limit(member.pool.spec, self._processes)
            member.models = report.models
        health.probe_answered(state, ready=report.ready, detail=report.detail)


def _nobody_waits() -> None:
    """What follows from a change where there are no queues."""


async def _close_when_idle(member: Member, at_once: bool) -> None:
    while not at_once and member.endpoint.state.in_flight:  # noqa: ASYNC110 - a count is no event, and this is rare
        await asyncio.sleep(_RETIRED_CHECK_S)
    await member.engine.close()
