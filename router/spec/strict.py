"""Strict reading of a fleet file: every mistake in it, each with line, column and path.

The types of `router.spec.fleet` are tolerant, because gateways of two versions must understand one another's documents.
A file is written by a person, and there a key nobody knows is a typing mistake that would otherwise be silently without
effect. So a file is read in three steps:

1. `router.spec.yaml_nodes` turns the text into nodes that know their position;
2. the walk in this module goes through the nodes and the types' descriptions (`msgspec.inspect`) side by side, notes
   every disagreement, and builds plain values from what agrees. It knows only kinds of types, no field by name:
   a field added to the types is read strictly at once;
3. what could be built becomes a `FleetSpec`, and `router.spec.references` looks at how its parts fit together.

A refused value is left out and the walk goes on, so that one run shows as many mistakes as possible. What step 3 then
finds about a part that already had a mistake inside it is probably its consequence and is not reported. What a mistake
makes unreadable as a whole (a pool without its protocol) step 3 does not see, so a second run may show more.

What a person sends to the admin API is JSON and read by the same walk (`read_part`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import yaml
from msgspec import inspect

from router.spec.fleet import FleetSpec
from router.spec.references import Path, findings
from router.spec.wording import choice_fault, did_you_mean, only_type, shown, text_fault
from router.spec.yaml_nodes import MAX_NODES, Place, YamlError, compose, kind_of, node_of, place_of

_WANTED: Mapping[type[inspect.Type], str] = {
    inspect.StructType: "a mapping",
    inspect.DictType: "a mapping",
    inspect.ListType: "a list",
    inspect.StrType: "a string",
    inspect.LiteralType: "a string",
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
}
_FOUND: Mapping[str | None, str] = {
    "null": "nothing",
    "bool": "true or false",
    "int": "a number",
    "float": "a number",
    "str": "a string",
    "map": "a mapping",
    "seq": "a list",
}
_LARGEST_INT = 2**63 - 1
_TOP = Place(1, 1)

_Spec = TypeVar("_Spec")

MAX_PROBLEMS = 100
"""Reading ends here: who has made more mistakes has made one of them very often."""


class Problem(msgspec.Struct, frozen=True):
    """One thing to tell the author of a configuration."""

    path: str
    """`pools.smollm.endpoints[0].grpc`; empty for the file as a whole; an environment variable's name."""
    message: str
    line: int | None = None
    """From 1; None for what is not in a file."""
    column: int | None = None
    file: str | None = None
    """Which one, where a fleet is read from several."""

    def render(self, file: str) -> str:
        """`FILE:LINE:COLUMN: path: message`, without the parts there are none of; a variable has no file."""
        where = f"{self.file or file}:{self.line}:{self.column}" if self.line is not None else "" if self.path else file
        return ": ".join(part for part in (where, self.path, self.message) if part)


@dataclass(frozen=True, slots=True)
class Reading:
    """What strict reading made of a text. `fleet` is there exactly if there are no `problems`."""

    fleet: FleetSpec | None
    readable: FleetSpec | None
    """What could be read of the fleet, whatever is wrong with the rest: the files it names can be looked at."""
    problems: list[Problem]
    warnings: list[Problem]
    places: Mapping[Path, Place] = field(repr=False)

    def problem_at(self, path: Path, message: str) -> Problem:
        """A problem about `path`, at its line or that of the nearest part around it that the file has."""
        return _problem(_nearest(self.places, path), path, message)


def read_fleet(text: str) -> Reading:
    """Read a fleet file's text. Pure: files it names (chat templates) are not looked at."""
    walk = _Walk()
    try:
        walk.value(compose(text), inspect.type_info(FleetSpec), (), _TOP)
        # A fleet whose name is missing or refused is looked at all the same.
        fleet = msgspec.convert({"fleet": "unnamed", **walk.root}, FleetSpec)
    except YamlError as error:
        return Reading(None, None, [_problem(error.place, (), str(error))], [], {})
    except _EnoughError:
        fleet = None
    problems, warnings = walk.problems, list[Problem]()
    if fleet is not None:
        within_faulty = {path[:length] for path in walk.faulty for length in range(len(path) + 1)}
        written_pools = [str(path[1]) for path in walk.places if len(path) == 2 and path[0] == "pools"]
        for finding in findings(fleet, written_pools):
            if len(problems) == MAX_PROBLEMS:
                break
            path = walk.as_written(finding.path)
            if path not in within_faulty:
                found = _problem(_nearest(walk.places, path), path, finding.message)
                (warnings if finding.warning else problems).append(found)
    problems.sort(key=lambda problem: (problem.line or 0, problem.column or 0))
    if len(problems) == MAX_PROBLEMS:
        last = problems[-1]
        problems.append(Problem("", f"reading ended after {MAX_PROBLEMS} mistakes", last.line, last.column))
    return Reading(None if problems else fleet, fleet, problems, warnings, walk.places)


def read_part(value: object, type_: type[_Spec], *, tolerant: bool = False) -> tuple[_Spec | None, list[Problem]]:
    """Read a part of a fleet that came as JSON as strictly as a file: the part, or the problems with it.

    `value` is what the JSON was decoded to; `tolerant` takes keys nobody knows. The problems' lines mean nothing.
    """
    walk = _Walk(tolerant=tolerant)
    try:
        plain = walk.value(node_of(value), inspect.type_info(type_), (), _TOP)
    except YamlError as error:
        return None, [Problem("", str(error))]
    except RecursionError:
        return None, [Problem("", "is nested too deep")]
    except _EnoughError:
        plain = _REFUSED
    return None if walk.problems else msgspec.convert(plain, type_), walk.problems


def path_text(path: Path) -> str:
    """`pools.smollm.endpoints[0]`; a name with a dot in it is quoted: `routes["Llama-3.1"]`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.replace("-", "").replace("_", "").replace("/", "").isalnum():
            text += f".{step}" if text else step
        else:
            text += f'["{step if len(step) <= 130 else step[:127] + "..."}"]'
    return text


def _problem(place: Place, path: Path, message: str) -> Problem:
    return Problem(path_text(path), message, place.line, place.column)


def _nearest(places: Mapping[Path, Place], path: Path) -> Place:
    while path and path not in places:
        path = path[:-1]
    return places.get(path, _TOP)


class _EnoughError(Exception):
    """There are as many problems as a reader of them will want."""


class _Refused:
    """Stands for a value that was refused, in the plain values."""


_REFUSED = _Refused()


@dataclass(slots=True)
class _Walk:
    problems: list[Problem] = field(default_factory=list)
    faulty: list[Path] = field(default_factory=list)
    places: dict[Path, Place] = field(default_factory=dict)
    kept: dict[Path, list[int]] = field(default_factory=dict)
    """Of lists with refused items, the indices of the others in the text."""
    root: dict[str, object] = field(default_factory=dict)
    """What agreed of the outermost mapping, whatever it lacks."""
    steps: int = 0
    tolerant: bool = False

    def as_written(self, path: Path) -> Path:
        """The path in the text of what is at `path` in the plain values."""
        written: Path = ()
        for step in path:
            written += (self.kept[written][step] if isinstance(step, int) and written in self.kept else step,)
        return written

    def refuse(self, place: Place, path: Path, message: str) -> _Refused:
        self.problems.append(_problem(place, path, message))
        self.faulty.append(path)
        if len(self.problems) == MAX_PROBLEMS:
            raise _EnoughError
        return _REFUSED

    def value(self, node: yaml.Node, type_: inspect.Type, path: Path, place: Place) -> object:
        """The plain value of `node`, or `_REFUSED`. `place` is where a reader looks for the value: its key."""
        self.steps += 1
        if self.steps > MAX_NODES:  # each alias is walked again wherever it stands
            raise YamlError(f"its aliases unfold to more than {MAX_NODES} values", place_of(node))
        self.places[path] = place
        if isinstance(type_, inspect.UnionType) and kind_of(node) == "null":
            return None
        kind = kind_of(node)
        type_ = only_type(type_, mapping=kind == "map", number=kind in ("int", "float"))
        match type_, node:
            case inspect.StructType(), yaml.MappingNode() if kind_of(node) == "map":
                return self.struct(node, type_, path, place)
            case inspect.DictType(), yaml.MappingNode() if kind_of(node) == "map":
                return self.mapping(node, type_, path)
            case inspect.ListType(), yaml.SequenceNode() if kind_of(node) == "seq":
                items = [
                    self.value(item, type_.item_type, (*path, index), place_of(item))
                    for index, item in enumerate(node.value)
                ]
                kept = [index for index, item in enumerate(items) if item is not _REFUSED]
                if len(kept) < len(items):
                    self.kept[path] = kept
                return [items[index] for index in kept]
            case _, yaml.ScalarNode():
                return self.scalar(node, type_, path)
        return self.refuse(place_of(node), path, _mismatch(node, type_))

    def entries(self, node: yaml.MappingNode, path: Path) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key and value nodes by key; a key given twice counts the first time."""
        entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.refuse(place_of(key), path, "a key must be a plain word")
            elif key.value in entries:
                first = place_of(entries[key.value][0]).line
                self.refuse(place_of(key), (*path, key.value), f"duplicate key; the first is on line {first}")
            else:
                entries[key.value] = (key, value)
        return entries

    def struct(self, node: yaml.MappingNode, type_: inspect.StructType, path: Path, place: Place) -> object:
        fields = {one.encode_name: one for one in type_.fields}
        entries = self.entries(node, path)
        missing = [name for name, one in fields.items() if one.required and name not in entries]
        plain: dict[str, object] = {}
        for name, (key, value) in entries.items():
            if name in fields:
                plain[name] = self.value(value, fields[name].type, (*path, name), place_of(key))
            elif self.tolerant:
                continue
            elif name == "<<":
                self.refuse(place_of(key), (*path, name), "merge keys are not supported; write the fields out")
            else:
                known = [one for one in fields if one not in entries]
                hint = did_you_mean(name, known) or f"; known here: {', '.join(fields)}"
                self.refuse(place_of(key), (*path, name), f"unknown key{hint}")
        for name in missing:
            self.refuse(place, (*path, name), "is missing")
        plain = {name: value for name, value in plain.items() if value is not _REFUSED}
        if not path:
            self.root = plain
        if any(one.required and name not in plain for name, one in fields.items()):
            return _REFUSED
        return plain

    def mapping(self, node: yaml.MappingNode, type_: inspect.DictType, path: Path) -> object:
        plain: dict[str, object] = {}
        for name, (key, value) in self.entries(node, path).items():
            named = self.scalar(yaml.ScalarNode(_STR, name, key.start_mark), only_type(type_.key_type), (*path, name))
            item = self.value(value, type_.value_type, (*path, name), place_of(key))
            if _REFUSED not in (named, item):
                plain[name] = item
        return plain

    def scalar(self, node: yaml.ScalarNode, type_: inspect.Type, path: Path) -> object:
        kind, text = kind_of(node), str(node.value)
        fault: str | None
        plain: object = text
        match type_:
            case inspect.StrType() if kind == "str" or (kind in ("int", "float") and type_.pattern is not None):
                # A bare number where the type has a pattern is told what it lacks: a unit, a port.
                fault = text_fault(text, type_.pattern)
                if fault is None and kind != "str":
                    fault = _mismatch(node, type_)
                if fault is None and len(text) < (type_.min_length or 0):
                    fault = "is empty"
            case inspect.LiteralType() if kind == "str":
                fault = choice_fault(text, type_.values)
            case inspect.IntType() if kind == "int":
                plain, fault = _integer(text, type_)
            case inspect.FloatType() if kind in ("int", "float"):
                plain = float(text)
                fault = "is too large" if math.isinf(plain) else _range_fault(plain, type_)
            case inspect.BoolType() if kind == "bool":
                plain, fault = text.lower() == "true", None
            case _:
                fault = _mismatch(node, type_)
        return plain if fault is None else self.refuse(place_of(node), path, fault)


_STR = "tag:yaml.org,2002:str"


def _integer(text: str, type_: inspect.IntType) -> tuple[int, str | None]:
    number = int(text) if len(text) <= 20 else _LARGEST_INT + 1
    if abs(number) > _LARGEST_INT:
        return number, "is too large"
    return number, _range_fault(number, type_)


def _range_fault(number: float, type_: inspect.IntType | inspect.FloatType) -> str | None:
    if type_.ge is not None and number < type_.ge:
        return f"must be at least {type_.ge}"
    if type_.gt is not None and number <= type_.gt:
        return f"must be greater than {type_.gt}"
    if type_.le is not None and number > type_.le:
        return f"must be at most {type_.le}"
    return None


def _mismatch(node: yaml.Node, type_: inspect.Type) -> str:
    kind = kind_of(node)
    if kind is None:
        return f"the tag {shown(node.tag)} has no meaning in a fleet file"
    wanted = _WANTED[type(type_)]
    if kind == "null":
        return f"has no value; expected {wanted}"
    text = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
    hint = ""
    match type_:
        case inspect.StrType() if kind in ("int", "float", "bool") and len(text) <= 60:
            hint = f'; write "{text}"'
        case inspect.StructType(fields=(only,)) if kind == "str":
            hint = f"; write {{{only.encode_name}: ...}}"
        case inspect.ListType() if kind == "str" and isinstance(type_.item_type, (inspect.Metadata, inspect.StrType)):
            hint = "; put it in brackets: [...]"
        case inspect.IntType() | inspect.FloatType() if kind == "str" and text.isdecimal():
            hint = "; write it without quotes"
        case inspect.BoolType() if text.lower() in ("yes", "no", "on", "off", "y", "n"):
            hint = f"; write {'true' if text.lower() in ('yes', 'on', 'y') else 'false'}"
    return f"expected {wanted}, found {_FOUND[kind]}{hint}"
