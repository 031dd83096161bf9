"""The client's headers that an engine is to have, too."""

from collections.abc import Iterable, Iterator, Mapping

from gateway.credentials import AUTHORIZATION

TRACE_CONTEXT = ("traceparent", "tracestate")
"""Which trace a request belongs to (W3C Trace Context, level 1): passed on with every request."""


def authorization(headers: Mapping[str, str]) -> str:
    """A client's own Authorization, empty if there is none that could go on."""
    value = headers.get(AUTHORIZATION)
    return value if value is not None and _passes(value) else ""


def passed_headers(headers: Mapping[str, str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of `names` that a client sent among `headers`, in that order. What is not printable ASCII is left out: it
    might end a line of the engine's request."""
    for name in names:
        value = headers.get(name)
        if value is not None and _passes(value):
            yield name, value


def _passes(value: str) -> bool:
    return value.isascii() and value.isprintable()
