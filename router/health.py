"""What probes and failed requests say about an endpoint's phase.

Probes decide: an endpoint is ready when a probe says so and unhealthy when probes fail. A refused connection is proof
enough at once, while a probe that only ran out of time may have met a busy engine, so it takes `failures` of those in a
row. A request that cannot connect counts as such a proof as well: the next request must not have to find out again.
"""

from router.fleet import EndpointState


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
    if refused or state.failed_probes >= limit:
        down(state, detail)


def down(state: EndpointState, detail: str) -> None:
    """There is nothing at the endpoint's address; it takes no request until a probe is answered.

    An endpoint that has never been ready goes on as `starting`: it is not a failure yet.
    """
    if state.phase != "starting":
        state.phase = "unhealthy"
    state.detail = detail
