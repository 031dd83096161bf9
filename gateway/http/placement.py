"""What the client is told of where its request went."""

from gateway.admission import POSITION_HEADER
from gateway.exchange import Exchange
from gateway.http.client_response import NOBODY, Headers


def placement(exchange: Exchange | None) -> Headers:
    """Headers about the last attempt: the endpoint, why it was chosen, the attempts there were, and the milliseconds
    from the request's head until it was sent there; of a request that had to wait, its place in the queue."""
    waited: Headers = ()
    if exchange is not None and exchange.position:
        waited = ((POSITION_HEADER, str(exchange.position)),)
    if exchange is None or exchange.attempt is None:
        return (("x-headrace-endpoint", NOBODY), *waited)
    attempt = exchange.attempt
    return (
        *waited,
        ("x-headrace-endpoint", attempt.endpoint.id),
        ("x-headrace-reason", attempt.reason),
        ("x-headrace-attempts", str(exchange.attempts)),
        ("x-headrace-queue-ms", f"{(exchange.attempt_started - exchange.started) * 1000:.1f}"),
    )
