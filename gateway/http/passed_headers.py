"""The client's headers that an engine is to have, too."""

from collections.abc import Iterable, Iterator, Mapping

from gateway.credentials import AUTHORIZATION

TRACE_CONTEXT = ("traceparent", "tracestate")
"""Which trace a request belongs to (W3C Trace Context, level 1): passed on with every request."""


def authorization(headers: Mapping[str, str]) -> str:
    """A client's own Authorization, empty if there is none that could go on."""
    return next((value for _, value in passed_headers(headers, (AUTHORIZATION,))), "")


def passed_headers(headers: Mapping[str, str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of `names` that a client sent among `headers`, in that order. What is not printable ASCII is left out: it
    might end a line of the engine's request."""
    for name in names:
        value = headers.get(name)
        if value is not None and value.isascii() and value.isprintable():
            yield name, value
