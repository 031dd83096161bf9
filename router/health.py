"""What probes and failed requests say about an endpoint's phase.

Probes decide: an endpoint is ready when a probe says so and unhealthy when probes fail. A refused connection is proof
enough at once, while a probe that only ran out of time may have met a busy engine, so it takes `failures` of those in a
row. A request that cannot connect counts as such a proof as well: the next request must not have to find out again.

Requests that fail where probes succeed are judged for themselves (`router.outlier`), with an eye on the pool: some of
it must be left.
"""

from router import outlier
from router.fleet import Endpoint, EndpointState, Pool
from router.plan import SERVING
from router.spec.units import seconds, share


def probe_answered(state: EndpointState, *, ready: bool, detail: str) -> None:
    """The engine answered a probe."""
    state.failed_probes = 0
    if ready:
        state.phase = "ready"
    elif state.phase != "starting":
        state.phase = "unhealthy"
    state.detail = detail


def probe_failed(state: EndpointState, detail: str, *, refused: bool, limit: int) -> None:
    """A probe was refused a connection, or did not come back in time."""
    state.failed_probes += 1
    if state.phase == "starting":
        state.detail = detail
    if refused or state.failed_probes >= limit:
        down(state, detail)


def down(state: EndpointState, detail: str) -> None:
    """There is nothing at the endpoint's address; it takes no request until a probe is answered.

    An endpoint that has never been ready goes on as `starting`: it is not a failure yet.
    """
    state.downs += 1
    if state.phase != "starting":
        state.phase = "unhealthy"
    state.detail = detail


def request_failed(
    endpoint: Endpoint, pool: Pool, request: object, message: str, now: float, *, connection: bool, jitter: float
) -> float | None:
    """`request` failed by the fault of an endpoint of `pool`; `connection` and `jitter` as for `outlier.failed` and
    `outlier.eject`. Returns for how many seconds that ejects the endpoint, None if it does not."""
    record, spec = endpoint.state.outlier, pool.spec.outlier
    on_trial = record.trial is request
    counts = outlier.failed(record, request, now, connection=connection)
    if not counts or not (on_trial or record.failures >= spec.failures):
        return None
    others = [other for other in pool.endpoints if other.state is not endpoint.state]
    ejected = sum(other.state.outlier.ejected for other in others)
    serving = sum(map(_serves, others))
    if not outlier.may_eject(len(others) + 1, ejected, serving, share(spec.max_ejected)):
        if on_trial:
            outlier.readmit(record, now)
        return None
    base, longest = seconds(spec.base_ejection), seconds(spec.max_ejection)
    reason = f"{record.failures} failed requests in a row, the last: {message}"
    return outlier.eject(record, now, base=base, longest=longest, jitter=jitter, reason=reason)


def _serves(endpoint: Endpoint) -> bool:
    """Whether an endpoint takes requests like any other; one on trial takes but one."""
    return endpoint.phase in SERVING and not endpoint.state.outlier.ejected


def spare_the_last(pool: Pool, now: float) -> list[Endpoint]:
    """Readmit the ejected endpoints of a pool in which nobody else is left to take its requests. Returns them."""
    if any(map(_serves, pool.endpoints)):
        return []
    spared = [
        endpoint
        for endpoint in pool.endpoints
        if endpoint.state.outlier.ejected and endpoint.state.phase in SERVING
        and not endpoint.spec.drain and endpoint.spec.phase is None
    ]  # fmt: skip
    for endpoint in spared:
        outlier.readmit(endpoint.state.outlier, now)
    return spared
