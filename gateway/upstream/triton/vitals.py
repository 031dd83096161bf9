"""Whether the model behind a Triton that calls itself ready is alive.

When the process of a Python-backend model dies, Triton tells nobody: health and model-ready stay as they were, streams
hang without an error, and only the next request is told. What a probe may believe therefore depends on what is known:

- **No sign** of trouble: the server's word. An idle or a streaming endpoint is never asked for anything more.
- **Silence**: an answer that had begun has brought nothing for `SILENCE_S`, or a request has waited for its first token
  for `WAIT_S`. A long prefill looks the same, so one token is asked for, with a short deadline, and only the word that
  the process is dead counts. Whatever else comes of it, nothing is asked again before as much silence has passed
  once more.
- **Doubt**, after a request that broke off, got lost or timed out: a token, or text on any other stream since, must
  come before the endpoint is believed ready. No token in time is a failed probe like any other.
- **Death**, told by Triton itself to a request or to a probe: only a generated token ends it. Text on other streams
  does not, because it may come from another instance of the model, or from a later step of an ensemble.

A model that no contract fits cannot be asked for a token. Its death is told by Triton as well, and lasts until the
model's statistics begin anew: Triton counts them from the load of the model, and every request that is told of the
death adds a second to them.

At a confirmed death the requests that have been silent for `QUIET_S` are given up, instead of each waiting for its own
timeout. Those that go on receiving text do not hang on the dead process, and are left alone.
"""

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol

from gateway.upstream.base import Failure, LiveCall, UpstreamError

SILENCE_S = 2.0
WAIT_S = 10.0
QUIET_S = 0.5
TOKEN_DEADLINE_S = 1.5
"""What a token may take, or three quarters of what a probe may if that is less. A Triton whose model process is dead
says so after one second, for which it waits for the process to show itself."""
_STALL_S = 0.1
"""A deadline that passed so soon after a message was for a request that took long, not for an engine that is silent."""

_DOUBTFUL = frozenset({Failure.DIED, Failure.LOST_BEFORE_ANSWER, Failure.TIMEOUT})


class Sign(Enum):
    """What came of asking for a token."""

    TOKEN = "token"
    """It came, or the request failed in a way that takes a living process."""
    DEAD = "dead"
    """Triton says that the process is dead."""
    NOTHING = "nothing"
    """It did not come in time."""


class Watched(LiveCall, Protocol):
    """A request whose silence is listened to."""

    @property
    def paused(self) -> bool:
        """It is not read, because its client does not keep up: its silence says nothing."""


class Vitals:
    """What is known of one endpoint's model. `clock` is the one of `LiveCall.last_read`."""

    def __init__(self, endpoint: str, clock: Callable[[], float]) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._calls: set[Watched] = set()
        self._checked = clock()
        self._doubted: float | None = None
        self._dead = False
        self._failed_ns = 0

    def watch(self, call: Watched) -> None:
        """Listen to a request that has been sent."""
        self._calls.add(call)

    def unwatch(self, call: Watched) -> None:
        """Idempotent."""
        self._calls.discard(call)

    def failed(self, error: UpstreamError, *, process_dead: bool) -> None:
        """A request failed; `process_dead` if Triton said that the model's process is."""
        if process_dead:
            self._dead = True
        elif error.failure in _DOUBTFUL:
            self._doubted = self._clock()

    def given_up(self, call: Watched, error: UpstreamError) -> None:
        """A request is given up for a reason of ours; a deadline is one that tells of the engine."""
        if (
            error.failure is Failure.TIMEOUT
            and not error.own_deadline
            and not call.paused
            and self._clock() - call.last_read > _STALL_S
        ):
            self._doubted = self._clock()

    async def alive(self, generate: Callable[[], Awaitable[Sign]]) -> bool:
        """Whether the server's word may be believed; `generate` is used only if it takes a token to know.

        False means that the process is dead. Raises UpstreamError (TIMEOUT) if a token was needed and none came.
        """
        doubted = self._doubted
        if doubted is not None and any(call.answering and call.last_read > doubted for call in self._calls):
            self._doubted = doubted = None
        if not self._dead and doubted is None and not self._silent():
            return True
        if self._dead:
            self._give_up_hanging()
        sign = await generate()
        self._checked = self._clock()
        if sign is Sign.TOKEN:
            self._dead = False
            if self._doubted == doubted:
                self._doubted = None
        elif sign is Sign.DEAD:
            if not self._dead:
                self._dead = True
                self._give_up_hanging()
        elif self._dead or doubted is not None:
            raise UpstreamError(Failure.TIMEOUT, f"Engine {self._endpoint} generated no token in time.", 504)
        return not self._dead

    @property
    def dead(self) -> bool:
        """Whether Triton has said that the process is dead, and nothing has ended that since."""
        return self._dead

    def loaded(self, failed_ns: int) -> None:
        """The model's failures have taken that many nanoseconds since it was loaded: told of one that is dead and
        cannot be asked for a token."""
        if failed_ns < self._failed_ns:
            self._dead = False
            self._failed_ns = 0
        else:
            self._failed_ns = failed_ns
            self._give_up_hanging()

    def _silent(self) -> bool:
        now = self._clock()
        return any(
            now - max(call.last_read, self._checked) > (SILENCE_S if call.answering else WAIT_S)
            for call in self._calls
            if not call.paused
        )

    def _give_up_hanging(self) -> None:
        now = self._clock()
        for call in tuple(self._calls):
            if call.paused or now - call.last_read < QUIET_S:
                continue
            if call.answering:
                what, failure, code = "broke off its answer", Failure.DIED, "engine_died"
            else:
                what, failure, code = "was lost before it answered", Failure.LOST_BEFORE_ANSWER, "engine_lost"
            call.abort(
                UpstreamError(failure, f"Engine {self._endpoint} {what}: its model process has died.", 502, code)
            )
