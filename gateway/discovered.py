"""How it is with the endpoints that discovery publishes, as far as a gateway can tell.

They go on being routed to whatever becomes of discovery, and probes go on finding out what is down; but pods that come
and go are no longer heard of, which an operator has to see.
"""

from router.fleet import FleetView
from router.state.follower import FleetStatus


def discovery_trouble(fleet: FleetView, state: FleetStatus) -> list[str]:
    """What is not as it should be, one sentence each; nothing for a fleet without pools that discover."""
    if all(pool.spec.discover is None for pool in fleet.pools.values()):
        return []
    if state.discovery is None:
        return [("nobody publishes the endpoints of pools with `discover`, which stay as last known; is `headrace "
                "discovery` running?")]  # fmt: skip
    return state.discovery.degraded
