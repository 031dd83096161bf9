"""The client's headers that an engine is to have, too."""

from collections.abc import Iterable, Iterator

from aiohttp import web

TRACE_CONTEXT = ("traceparent", "tracestate")
"""Which trace a request belongs to (W3C Trace Context, level 1): passed on with every request."""


def passed_headers(request: web.BaseRequest, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of `names` that the client sent, in that order. What is not printable ASCII is left out: it might end a
    line of the engine's request."""
    for name in names:
        value = request.headers.get(name)
        if value is not None and value.isascii() and value.isprintable():
            yield name, value
