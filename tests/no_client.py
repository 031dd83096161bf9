"""A client for exchanges that are driven by hand: it always keeps up, and nobody asks who it is."""

from gateway.exchange import Origin
from gateway.upstream.base import UpstreamError


class NoClient:
    """See `gateway.exchange.Client`."""

    paused_since = 0.0
    resumed_at = 0.0

    def abort(self) -> None: ...

    def origin(self) -> Origin:
        raise NotImplementedError

    def refuse(self, error: UpstreamError) -> None: ...
