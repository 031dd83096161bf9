"""The gateway's configuration for the embedded fleet, written from the addresses the parts were given."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from headrace.local.ensemble_signature import MODEL
from headrace.local.llm import CHAT_TEMPLATE, MODEL_NAME
from headrace.local.parts import TritonPorts
from headrace.local.ports import LOOPBACK
from router.spec.fleet import ChatTemplateSpec, EndpointSpec, FleetSpec, PoolSpec, RedisSpec, RouteSpec, WeightedPool
from router.spec.gateway import AuthSpec, DrainSpec, GatewaySpec

TRITON_POOL: Final = "smollm-triton"
LLAMA_POOL: Final = "smollm-llama"
ROUTES: Final = {
    "smollm2": RouteSpec(pools=[WeightedPool(pool=TRITON_POOL, weight=2), WeightedPool(pool=LLAMA_POOL, weight=1)]),
    "smollm2-triton": RouteSpec(pool=TRITON_POOL, fallback=[LLAMA_POOL]),
    "smollm2-llama": RouteSpec(pool=LLAMA_POOL),
}
DEFAULT_ROUTE: Final = "smollm2-triton"
"""The route that `--ask` asks."""


@dataclass(frozen=True, slots=True)
class FleetPorts:
    """Every port of a run."""

    http: int
    admin: int
    grpc: int
    valkey: int
    triton_a: TritonPorts
    triton_b: TritonPorts
    llama: int


def fleet_spec(ports: FleetPorts) -> FleetSpec:
    """Describe the embedded fleet: two Triton replicas and one llama.cpp server, reachable by three routes."""
    return FleetSpec(
        fleet="local",
        redis=RedisSpec(url=f"redis://{LOOPBACK}:{ports.valkey}"),
        pools={
            TRITON_POOL: PoolSpec(
                protocol="triton",
                model=MODEL,
                chat_template=ChatTemplateSpec(file=str(CHAT_TEMPLATE), bos="", stop=["<|im_end|>"]),
                endpoints=[_triton("triton-a", ports.triton_a), _triton("triton-b", ports.triton_b)],
            ),
            LLAMA_POOL: PoolSpec(
                protocol="openai",
                model=MODEL_NAME,
                endpoints=[EndpointSpec(id="llama-a", http=f"http://{LOOPBACK}:{ports.llama}")],
            ),
        },
        routes=dict(ROUTES),
        gateway=GatewaySpec(
            http=f"{LOOPBACK}:{ports.http}",
            grpc=f"{LOOPBACK}:{ports.grpc}",
            admin=f"{LOOPBACK}:{ports.admin}",
            auth=AuthSpec(anonymous="allow"),
            drain=DrainSpec(settle="0s"),
        ),
    )


def write_fleet_file(path: Path, ports: FleetPorts) -> None:
    """Write the fleet as YAML."""
    path.write_text(yaml.safe_dump(_spare(msgspec.to_builtins(fleet_spec(ports))), sort_keys=False, allow_unicode=True))


def _triton(name: str, ports: TritonPorts) -> EndpointSpec:
    return EndpointSpec(
        id=name,
        grpc=f"{LOOPBACK}:{ports.grpc}",
        http=f"http://{LOOPBACK}:{ports.http}",
        metrics=f"http://{LOOPBACK}:{ports.metrics}/metrics",
    )


def _spare(fields: Any) -> Any:
    """`fields` without the objects that say nothing: those whose fields all have their defaults."""
    if not isinstance(fields, dict):
        return fields
    spared = {name: _spare(value) for name, value in fields.items()}
    return {name: value for name, value in spared.items() if value != {}}
