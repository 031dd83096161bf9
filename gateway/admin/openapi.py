"""The OpenAPI document of the admin API, made of the table of its operations and of the types they take and give.

Bodies are read strictly, so unknown keys are flagged in their schemas. What a schema cannot say (that a pool exists,
that an address is not an endpoint's already) is refused with a 400 or 409 that says so.
"""

import functools
import sys
from typing import Any

import msgspec

from gateway.admin import TOKEN_HEADER
from gateway.admin.operations import OPERATIONS, Operation
from gateway.http.errors import Error
from router.spec.schema import explanations
from router.spec.units import Name

_REF = "#/components/schemas/"
_JSON = "application/json"
_NAME = "name"


@functools.cache
def document_text() -> str:
    """The document as it is served, and as `docs/admin-openapi.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(_document()), indent=2).decode() + "\n"


def _document() -> dict[str, Any]:
    bodies = [one.body for one in OPERATIONS if one.body is not None]
    queries = [one.query for one in OPERATIONS if one.query is not None]
    answers = [one.answer for one in OPERATIONS if isinstance(one.answer, type) and one.answer is not dict]
    _, strict = msgspec.json.schema_components(bodies, ref_template=_REF + "{name}")
    _, schemas = msgspec.json.schema_components([*bodies, *answers, *queries, Error], ref_template=_REF + "{name}")
    for name, schema in schemas.items():
        if name in strict:
            schema["additionalProperties"] = False
    _explain(schemas, [*bodies, *answers, *queries, Error])
    parameters = {one.name: _parameters(one, schemas) for one in OPERATIONS}
    for query in queries:
        del schemas[query.__name__]
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, parameters[one.name])
    refused = {"description": "Refused; the message says why.", "content": {_JSON: {"schema": _ref(Error)}}}
    scheme = {
        "type": "apiKey",
        "in": "header",
        "name": TOKEN_HEADER,
        "description": "The value of HEADRACE_ADMIN_TOKEN. A gateway without one asks for none as long as only its own "
        "machine can reach the port, and else lets nobody in.",
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headrace admin API",
            "version": "1",
            "description": "What operators, and `headrace` on the command line, see of a fleet and change about it.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas, "responses": {"Refused": refused}, "securitySchemes": {"token": scheme}},
    }


def _operation(one: Operation, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": one.name, "summary": one.summary}
    if one.guarded:
        described["security"] = [{"token": []}]
    if parameters:
        described["parameters"] = parameters
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(one.body)}}}
    if isinstance(one.answer, str):
        content: dict[str, Any] = {one.answer: {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": {"type": "object"} if one.answer is dict else _ref(one.answer)}}
    said = {status: {"description": "As asked for.", "content": content} for status in (one.status, *one.also)}
    statuses = list(one.refusals)
    if one.body is not None or one.query is not None or one.names_what_is_made:
        statuses.append(400)
    if one.body is not None:
        statuses.append(413)
    if one.guarded:
        statuses += [401, 403]
    told = said | {status: {"$ref": "#/components/responses/Refused"} for status in statuses}
    described["responses"] = {str(status): told[status] for status in sorted(told)}
    return described


def _parameters(one: Operation, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """The name in an operation's path, and its query."""
    found: list[dict[str, Any]] = []
    if f"{{{_NAME}}}" in one.path:
        what = "The name; what is not plain in it has to be escaped, a slash may be."
        schema = msgspec.json.schema(Name) if one.names_what_is_made else {"type": "string", "minLength": 1}
        found.append({"name": _NAME, "in": "path", "required": True, "description": what, "schema": schema})
    if one.query is not None:
        for name, schema in schemas[one.query.__name__]["properties"].items():
            wanted = dict(schema)
            about = {"description": wanted.pop("description")} if "description" in wanted else {}
            found.append({"name": name, "in": "query", "required": False, **about, "schema": wanted})
    return found


def _ref(type_: object) -> dict[str, str]:
    assert isinstance(type_, type)
    return {"$ref": _REF + type_.__name__}


def _explain(schemas: dict[str, Any], roots: list[type]) -> None:
    """Give fields the explanations that stand under them in their types' source."""
    for type_ in _structs(roots):
        for base in reversed(type_.__mro__):
            if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
                continue
            for field, text in explanations(sys.modules[base.__module__]).get(base.__name__, {}).items():
                schemas[type_.__name__]["properties"][field]["description"] = text


def _structs(roots: list[type]) -> list[type]:
    """The structs that `roots` are and hold."""
    found: dict[type, None] = {}

    def look(type_: msgspec.inspect.Type) -> None:
        match type_:
            case msgspec.inspect.StructType(cls=cls) if cls not in found:
                found[cls] = None
                for one in type_.fields:
                    look(one.type)
            case msgspec.inspect.UnionType(types=types):
                for one_of in types:
                    look(one_of)
            case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
                look(item)
            case msgspec.inspect.DictType(value_type=value):
                look(value)
            case msgspec.inspect.Metadata(type=inner):
                look(inner)

    for root in roots:
        look(msgspec.inspect.type_info(root))
    return list(found)


if __name__ == "__main__":
    sys.stdout.write(document_text())
