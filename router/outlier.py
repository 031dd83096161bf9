"""Which endpoints are kept from taking requests because requests keep failing there, and how they come back.

Probes ask an engine how it is; requests find out. An engine whose health check answers while its requests fail looks
ready for ever, so failures in a row *eject* an endpoint: it gets no request for a while. Then it is *on trial*: one
request at a time goes there, an answer readmits it, a failure ejects it for twice as long. A probe has no say in that.
This is Envoy's outlier detection (consecutive failures, a base time that grows with each ejection, a limit on how much
of a pool may be ejected) with a circuit breaker's half-open state in place of readmitting by time alone.

An engine that dies takes all its requests with it in one moment. That is one failure, not many: probes notice a dead
engine, and see at once when it is back, which must not be held up by an ejection.

The last endpoint of a pool that takes requests is never ejected, and when all others are gone an ejected one is
readmitted: a bad chance is better than none.
"""

from dataclasses import dataclass

SAME_INCIDENT_S = 1.0
"""Seconds within which broken connections count as one failure."""
_JITTER = 0.1


@dataclass(slots=True)
class Outlier:
    """What requests have shown of one endpoint."""

    failures: int = 0
    """In a row."""
    shut: bool = False
    """It takes no request now."""
    ejected: bool = False
    """It is ejected or on trial; `reason` says why."""
    reason: str = ""
    ejections: int = 0
    """In a row: each within the time of the one before, counted from its readmission."""
    lasts: float = 0.0
    """Seconds of the last ejection."""
    on_trial: bool = False
    trial: object = None
    """The one request that is being tried."""
    readmitted_at: float = 0.0
    broke_at: float = float("-inf")
    """When a connection last broke."""

    @property
    def detail(self) -> str:
        """For people; empty if there is nothing to say."""
        if not self.ejected:
            return ""
        what = "on trial, one request at a time" if self.on_trial else f"ejected for {self.lasts:.0f} s"
        return f"{what}: {self.reason}"


def failed(outlier: Outlier, request: object, now: float, *, connection: bool) -> bool:
    """Count that `request` failed; `connection`: it was the connection that failed. Returns whether that is one more in
    a row. An endpoint that is ejected has been judged: only its trial counts."""
    on_trial = outlier.trial is request
    if outlier.ejected and not on_trial:
        return False
    if connection:
        same, outlier.broke_at = now - outlier.broke_at < SAME_INCIDENT_S, now
        if same and not on_trial:
            return False
    outlier.failures += 1
    return True


def may_eject(endpoints: int, ejected: int, others_serving: int, share: float) -> bool:
    """Whether one more of a pool's `endpoints` may be ejected, with `ejected` already so and `others_serving` left to
    take its requests."""
    return others_serving > 0 and ejected + 1 <= share * endpoints


def eject(outlier: Outlier, now: float, *, base: float, longest: float, jitter: float, reason: str) -> float:
    """Eject an endpoint, or one on trial again. Returns for how many seconds: `base`, doubled for each ejection in a
    row up to `longest`, less up to a tenth by `jitter` (0 to 1), so that gateways do not try in step."""
    if not outlier.ejected and now - outlier.readmitted_at > outlier.lasts:
        outlier.ejections = 0
    doublings = min(outlier.ejections, 30)
    outlier.lasts = min(base * 2.0**doublings, longest) * (1 - _JITTER * jitter)
    outlier.ejections += 1
    outlier.ejected = outlier.shut = True
    outlier.on_trial, outlier.trial = False, None
    outlier.reason = reason
    return outlier.lasts


def put_on_trial(outlier: Outlier) -> None:
    """The time of the ejection is over."""
    if outlier.ejected:
        outlier.on_trial, outlier.shut = True, False


def begin_trial(outlier: Outlier, request: object) -> None:
    """`request` is sent to an endpoint that is on trial: no other is until it ends."""
    outlier.trial, outlier.shut = request, True


def end_trial(outlier: Outlier) -> None:
    """The request on trial ended without a verdict: its client left, or had made a mistake."""
    outlier.trial, outlier.shut = None, outlier.ejected and not outlier.on_trial


def answered(outlier: Outlier, request: object, now: float, *, limit: int) -> None:
    """The engine has begun to answer `request`. A trial is passed by that; but if the answer breaks off, that is the
    last of the failures that the endpoint may have."""
    if outlier.trial is request:
        readmit(outlier, now)
        outlier.failures = limit - 1


def succeeded(outlier: Outlier) -> None:
    """An answer is complete."""
    outlier.failures = 0


def readmit(outlier: Outlier, now: float) -> None:
    """The endpoint takes requests like any other again."""
    outlier.ejected = outlier.shut = outlier.on_trial = False
    outlier.trial, outlier.reason = None, ""
    outlier.failures = 0
    outlier.readmitted_at = now
