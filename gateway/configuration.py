"""The configuration in force, value by value, and where each value comes from.

What is in `gateway` and `redis` is this gateway's own: from its file, a variable of its environment, or a default. The
fleet is made of documents, laid over one another field by field (`router.merge`): a value comes from the strongest that
has its field. A document of the source `file` that another gateway has published is told apart from one's own file.

Secrets are not shown: passwords and queries in URLs are masked, of the admin token only whether there is one. Keys are
known by their hashes, as everywhere.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from gateway.log_levels import LogLevel
from router.merge import MergedFleet
from router.spec.documents import FAMILIES, SOURCES, Document, Family
from router.spec.fleet import FleetSpec
from router.spec.references import Path
from router.spec.strict import path_text

MOST_ROWS = 10_000
SHOWN_CHARACTERS = 1000
"""Of a text; a chat template may have many."""
MASK = "***"
_CREDENTIALS = re.compile(r"(?<=://)\S*@")  # up to the last: a password may hold one
_QUERY = re.compile(r"(?<=\?)\S+")
_STRENGTH = {source: strength for strength, source in enumerate(SOURCES)}


class Setting(Struct, frozen=True, kw_only=True):
    """One value in force."""

    path: str
    """As in the fleet file (`gateway.retry.budget`); endpoints stand under their ids, and what is in no file by itself:
    `config`, `workers`, `admin_token`, `log_level`, `log_format`, `log_levels`."""
    value: Any
    """Texts are cut after a thousand characters."""
    origin: Literal["default", "file", "environment", "flag", "document", "admin"]
    """`document`: of the fleet's shared state; `admin`: set over the admin API, until the gateway ends."""
    where: str | None = None
    """The file, the variable or the flag; of a document, its source."""


class SettingFilter(Struct, frozen=True, kw_only=True):
    """Which values are to be listed."""

    prefix: str = ""
    """What their paths begin with."""
    defaults: bool = True
    """Those, too, that nobody has said anything about."""
    limit: Annotated[int, Meta(ge=1, le=MOST_ROWS)] = MOST_ROWS


class SettingList(Struct, frozen=True, kw_only=True):
    settings: list[Setting]
    matching: int
    """How many there are; more than are listed, if that was limited."""
    problems: list[str]
    """What is wrong with the documents that describe the fleet."""


class Origins(Struct, frozen=True, kw_only=True):
    """What is known of where a gateway's own values come from."""

    file: str = ""
    content_hash: str = ""
    """Of what the file publishes."""
    given: frozenset[str] = frozenset()
    """The paths of what the file says, without those of endpoints."""
    variables: Mapping[str, str] = {}
    """By path, the variable that says something else than the file."""
    process: tuple[Setting, ...] = ()
    """What is no part of a fleet file."""

    def reread(self, given: Collection[str], content_hash: str, fixed: Iterable[str]) -> "Origins":
        """After the file was read again, of which `redis` and the `fixed` fields of `gateway` stay as they were."""
        kept = re.compile("|".join([r"redis\b", *(rf"gateway\.{re.escape(name)}\b" for name in fixed)]))
        stays = {path for path in self.given if kept.match(path)}
        changed = {path for path in given if not kept.match(path)}
        return structs.replace(self, given=frozenset(stays | changed), content_hash=content_hash)


@dataclass(frozen=True, slots=True)
class InForce:
    """What a gateway goes by."""

    spec: FleetSpec
    """Its own."""
    origins: Origins
    merged: MergedFleet
    documents: Iterable[Document]
    """What `merged` was made of."""
    log_levels: Mapping[str, LogLevel]
    """Those that were set over the admin API."""


def list_settings(in_force: InForce, wanted: SettingFilter, problems: list[str]) -> SettingList:
    """The values in force that are `wanted`."""
    listed: list[Setting] = []
    matching = 0
    for one in _settings(in_force, wanted.prefix):
        if one.path.startswith(wanted.prefix) and (wanted.defaults or one.origin != "default"):
            matching += 1
            if matching <= wanted.limit:
                listed.append(one)
    return SettingList(settings=listed, matching=matching, problems=problems)


def _settings(in_force: InForce, prefix: str) -> Iterator[Setting]:
    spec, origins = in_force.spec, in_force.origins
    yield from origins.process
    for name, level in sorted(in_force.log_levels.items()):
        yield Setting(path=path_text(("log_levels", name)), value=level, origin="admin")
    yield Setting(path="fleet", value=spec.fleet, origin="file", where=origins.file)
    for path, value in (*_leaves(("redis",), spec.redis), *_leaves(("gateway",), spec.gateway)):
        yield _own(path, value, origins)
    layers: dict[tuple[Family, str], list[Document]] = {}
    for document in in_force.documents:
        layers.setdefault((document.family, document.id), []).append(document)
    for family in FAMILIES:
        if not (family.startswith(prefix) or prefix.startswith(family)):
            continue
        of_family: Mapping[str, Struct] = getattr(in_force.merged, family)
        for id_, one in sorted(of_family.items()):
            fields = _said(layers.get((family, id_), ()))
            for path, value in _leaves((family, id_), one):
                if path[2:] != ("id",) and path[2:] != ("endpoints",):
                    yield _of_document(path, value, fields, origins)


def _own(path: Path, value: object, origins: Origins) -> Setting:
    text = path_text(path)
    shown = masked(value)
    if (variable := origins.variables.get(text)) is not None:
        return Setting(path=text, value=shown, origin="environment", where=variable)
    if text in origins.given:
        return Setting(path=text, value=shown, origin="file", where=origins.file)
    return Setting(path=text, value=shown, origin="default")


def _of_document(path: Path, value: object, fields: "dict[str, tuple[Document, Any]]", origins: Origins) -> Setting:
    text, shown, own = path_text(path), masked(value), ("file", origins.content_hash)
    document, said = fields.get(str(path[2]), (None, None))
    for step in path[3:]:
        said = said.get(step) if isinstance(said, dict) else None
    if document is not None and said is not None and (document.source, document.content_hash) != own:
        return Setting(path=text, value=shown, origin="document", where=document.source)
    if (document is not None and said is not None) or text in origins.given:
        return Setting(path=text, value=shown, origin="file", where=origins.file)
    return Setting(path=text, value=shown, origin="default")


def _said(layers: Iterable[Document]) -> dict[str, tuple[Document, Any]]:
    """The fields that documents about one id have, each with the strongest that has it and what it says."""
    fields: dict[str, tuple[Document, Any]] = {}
    for document in sorted(layers, key=lambda one: (_STRENGTH[one.source], one.generation)):
        try:
            said = msgspec.json.decode(document.spec, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # it is left out of the fleet, too
        fields |= {field: (document, value) for field, value in said.items()}
    return fields


def _leaves(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """The values in a struct, with what is at its default."""
    if not isinstance(value, Struct):
        yield path, value
        return
    for field in value.__struct_fields__:
        yield from _leaves((*path, field), getattr(value, field))


def masked(value: object) -> Any:
    """A value as it may be shown, as JSON."""
    match msgspec.to_builtins(value):
        case str(text):
            text = _CREDENTIALS.sub(f"{MASK}@", text)
            if text.startswith(("http://", "https://")):  # where keys are put
                text = _QUERY.sub(MASK, text)
            more = len(text) - SHOWN_CHARACTERS
            return text if more <= 0 else f"{text[:SHOWN_CHARACTERS]}... ({more} characters more)"
        case list(items):
            return [masked(item) for item in items]
        case dict(items):
            return {name: masked(item) for name, item in items.items()}
        case other:
            return other
