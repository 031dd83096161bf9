"""Trying the endpoints of a plan, with engines that do what they are told."""

import pytest

from gateway.dispatch import first_willing
from gateway.exchange import Exchange, LiveExchanges
from gateway.upstream.base import Engine, Failure, UpstreamError
from router.fleet import Endpoint, EndpointState, Pool, Route
from router.plan import Attempt, Plan
from router.retry import RetryBudget
from router.spec.documents import EndpointFields
from router.spec.fleet import PoolSpec
from tests.no_client import NoClient

LOST = UpstreamError(Failure.LOST_BEFORE_ANSWER, "lost")
BUSY = UpstreamError(Failure.BUSY, "busy", 503)


class Engines:
    """Knows every endpoint but those that are `gone`; notes what it is told."""

    def __init__(self, gone: frozenset[str] = frozenset()) -> None:
        self._gone = gone
        self.told: list[str] = []

    def engine(self, endpoint: Endpoint) -> Engine:
        if endpoint.id in self._gone:
            raise BUSY
        return None  # type: ignore[return-value]  # nobody calls it here

    def credentials(self, attempt: Attempt, clients: str) -> tuple[tuple[str, str], ...]:
        return ()

    def attempted(self, attempt: Attempt) -> None:
        self.told.append(f"attempted {attempt.endpoint.id}")

    def failed(self, attempt: Attempt, error: UpstreamError) -> None:
        self.told.append(f"failed {attempt.endpoint.id}")

    def answered(self, attempt: Attempt) -> None:
        self.told.append(f"answered {attempt.endpoint.id}")

    def succeeded(self, endpoint: Endpoint) -> None:
        self.told.append(f"succeeded {endpoint.id}")

    def retry_refused(self, route: str) -> None:
        self.told.append(f"refused {route}")


def plan(count: int) -> Plan:
    spec = PoolSpec(protocol="openai", model="x")
    endpoints = [
        Endpoint(f"e{n}", "p", EndpointFields(id=f"e{n}", pool="p"), EndpointState(phase="ready"), b"")
        for n in range(count)
    ]
    pool = Pool.of("p", spec, endpoints)
    return Plan(Route("m", ((pool, 1.0),), ()), tuple(Attempt(endpoint, pool, "affinity") for endpoint in endpoints))


class Sending:
    """What engines do with a request, one after the other."""

    def __init__(self, *outcomes: UpstreamError | str) -> None:
        self._outcomes = iter(outcomes)

    async def __call__(self, attempt: Attempt, engine: Engine) -> str:
        outcome = next(self._outcomes)
        if isinstance(outcome, str):
            return outcome
        raise outcome


async def run(
    sending: Sending, engines: Engines, *, budget: RetryBudget, count: int = 5, failure: UpstreamError | None = None
) -> str | UpstreamError:
    """What becomes of a request to a plan of `count` endpoints; `failure`: of one that it was sent to before."""
    live = LiveExchanges(list, budget)
    with Exchange(live, NoClient()) as exchange:
        exchange.failure = failure
        if failure is not None:
            exchange.begin_attempt(plan(1).attempts[0])
            exchange.end_attempt()
        try:
            result: str | UpstreamError = await first_willing(exchange, plan(count), engines, "r", sending)
        except UpstreamError as error:
            result = error
        else:
            assert budget.in_use(live.now() + 10) == 0  # an answer is no retry in flight
    assert budget.in_use(live.now() + 10) == 0
    return result


async def test_a_request_is_lost_in_two_engines_and_no_more() -> None:
    engines = Engines()
    assert await run(Sending(LOST, LOST, "never"), engines, budget=RetryBudget(1, 9)) is LOST
    assert [told for told in engines.told if told.startswith("attempted")] == ["attempted e0", "attempted e1"]


async def test_without_a_place_in_the_budget_the_first_failure_is_what_the_client_gets() -> None:
    engines = Engines()
    assert await run(Sending(LOST, "never"), engines, budget=RetryBudget(0, 0)) is LOST
    assert engines.told == ["attempted e0", "failed e0", "refused m"]


async def test_every_retry_of_a_request_takes_a_place_of_its_own() -> None:
    engines = Engines()
    assert await run(Sending(BUSY, BUSY, "never"), engines, budget=RetryBudget(0, 1)) is BUSY
    assert engines.told == ["attempted e0", "failed e0", "attempted e1", "failed e1", "refused m"]


async def test_an_endpoint_that_was_never_sent_the_request_costs_no_retry() -> None:
    engines = Engines(frozenset({"e0", "e1"}))
    assert await run(Sending("answer"), engines, budget=RetryBudget(0, 0)) == "answer"
    assert engines.told == ["failed e0", "failed e1", "attempted e2", "answered e2", "succeeded e2"]


async def test_a_request_sent_before_by_other_means_is_a_retry_from_the_start() -> None:
    engines = Engines()
    assert await run(Sending("never"), engines, budget=RetryBudget(0, 0), failure=BUSY) is BUSY
    assert engines.told == ["refused m"]
    assert await run(Sending("answer"), Engines(), budget=RetryBudget(0, 1), failure=BUSY) == "answer"


async def test_going_on_after_a_connection_that_could_not_be_made_costs_no_retry() -> None:
    unreachable = UpstreamError(Failure.CONNECT, "nobody there")
    assert await run(Sending(unreachable, unreachable, "answer"), Engines(), budget=RetryBudget(0, 0)) == "answer"
    assert await run(Sending("answer"), Engines(), budget=RetryBudget(0, 0), failure=unreachable) == "answer"


@pytest.mark.parametrize("failure", [Failure.ENGINE, Failure.INTERNAL, Failure.TIMEOUT, Failure.PROTOCOL, Failure.DIED])
async def test_what_may_have_been_worked_on_is_not_tried_again(failure: Failure) -> None:
    error = UpstreamError(failure, "no")
    assert await run(Sending(error, "never"), Engines(), budget=RetryBudget(1, 9)) is error
