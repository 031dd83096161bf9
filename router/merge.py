"""Lays the documents of all sources over one another and turns the result into the types of a fleet.

Per family and id, each document is a JSON object and a stronger source's fields replace a weaker one's, field by field
at the top level: file < discovery < operator < cli. Objects are laid over one another *before* conversion, because an
overlay such as `{"drain": true}` is no endpoint by itself. A route's `pool` and `pools` are two spellings of one thing,
so a document that sets either replaces both.

Nothing here raises for what a document holds. One bad document must not take the fleet away from everybody else: what
does not convert is left out and described in `MergedFleet.problems`. An id for which no source gives any of the fields
its type requires is only overlays whose base is gone (a drained endpoint that left the file); it is left out silently,
and counts again when the base returns.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from router.spec.documents import SOURCES, Document, EndpointFields, Family, Source
from router.spec.fleet import PoolSpec, RouteSpec, TenantSpec
from router.spec.strict import read_part

SINGULAR: dict[Family, str] = {"endpoints": "endpoint", "pools": "pool", "routes": "route", "tenants": "tenant"}
_REQUIRED: dict[Family, frozenset[str]] = {
    "endpoints": frozenset({"pool"}),
    "pools": frozenset({"protocol", "model"}),
    "routes": frozenset({"pool", "pools", "fallback"}),
    "tenants": frozenset({"keys"}),
}
"""Fields of which a base sets at least one; an endpoint's `id` is the document's and says nothing."""
_STRENGTH = {source: strength for strength, source in enumerate(SOURCES)}

_Spec = TypeVar("_Spec")


@dataclass(slots=True, frozen=True)
class MergedFleet:
    """A fleet as all sources together describe it; references between its parts are not checked yet."""

    endpoints: dict[str, EndpointFields]
    pools: dict[str, PoolSpec]
    routes: dict[str, RouteSpec]
    tenants: dict[str, TenantSpec]
    sources: dict[tuple[Family, str], tuple[Source, ...]]
    """Who speaks of an id, weakest first; ids that are left out of the fleet included."""
    problems: tuple[str, ...]


def merge(documents: Iterable[Document]) -> MergedFleet:
    """The fleet that `documents` describe together, whatever their order.

    Of two documents of one source about one id, the one with the higher generation counts.
    """
    newest: dict[tuple[Family, str, Source], Document] = {}
    for document in documents:
        key = (document.family, document.id, document.source)
        known = newest.get(key)
        if known is None or _age(known) < _age(document):
            newest[key] = document
    by_id: dict[tuple[Family, str], list[Document]] = {}
    for document in sorted(newest.values(), key=lambda d: (d.family, d.id, _STRENGTH[d.source])):
        by_id.setdefault((document.family, document.id), []).append(document)

    fleet = MergedFleet({}, {}, {}, {}, {}, ())
    problems: list[str] = []
    for (family, id_), layers in by_id.items():
        fleet.sources[family, id_] = tuple(layer.source for layer in layers)
        fields = _laid_over(layers, problems)
        if _REQUIRED[family].isdisjoint(fields):
            continue
        try:
            if family == "endpoints":
                fleet.endpoints[id_] = _convert({**fields, "id": id_}, EndpointFields)
            elif family == "pools":
                fleet.pools[id_] = _convert(fields, PoolSpec)
            elif family == "tenants":
                fleet.tenants[id_] = _convert(fields, TenantSpec)
            else:
                fleet.routes[id_] = _convert(fields, RouteSpec)
        except _UnusableError as error:
            problems.append(f"{_named(family, id_, fleet.sources[family, id_])} is left out: {error}")
    return MergedFleet(fleet.endpoints, fleet.pools, fleet.routes, fleet.tenants, fleet.sources, tuple(problems))


def _age(document: Document) -> tuple[int, bytes]:
    return document.generation, bytes(document.spec)


class _UnusableError(Exception):
    """Why fields make no spec, for people."""


def _convert(fields: dict[str, Any], type_: type[_Spec]) -> _Spec:
    try:
        return msgspec.convert(fields, type_)
    except msgspec.ValidationError as error:  # it names patterns; the reader of files has sentences
        _, found = read_part(fields, type_, tolerant=True)
        raise _UnusableError("; ".join(f"`{one.path}`: {one.message}" for one in found) or str(error)) from None


def _named(family: Family, id_: str, sources: tuple[Source, ...]) -> str:
    return f"{SINGULAR[family]} {id_} (from {', '.join(sources)})"


def _laid_over(layers: list[Document], problems: list[str]) -> dict[str, Any]:
    """The fields of `layers`, weakest first, over one another."""
    fields: dict[str, Any] = {}
    for layer in layers:
        try:
            over = msgspec.json.decode(layer.spec, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # a ValidationError is a DecodeError
            named = _named(layer.family, layer.id, (layer.source,))
            problems.append(f"{named}: its document is not a JSON object: {error}")
            continue
        if layer.family == "routes" and not over.keys().isdisjoint({"pool", "pools"}):
            fields.pop("pool", None)
            fields.pop("pools", None)
        fields.update(over)
    return fields
