"""The JSON Schema of a fleet file, generated from the types.

msgspec writes most of it. Added here is what makes it useful in an editor: unknown keys are flagged
(`additionalProperties: false`, since the schema describes files written by people, which are read strictly), and every
field shows its explanation. Explanations are the strings under the fields in the types' source: Python does not keep
them, so they are taken from the source text.
"""

import ast
import functools
import inspect
from types import ModuleType
from typing import Any

import msgspec

from router.spec import fleet, gateway

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def fleet_schema() -> dict[str, Any]:
    """The schema of `fleet.yaml`, draft 2020-12."""
    schema = msgspec.json.schema(fleet.FleetSpec)
    explained = explanations(fleet) | explanations(gateway)
    for name, definition in schema["$defs"].items():
        definition["additionalProperties"] = False
        for field, text in explained.get(name, {}).items():
            property_ = definition["properties"][field]
            # On the field itself: inside an `anyOf` an editor would not show it.
            also = property_.get("description")
            property_["description"] = f"{text} {also}" if also else text
    return {"$schema": _DIALECT, "title": "headrace fleet file", **schema}


@functools.cache
def explanations(module: ModuleType) -> dict[str, dict[str, str]]:
    """The strings under the fields of each class in `module`."""
    found: dict[str, dict[str, str]] = {}
    for class_ in ast.parse(inspect.getsource(module)).body:
        if not isinstance(class_, ast.ClassDef):
            continue
        fields = found.setdefault(class_.name, {})
        for statement, following in zip(class_.body, class_.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=field)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    fields[field] = inspect.cleandoc(text)
    return found
