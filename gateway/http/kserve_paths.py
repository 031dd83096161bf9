"""The paths of Triton's HTTP API, and what this gateway does with each."""

import re
from dataclasses import dataclass
from typing import Literal, cast
from urllib.parse import quote, unquote

Operation = Literal["metadata", "ready", "config", "stats", "infer", "generate", "generate_stream"]

METHODS: dict[Operation, str] = {
    "metadata": "GET",
    "ready": "GET",
    "config": "GET",
    "stats": "GET",
    "infer": "POST",
    "generate": "POST",
    "generate_stream": "POST",
}

_MODEL = re.compile(
    r"/v2/models/(?P<model>[^/]+)(?P<version>/versions/[0-9]+)?"
    r"(?:/(?P<operation>infer|generate|generate_stream|ready|config|stats))?"
)
_SAFE = "!$&'()*+,;=:@~-._"
"""Triton takes a model's name from the path without decoding it: only what would end the path is escaped."""

_UNSUPPORTED = (
    (
        re.compile(r"/v2/repository/models/[^/]+/(?:load|unload)"),
        "Models are loaded and unloaded at each Triton itself: the gateway serves what it finds there.",
    ),
    (
        re.compile(r"/v2/(?:system|cuda)sharedmemory(?:/.*)?"),
        "Shared memory needs a client on the same host as the engine: send tensors in the request's body.",
    ),
    (re.compile(r"/v2(?:/models/[^/]+)?/trace/setting"), "Trace settings belong to each Triton: set them there."),
    (re.compile(r"/v2/logging"), "Log settings belong to each Triton: set them there."),
)


@dataclass(slots=True, frozen=True)
class ModelPath:
    """A path that names a model. `version` is the path's own part for it, or empty."""

    model: str
    version: str
    operation: Operation

    def at(self, base: str, model: str) -> str:
        """The same operation on the engine's `model`, under the engine's `base` path."""
        end = "" if self.operation == "metadata" else f"/{self.operation}"
        return f"{base}/v2/models/{quote(model, safe=_SAFE)}{self.version}{end}"


def parse(path: str) -> ModelPath | None:
    """The model path in a request's raw path, whose model's name may have escaped characters; None for any other."""
    found = _MODEL.fullmatch(path)
    if found is None:
        return None
    operation = cast("Operation", found["operation"] or "metadata")
    return ModelPath(unquote(found["model"]), found["version"] or "", operation)


def why_unsupported(path: str) -> str | None:
    """Why a path of Triton's is not answered here; None if it is no such path."""
    return next((reason for pattern, reason in _UNSUPPORTED if pattern.fullmatch(path)), None)
