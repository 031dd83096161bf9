"""The OpenAPI document of the client-facing HTTP API, made of the tables by which the front tells requests apart.

It is about what the gateway itself holds a request to, and what it answers by itself. Everything else in a body is the
engine's: passed on unread, so the schemas leave it open. Its answers pass through, too, so they are objects here and no
more.
"""

from typing import Any

import msgspec

from gateway.http.front import APIS, OPENAPI
from gateway.http.kserve_paths import METHODS, Operation

_JSON, _EVENTS, _ANY = "application/json", "text/event-stream", "application/octet-stream"
_OBJECT = {"type": "object"}
_SUMMARIES = {
    "chat.completions": "Answer a conversation.",
    "completions": "Go on with a prompt.",
    "embeddings": "Embed texts.",
    "metadata": "What Triton says of a model.",
    "ready": "Whether a model is ready.",
    "config": "How Triton is configured for a model.",
    "stats": "Triton's statistics of a model.",
    "infer": "Run a model on tensors.",
    "generate": "Run a model on a prompt.",
    "generate_stream": "Run a model on a prompt, and get its answer as events.",
}


def document_text() -> str:
    """The document as it is served, and as `docs/openapi.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(_document()), indent=2).decode() + "\n"


def _document() -> dict[str, Any]:
    paths: dict[str, Any] = {path: {"post": _openai(api)} for path, api in APIS.items()}
    paths["/v1/models"] = {"get": _own("models", "The routes that the caller may use.", _ref("Models"))}
    one = _own("model", "One of them.", _ref("Model"))
    paths["/v1/models/{model}"] = {"get": one, "parameters": [_ref("Model", "parameters")]}
    paths[OPENAPI] = {"get": _own("openapi", "This document.", _OBJECT)}
    for question in ("live", "ready"):
        answer = {"200": {"description": "Yes."}, "400": {"description": "No."}}
        asked = {"operationId": f"server_{question}", "summary": f"Whether the gateway is {question}.", "security": []}
        paths[f"/v2/health/{question}"] = {"get": {**asked, "responses": {**answer, "default": _refused("KServe")}}}
    paths["/v2"] = {"get": _own("server_metadata", "What the gateway says of itself.", _OBJECT, "KServe")}
    statistics = _own("statistics", "Triton's statistics of every route.", _OBJECT, "KServe")
    paths["/v2/models/stats"] = {"get": statistics}
    index = _own("repository_index", "The routes that have Triton behind them.", {"type": "array"}, "KServe")
    ready = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
    index["requestBody"] = {"content": {_JSON: {"schema": ready}}}
    paths["/v2/repository/index"] = {"post": index}
    for operation in METHODS:
        end = "" if operation == "metadata" else f"/{operation}"
        for version in ("", "/versions/{version}"):
            parameters = [_ref("Model", "parameters"), *([_ref("Version", "parameters")] if version else [])]
            path = f"/v2/models/{{model}}{version}{end}"
            paths[path] = {METHODS[operation].lower(): _kserve(operation, version), "parameters": parameters}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headrace",
            "version": "1",
            "description": "OpenAI's API and Triton's (KServe v2), for the routes of a fleet.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token (JWT)."},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "parameters": {
                "Model": _in_path("model", {"type": "string", "minLength": 1}),
                "Version": _in_path("version", {"type": "string", "pattern": "^[0-9]+$"}),
            },
            "schemas": _schemas(),
            "responses": {
                name: {
                    "description": "Refused, by the gateway or the engine; the message says why.",
                    "content": {_JSON: {"schema": _ref(f"{name}Error")}},
                }
                for name in ("OpenAI", "KServe")
            },
        },
    }


def _schemas() -> dict[str, Any]:
    text, flag, count = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 1}
    asked = {"model": _ref("Route"), "stream": flag}
    messages = {"type": "array", "minItems": 1, "items": _ref("Message")}
    texts = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": text}]}
    content = {"anyOf": [text, {"type": "array", "items": _OBJECT}, {"type": "null"}]}
    error = _closed(message=text, type=text, param=_nullable("string"), code=_nullable("string"))
    return {
        "Route": {"type": "string", "minLength": 1, "description": "The name of a route."},
        "Message": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": text, "content": content},
        },
        "chat.completions": {
            "type": "object",
            "required": ["model", "messages"],
            "properties": {**asked, "messages": messages, "max_tokens": count},
        },
        "completions": {
            "type": "object",
            "required": ["model", "prompt"],
            "properties": {**asked, "prompt": texts, "max_tokens": count},
        },
        "embeddings": {
            "type": "object",
            "required": ["model", "input"],
            "properties": {"model": _ref("Route"), "input": texts},
        },
        "Model": {"type": "object", "required": ["id", "object"], "properties": {"id": text, "object": text}},
        "Models": _closed(object={"const": "list"}, data={"type": "array", "items": _ref("Model")}),
        "OpenAIError": _closed(error=error),
        "KServeError": {"type": "object", "required": ["error"]},
    }


def _openai(api: str) -> dict[str, Any]:
    answers: dict[str, Any] = {_JSON: {"schema": _OBJECT}}
    if api != "embeddings":
        answers[_EVENTS] = {}
    return {
        "operationId": api,
        "summary": _SUMMARIES[api],
        "requestBody": {"required": True, "content": {_JSON: {"schema": _ref(api)}}},
        "responses": {
            "200": {"description": "The engine's answer.", "content": answers},
            "default": _refused("OpenAI"),
        },
    }


def _kserve(operation: Operation, version: str) -> dict[str, Any]:
    answers: dict[str, Any] = {_JSON: {}}
    if operation == "ready":
        answers = {}
    elif operation == "infer":
        answers[_ANY] = {}
    elif operation == "generate_stream":
        answers[_EVENTS] = {}
    said = {"description": "Triton's answer.", **({"content": answers} if answers else {})}
    described = {
        "operationId": f"{operation}_of_version" if version else operation,
        "summary": _SUMMARIES[operation],
        "responses": {"200": said, "default": _refused("KServe")},
    }
    if METHODS[operation] == "POST":
        body: dict[str, Any] = {_JSON: {"schema": _OBJECT}}
        if operation == "infer":
            body[_ANY] = {}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _own(name: str, summary: str, schema: dict[str, Any], shape: str = "OpenAI") -> dict[str, Any]:
    """What the gateway answers without an engine."""
    said = {"description": "As asked for.", "content": {_JSON: {"schema": schema}}}
    return {"operationId": name, "summary": summary, "responses": {"200": said, "default": _refused(shape)}}


def _refused(shape: str) -> dict[str, str]:
    return _ref(shape, "responses")


def _ref(name: str, kind: str = "schemas") -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _in_path(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _closed(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties, "additionalProperties": False}


def _nullable(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


if __name__ == "__main__":
    print(document_text(), end="")
