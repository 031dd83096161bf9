"""What becomes of an endpoint when probes and requests say different things of it."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.fleet import LiveFleet
from gateway.metrics import Metrics
from gateway.upstream.base import Failure, ProbeReport, UpstreamError
from gateway.upstream.openai import OpenAIEngine
from router.fleet import Pool
from router.plan import Attempt
from router.spec.documents import file_documents
from router.spec.fleet import EndpointSpec, ProbeSpec
from tests.harness import one_pool

REFUSED = UpstreamError(Failure.CONNECT, "Engine e cannot be reached: connection refused.", 503)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - a count is no event
            await asyncio.sleep(0.001)


async def test_a_probe_that_was_asked_before_a_request_was_refused_readmits_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[asyncio.Future[ProbeReport]] = []
    phases: list[str] = []

    async def probe(self: OpenAIEngine, pool: Pool) -> ProbeReport:
        phases.append(fleet.view.endpoints["e"].phase)
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    monkeypatch.setattr(OpenAIEngine, "probe", probe)
    fleet = LiveFleet(Metrics())
    spec = one_pool(EndpointSpec(id="e", http="http://127.0.0.1:1"), probe=ProbeSpec(interval="10ms", timeout="60s"))
    fleet.apply(file_documents(spec, content_hash="h"))
    endpoint = fleet.view.endpoints["e"]
    ready = ProbeReport(ready=True, detail="ready")
    try:
        await until(lambda: len(answers) == 1)
        answers[0].set_result(ready)
        await until(lambda: len(answers) == 2)
        fleet.failed(Attempt(endpoint, fleet.view.pools["p"], "affinity"), REFUSED)
        answers[1].set_result(ready)
        await until(lambda: len(answers) == 3)
        answers[2].set_result(ready)
        await until(lambda: len(answers) == 4)
        assert phases == ["starting", "ready", "unhealthy", "ready"]
    finally:
        for answer in answers:
            answer.cancel()
        await fleet.close()
