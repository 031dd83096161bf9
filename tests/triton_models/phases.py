"""Where the requests of `scripted.py` and `tokens.py` are and what became of them, in Triton's metrics.

- gauge `scripted_requests{model, phase}`: requests in the phases queued, prefill (no token yet) and decode
- counter `scripted_<outcome>_total{model}`

A model that answers each request in a thread of its own has no queue. So a request may ask to be served in its turn: it
is queued while another that asked for it is being served, as in an engine whose slots are taken.
"""

import threading
import time

import triton_python_backend_utils as pb_utils

POLL_S = 0.02
"""How often a model looks whether a request was cancelled."""


def after(seconds):
    """Whether they have gone by since this call, as a function."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


class Requests:
    """All requests of one model."""

    def __init__(self, model, *outcomes):
        # Metrics are not made for threads: two that counted at once were seen to bring the whole server down.
        self._counting = threading.Lock()
        self._slot = threading.Lock()
        gauge = pb_utils.MetricFamily(
            name="scripted_requests", description="Requests in a phase", kind=pb_utils.MetricFamily.GAUGE
        )
        phases = ("queued", "prefill", "decode")
        self._phases = {phase: gauge.Metric(labels={"model": model, "phase": phase}) for phase in phases}
        self._families = [gauge]
        self._outcomes = {}
        for outcome in outcomes:
            family = pb_utils.MetricFamily(
                name=f"scripted_{outcome}_total", description=outcome, kind=pb_utils.MetricFamily.COUNTER
            )
            self._families.append(family)
            self._outcomes[outcome] = family.Metric(labels={"model": model})

    def count(self, outcome):
        with self._counting:
            self._outcomes[outcome].increment(1)

    def new(self, in_turn=False):
        """A request that has come, as a context manager; queued if it is to be served in its turn."""
        return Request(self, self._slot if in_turn else None)

    def move(self, left, entered):
        with self._counting:
            for phase, step in ((left, -1), (entered, 1)):
                if phase is not None:
                    self._phases[phase].increment(step)


class Request:
    """One request in its phases."""

    def __init__(self, requests, slot):
        self._requests = requests
        self._slot = slot
        self._served = False
        self._phase = None

    def __enter__(self):
        self._enter("queued" if self._slot is not None else "prefill")
        return self

    def __exit__(self, *_):
        self._enter(None)
        if self._served:
            self._slot.release()

    def its_turn(self):
        """Whether it is being served, from now on in prefill."""
        if self._phase == "queued" and self._slot.acquire(blocking=False):
            self._served = True
            self._enter("prefill")
        return self._phase != "queued"

    def decodes(self):
        """The first token is there."""
        self._enter("decode")

    def _enter(self, phase):
        if phase != self._phase:
            self._requests.move(self._phase, phase)
            self._phase = phase
