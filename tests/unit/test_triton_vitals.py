"""When a Triton that says it is ready is believed, and what is given up when its model is dead. No clock runs here."""

from dataclasses import dataclass, field

import pytest

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.triton.vitals import QUIET_S, SILENCE_S, WAIT_S, Sign, Vitals


@dataclass(eq=False)
class Call:
    """A request as far as it is listened to."""

    last_read: float = 0.0
    answering: bool = True
    paused: bool = False
    aborted: list[UpstreamError] = field(default_factory=list)

    def abort(self, error: UpstreamError) -> None:
        self.aborted.append(error)

    def close(self) -> None:
        raise AssertionError


class Patient:
    """A model that shows `sign` when asked, at a time that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sign = Sign.TOKEN
        self.asked = 0
        self.vitals = Vitals("e", lambda: self.now)

    async def alive(self) -> bool:
        return await self.vitals.alive(self._generate)

    async def _generate(self) -> Sign:
        self.asked += 1
        return self.sign


DIED = UpstreamError(Failure.DIED, "broke off")


@pytest.fixture
def patient() -> Patient:
    return Patient()


async def test_a_model_that_cannot_be_asked_for_a_token_is_dead_until_its_failures_are_counted_anew(
    patient: Patient,
) -> None:
    vitals, call = patient.vitals, Call(last_read=patient.now - QUIET_S)
    vitals.watch(call)
    vitals.failed(DIED, process_dead=True)
    for failed_ns in (1_000, 1_000, 2_000):
        vitals.loaded(failed_ns)
        assert vitals.dead
    assert call.aborted
    vitals.loaded(0)
    assert not vitals.dead
    vitals.failed(DIED, process_dead=True)
    vitals.loaded(500)
    assert vitals.dead


async def test_a_healthy_endpoint_is_never_asked_for_a_token(patient: Patient) -> None:
    call = Call(last_read=patient.now)
    assert await patient.alive()
    patient.vitals.watch(call)
    for _ in range(20):
        patient.now += SILENCE_S / 2
        call.last_read = patient.now
        assert await patient.alive()
    patient.vitals.unwatch(call)
    patient.now += 10 * WAIT_S
    assert await patient.alive()
    assert patient.asked == 0


@pytest.mark.parametrize(("answering", "limit"), [(True, SILENCE_S), (False, WAIT_S)])
async def test_silence_costs_one_token_for_each_time_it_lasts(patient: Patient, answering: bool, limit: float) -> None:
    patient.vitals.watch(Call(patient.now, answering))
    patient.vitals.watch(Call(patient.now, answering, paused=True))
    patient.now += limit - 0.1
    assert await patient.alive()
    assert patient.asked == 0
    patient.sign = Sign.NOTHING  # a long prefill looks like this, and is no reason to avoid the endpoint
    patient.now += 0.2
    for _ in range(5):
        assert await patient.alive()
    assert patient.asked == 1
    patient.now += limit + 0.1
    assert await patient.alive()
    assert patient.asked == 2


@pytest.mark.parametrize("failure", [Failure.DIED, Failure.LOST_BEFORE_ANSWER, Failure.TIMEOUT])
async def test_a_doubt_ends_with_a_token_or_with_text_on_another_stream(patient: Patient, failure: Failure) -> None:
    patient.sign = Sign.NOTHING
    patient.vitals.failed(UpstreamError(failure, "failed"), process_dead=False)
    for _ in range(2):
        with pytest.raises(UpstreamError, match="no token"):
            await patient.alive()
    patient.sign = Sign.TOKEN
    assert await patient.alive()
    patient.sign = Sign.NOTHING
    assert await patient.alive()
    assert patient.asked == 3
    patient.vitals.failed(UpstreamError(failure, "failed"), process_dead=False)
    patient.now += 0.1
    patient.vitals.watch(Call(patient.now))
    assert await patient.alive()
    assert patient.asked == 3


@pytest.mark.parametrize("failure", [Failure.BUSY, Failure.ENGINE, Failure.GATEWAY, Failure.CONNECT])
async def test_a_failure_that_says_nothing_of_the_model_raises_no_doubt(patient: Patient, failure: Failure) -> None:
    patient.vitals.failed(UpstreamError(failure, "failed"), process_dead=False)
    assert await patient.alive()
    assert patient.asked == 0


async def test_only_a_deadline_that_met_silence_raises_a_doubt(patient: Patient) -> None:
    overdue = UpstreamError(Failure.TIMEOUT, "overdue")
    patient.vitals.given_up(Call(patient.now), overdue)  # the answer took long, but it came
    patient.vitals.given_up(Call(patient.now - 60, paused=True), overdue)
    patient.vitals.given_up(Call(patient.now - 60), DIED)
    assert await patient.alive()
    assert patient.asked == 0
    patient.vitals.given_up(Call(patient.now - 60), overdue)
    assert await patient.alive()
    assert patient.asked == 1


async def test_a_death_gives_up_what_hangs_and_nothing_else(patient: Patient) -> None:
    hanging, waiting = Call(patient.now), Call(patient.now, answering=False)
    paused, talking = Call(patient.now, paused=True), Call()
    for call in (hanging, waiting, paused, talking):
        patient.vitals.watch(call)
    patient.now += WAIT_S + 1
    talking.last_read = patient.now - QUIET_S / 2
    patient.sign = Sign.DEAD
    assert not await patient.alive()
    assert [error.failure for error in hanging.aborted] == [Failure.DIED]
    assert [error.failure for error in waiting.aborted] == [Failure.LOST_BEFORE_ANSWER]
    assert not paused.aborted
    assert not talking.aborted


async def test_only_a_token_ends_a_death(patient: Patient) -> None:
    patient.vitals.failed(DIED, process_dead=True)
    patient.now += 1
    patient.vitals.watch(Call(patient.now))  # text of a stream that does not need the dead process
    patient.sign = Sign.DEAD
    assert not await patient.alive()
    patient.sign = Sign.NOTHING
    with pytest.raises(UpstreamError):
        await patient.alive()
    patient.sign = Sign.TOKEN
    assert await patient.alive()
    assert patient.asked == 3
    assert await patient.alive()
    assert patient.asked == 3
