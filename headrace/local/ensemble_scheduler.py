"""Which request may use llama.cpp now: a bounded queue in front of its slots, and one prefill at a time.

llama.cpp would queue and interleave by itself, but a request it holds back is not called back, so its cancel would go
unseen. Therefore:

- no more requests than slots are handed over; the others wait here, where `sweep` looks at their cancel flag;
- the next request is handed over only when no other is in its prefill. llama.cpp fills its batches slot by slot, so
  prefills are sequential anyway; taking turns before the engine keeps every prefill called back once per batch.

All state is guarded by one lock and is also what the metrics show: they cannot disagree with what happens.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.local.ensemble_request import EnsembleRequest
from headrace.local.ensemble_signature import TOKENS_PER_BLOCK

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Requests that may wait; the next one is refused, as an engine with a bounded queue does."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request used, in tokens; times are `time.monotonic_ns()`."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrival_ns: int
    scheduled_ns: int
    first_token_ns: int
    last_token_ns: int

    @property
    def reused_blocks(self) -> int:
        """Whole blocks taken from the cache."""
        return self.cached_tokens // TOKENS_PER_BLOCK

    @property
    def total_blocks(self) -> int:
        """Blocks that hold prompt and answer, reused ones included."""
        return blocks(self.prompt_tokens + self.output_tokens)


def blocks(tokens: int) -> int:
    """Blocks needed to hold `tokens`."""
    return -(-tokens // TOKENS_PER_BLOCK)


class Client(Protocol):
    """Where the answers of one request go. Called from one thread at a time."""

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""

    def send(self, text: str, new_tokens: int, log_probs: list[float]) -> None:
        """Send a piece of the answer."""

    def finish(self, text: str, new_tokens: int, log_probs: list[float], usage: Usage) -> None:
        """Send the last piece and end the answer."""

    def fail(self, message: str, *, invalid: bool = False) -> None:
        """End with an error; `invalid` if the request is to blame."""

    def cancelled(self) -> None:
        """End because the client asked for it."""


@dataclass(frozen=True, slots=True)
class Load:
    """A consistent look at the scheduler, for the metrics."""

    waiting: int
    scheduled: int
    context: int
    used_blocks: int
    reused_blocks: int
    outcomes: dict[str, int]


class Job:
    """One request on its way through the scheduler."""

    __slots__ = ("arrival_ns", "client", "held_tokens", "request")

    def __init__(self, request: EnsembleRequest, client: Client) -> None:
        self.request = request
        self.client = client
        self.arrival_ns = time.monotonic_ns()
        self.held_tokens = 0


class Scheduler:
    """Runs jobs on `slots` threads; `submit` and `sweep` never block on the engine."""

    def __init__(self, run: Callable[[Job, Callable[[], None]], tuple[str, int]], slots: int) -> None:
        """`run(job, prefilled)` does one job, calls `prefilled` at its first token, and returns its outcome
        (`finished`, `cancelled`, `failed`) and the number of blocks it found in the cache. When it raises instead,
        the job has failed, and its client is told."""
        self._run = run
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._prefilling: Job | None = None
        self._closed = False
        self._reused_blocks = 0
        self._outcomes = {"finished": 0, "cancelled": 0, "failed": 0}
        self._threads = [threading.Thread(target=self._work, name=f"slot-{i}", daemon=True) for i in range(slots)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; a full queue refuses it at once."""
        with self._changed:
            accepted = len(self._waiting) < MAX_WAITING and not self._closed
            if accepted:
                self._waiting.append(job)
                self._changed.notify_all()
        if not accepted:
            self.refuse(job.client, f"Maximum queue size of {MAX_WAITING} reached", invalid=False)

    def refuse(self, client: Client, message: str, *, invalid: bool) -> None:
        """End a request that never became a job."""
        self._count("failed")
        client.fail(message, invalid=invalid)

    def sweep(self) -> None:
        """End the waiting jobs whose client has gone."""
        with self._changed:
            waiting = list(self._waiting)
        gone = [job for job in waiting if job.client.is_cancelled()]
        for job in gone:
            with self._changed:
                if job not in self._waiting:  # taken by a slot meanwhile, which sees the flag itself
                    continue
                self._waiting.remove(job)
            self._count("cancelled")
            job.client.cancelled()

    def load(self) -> Load:
        """Look at everything at one moment."""
        with self._changed:
            return Load(
                waiting=len(self._waiting),
                scheduled=len(self._running),
                context=int(self._prefilling is not None),
                used_blocks=sum(blocks(job.held_tokens) for job in self._running),
                reused_blocks=self._reused_blocks,
                outcomes=dict(self._outcomes),
            )

    def drained(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; false if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._running, timeout_s)

    def close(self) -> None:
        """Take no more work and let the threads end when they are idle."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _count(self, outcome: str) -> None:
        with self._changed:
            self._outcomes[outcome] += 1

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._waiting and self._prefilling is None))
                if self._closed:
                    return
                job = self._waiting.popleft()
                self._running.add(job)
                self._prefilling = job
            outcome, reused_blocks = "failed", 0
            try:
                outcome, reused_blocks = self._run(job, lambda job=job: self._prefilled(job))  # type: ignore[misc]
            except Exception as error:  # a slot must outlive any request
                log.exception("a request failed unexpectedly")
                with contextlib.suppress(Exception):  # its client may be what failed
                    job.client.fail(f"the engine failed: {error}")
            finally:
                with self._changed:
                    self._outcomes[outcome] += 1
                    self._reused_blocks += reused_blocks
                    self._running.discard(job)
                    if self._prefilling is job:
                        self._prefilling = None
                    self._changed.notify_all()

    def _prefilled(self, job: Job) -> None:
        with self._changed:
            if self._prefilling is job:
                self._prefilling = None
                self._changed.notify_all()
