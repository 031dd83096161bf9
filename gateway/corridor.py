"""What every request meets on its way, whichever API it comes by.

The fronts differ in how they read requests and word answers. Who may come in, how much may be taken, who waits and
where requests can go is one for all of them: it is made once for the process (`gateway.app`) and handed to each.
"""

from dataclasses import dataclass

from gateway.access import Access
from gateway.admission import Admission
from gateway.exchange import LiveExchanges
from gateway.fleet import LiveFleet
from gateway.http.client_addresses import ClientAddresses
from gateway.limits import Limiter
from gateway.metrics import Metrics
from gateway.overload import OverloadWatch


@dataclass(frozen=True, slots=True)
class Corridor:
    """In the order in which a request comes to it."""

    access: Access
    overload: OverloadWatch
    addresses: ClientAddresses
    limiter: Limiter
    admission: Admission
    fleet: LiveFleet
    live: LiveExchanges
    metrics: Metrics
    exposes_routing: bool
    """Whether answers tell where their requests went, and why."""
