"""The JSON Schema of the Helm chart's values, made of two parts that are each written once.

What may stand under `fleet`, and in a backend's `pool`, is generated from the types of a fleet file (`router.spec`),
so that Helm refuses what the gateway would refuse, with the path, before anything is installed. The rest is the chart's
own: what a value may hold is seen from its default in `values.yaml`, and narrowed here where that says too little.

Helm's reader of schemas is written in Go, whose patterns know no look-ahead: those of the types are rewritten, and
where one cannot be, what it would forbid is left for the gateway to refuse.

Run as a module, it prints the schema: `make schema`.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from router.spec.schema import fleet_schema
from router.spec.units import END

_SET_BY_THE_CHART = {"FleetSpec": ("redis",), "GatewaySpec": ("http", "grpc", "admin")}
_OF_A_BACKEND = ("protocol", "model", "endpoints")
"""Fields of a pool that the chart fills in from the backend."""

Schema = dict[str, Any]


def _choice(*values: str) -> Schema:
    return {"enum": list(values)}


def _count(least: int = 0) -> Schema:
    return {"type": "integer", "minimum": least}


_OBJECT: Schema = {"type": "object"}
_LIST: Schema = {"type": "array", "items": _OBJECT}
_QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
_NAME = r"^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"
_SECRET: Schema = {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"}
_PATH: Schema = {"type": "string", "pattern": "^(/.*)?$"}
_WANTED = _choice("auto", "always", "never")

_NARROWED: dict[str, Schema] = {
    "image.pullPolicy": _choice("Always", "IfNotPresent", "Never"),
    "gateway.replicas": _count(1),
    "gateway.workers": {**_count(1), "maximum": 64},
    "gateway.logLevel": _choice("debug", "info", "warning", "error"),
    "gateway.autoscaling.minReplicas": _count(1),
    "gateway.autoscaling.maxReplicas": _count(1),
    "gateway.autoscaling.streams": {"type": ["integer", "null"], "minimum": 1},
    "gateway.autoscaling.cpuPercent": {"type": ["integer", "null"], "minimum": 1},
    "gateway.maxUnavailable": {"type": ["integer", "string"], "pattern": "^[0-9]{1,3}%$", "minimum": 1},
    "gateway.service.type": _choice("ClusterIP", "LoadBalancer", "NodePort"),
    "discovery.replicas": _count(1),
    "redis.url": {"type": "string", "pattern": r"^((redis|rediss)://[^@\s]+)?$"},
    "backends.engine": _choice("vllm", "trtllm-serve", "triton", "openai"),
    "backends.tensorParallel": _count(1),
    "backends.pipelineParallel": _count(1),
    "backends.nodes": _count(1),
    "backends.port": {**_count(1), "maximum": 65535},
    "backends.command": {"type": "array", "items": {"type": "string"}},
    "backends.args": {"type": "array", "items": {"type": "string"}},
    "backends.memory": _QUANTITY,
    "backends.sharedMemory": _QUANTITY,
    "backends.startupMinutes": _count(1),
    "backends.graceSeconds": _count(30),
    "backends.user": _count(1),
    "backends.triton.repository": _PATH,
    "backends.tuning.maxBatchSize": {"type": ["integer", "null"], "minimum": 1},
    "backends.tuning.maxNumTokens": {"type": ["integer", "null"], "minimum": 1},
    "backends.tuning.maxSequenceLength": {"type": ["integer", "null"], "minimum": 1},
    "backends.tuning.chunkedContext": {"type": ["boolean", "null"]},
    "backends.tuning.kvFraction": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "backends.tuning.kvDtype": _choice("", "auto", "fp8"),
    "spot.provider": _choice("", "gke", "eks", "karpenter", "aks"),
    "network.httpRoute.hostnames": {"type": "array", "items": {"type": "string"}},
    "monitoring.serviceMonitor": _WANTED,
    "monitoring.rules": _WANTED,
}
"""By the path of a value, of backends without their name."""


def values_schema(values: Schema) -> Schema:
    """The schema of the chart whose `values.yaml` holds `values`, draft 2020-12."""
    fleet = fleet_schema()
    definitions: dict[str, Schema] = fleet["$defs"]
    for name, definition in definitions.items():
        for field in _SET_BY_THE_CHART.get(name, ()):
            del definition["properties"][field]
    del definitions["RedisSpec"]
    definitions["FleetSpec"].pop("required", None)  # the name of the fleet, which the release has
    pool = definitions["PoolSpec"]
    kept = {name: one for name, one in pool["properties"].items() if name not in _OF_A_BACKEND}
    definitions["BackendPool"] = {**pool, "title": "BackendPool", "properties": kept, "required": []}

    own = dict(values)
    backend = _of("backends", own.pop("backendDefaults"))
    backend["properties"]["pool"] = {"$ref": "#/$defs/BackendPool"}
    definitions["Backend"] = backend
    schema = _of("", own)
    schema["properties"] |= {
        "fleet": {"$ref": "#/$defs/FleetSpec"},
        "files": {"type": "object", "additionalProperties": {"type": "string"}},
        "backends": {
            "type": "object",
            "propertyNames": {"pattern": _NAME},
            "additionalProperties": {"$ref": "#/$defs/Backend"},
        },
        "backendDefaults": {"$ref": "#/$defs/Backend"},
        "global": _OBJECT,  # which Helm adds
    }
    whole = {"$schema": fleet["$schema"], "title": "values of the chart headrace", **schema, "$defs": definitions}
    rewritten: Schema = _for_go(whole)
    return rewritten


def _of(path: str, value: object) -> Schema:
    """What may stand where `value` is the default."""
    if path in _NARROWED:
        return _NARROWED[path]
    if path.endswith("Secret"):
        return _SECRET
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return _count()
        case str():
            return {"type": "string"}
        case list():
            return _LIST
        case dict() if value and not path.endswith(("resources", "engines")):
            properties = {name: _of(f"{path}.{name}".lstrip("."), one) for name, one in value.items()}
            return {"type": "object", "properties": properties, "additionalProperties": False}
        case dict():
            return _OBJECT
    raise ValueError(f"{path}: its default does not tell what it may hold; say it in _NARROWED")


def _for_go(schema: Any) -> Any:
    """`schema` with patterns that Go's regular expressions know."""
    if isinstance(schema, list):
        return [_for_go(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _go_pattern(one) if name == "pattern" else _for_go(one) for name, one in schema.items()}


def _go_pattern(pattern: object) -> object:
    if not isinstance(pattern, str):
        return pattern  # a field of that name
    pattern = pattern.replace(END, "$")  # in Go `$` is the end of the text and nothing else
    while (start := pattern.find("(?!")) >= 0:
        pattern = pattern[:start] + pattern[_closing(pattern, start) + 1 :]
    return pattern


def _closing(pattern: str, start: int) -> int:
    """Where the group that begins at `start` ends."""
    depth, position, in_class = 0, start, False
    while True:
        match pattern[position]:
            case "\\":
                position += 1
            case "[":
                in_class = True
            case "]":
                in_class = False
            case "(" if not in_class:
                depth += 1
            case ")" if not in_class:
                depth -= 1
                if depth == 0:
                    return position
        position += 1


def schema_text(values: str) -> str:
    """The schema as the chart holds it, for the text of its `values.yaml`."""
    return msgspec.json.format(msgspec.json.encode(values_schema(yaml.safe_load(values))), indent=2).decode() + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text(Path(sys.argv[1]).read_text()))
