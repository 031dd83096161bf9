"""YAML text as nodes that know their line and column, within limits.

PyYAML's composer stops one step before Python values: its nodes still carry marks, and a mapping still holds the keys
that a dict would silently merge. Three things are added here.

**YAML 1.2's reading of plain words.** PyYAML follows YAML 1.1, where `off` and `no` are booleans and `12:30` is a
number. In a fleet file `total: off` is a word and `zone: no` a zone, as every editor shows them, so only `true`,
`false`, `null`, `~` and decimal numbers are anything but strings.

**Limits.** The text, its nesting and its nodes are counted while they are read: a file beyond them is refused in one
sentence instead of exhausting memory or Python's stack. Aliases cost nothing here, an alias is the same node again;
whoever walks the nodes must count its own steps.

**One error.** Whatever PyYAML raises becomes a `YamlError` with a position.
"""

import re
from typing import NamedTuple, NoReturn

import yaml

MAX_CHARACTERS = 1024 * 1024
MAX_NODES = 50_000
MAX_DEPTH = 32

_PREFIX = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "map", "seq")


class Place(NamedTuple):
    """Line and column, both from 1."""

    line: int
    column: int


class YamlError(ValueError):
    """The text is not YAML that a fleet file may consist of."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(message)
        self.place = place


def place_of(node: yaml.Node) -> Place:
    """Where the node starts."""
    return _place(node.start_mark)


def kind_of(node: yaml.Node) -> str | None:
    """`null`, `bool`, `int`, `float`, `str`, `map` or `seq`; None for a tag that a fleet file has no use for."""
    kind = node.tag.removeprefix(_PREFIX)
    return kind if kind in _KINDS else None


def node_of(value: object) -> yaml.Node:
    """What JSON was decoded to, as nodes that all start at the first character. May raise RecursionError."""
    mark = yaml.Mark("", 0, 0, 0, None, 0)

    def scalar(kind: str, text: str) -> yaml.Node:
        return yaml.ScalarNode(_PREFIX + kind, text, mark)

    match value:
        case None:
            return scalar("null", "null")
        case bool():
            return scalar("bool", str(value).lower())
        case int():
            return scalar("int", str(value))
        case float():
            return scalar("float", repr(value))
        case list():
            return yaml.SequenceNode(_PREFIX + "seq", [node_of(item) for item in value], mark)
        case dict():
            entries = [(scalar("str", str(key)), node_of(item)) for key, item in value.items()]
            return yaml.MappingNode(_PREFIX + "map", entries, mark)
    return scalar("str", str(value))


def compose(text: str) -> yaml.Node:
    """The root node of the only document in `text`.

    Raises `YamlError` for a syntax error, an empty text, or one beyond the limits.
    """
    if len(text) > MAX_CHARACTERS:
        raise YamlError(f"larger than {MAX_CHARACTERS} characters, the most a fleet file may have", Place(1, 1))
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Place(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        raise YamlError(f"not valid YAML: the character {error.character!r} is not allowed", place) from None
    try:
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error) from None
    except (ValueError, OverflowError) as error:  # an escape or directive whose number PyYAML cannot convert
        if isinstance(error, YamlError):
            raise
        raise YamlError(f"not valid YAML: {error}", _place(loader.get_mark())) from None
    finally:
        loader.dispose()
    if node is None:
        raise YamlError("the file is empty; it needs at least `fleet: NAME`", Place(1, 1))
    return node


def _place(mark: yaml.Mark) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _syntax_error(error: yaml.MarkedYAMLError) -> YamlError:
    mark = error.problem_mark or error.context_mark
    what = ", ".join(part for part in (error.problem, error.context) if part)
    hint = "; indent with spaces, not tabs" if "'\\t'" in what else ""
    return YamlError(f"not valid YAML: {what}{hint}", _place(mark) if mark is not None else Place(1, 1))


class _Loader(yaml.SafeLoader):
    """PyYAML's composer, counting nodes and depth, with the plain words of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML declares it so)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            self._refuse(f"nested deeper than {MAX_DEPTH} levels")
        if self._nodes > MAX_NODES:
            self._refuse(f"more than {MAX_NODES} values, the most a fleet file may have")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and any("\ud800" <= character <= "\udfff" for character in node.value):
            raise YamlError("a \\u escape of half a character; write the character itself", place_of(node))
        return node

    def _refuse(self, message: str) -> NoReturn:
        raise YamlError(message, _place(self.peek_event().start_mark))  # type: ignore[no-untyped-call]


_Loader.add_implicit_resolver(_PREFIX + "null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_PREFIX + "bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(_PREFIX + "int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _PREFIX + "float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
