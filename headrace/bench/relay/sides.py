"""What streams go through: the names of the sides, headrace as one of them, and how a side is known to be ready.

The gateway is started as an operator would, by its command with a fleet file; settings in the environment are kept from
it. It has no Redis, since nothing on the path of a request waits for one.
"""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import yaml

from headrace.bench.kserve import messages
from headrace.bench.kserve.load import answers as grpc_answers
from headrace.bench.processes import environment
from headrace.bench.relay.programs import Programs
from headrace.bench.relay.stretches import GRPC_TOKENS, MODEL, Stretch, make_request
from headrace.local.part import Part
from headrace.local.ports import LOOPBACK, free_ports
from headrace.local.probe import Probe, http_probe
from headrace.local.run_dir import RunDir
from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, RouteSpec
from router.spec.gateway import AuthSpec, DrainSpec, GatewaySpec

GATEWAY: Final = "gateway"
DIRECT: Final = "direct"
"""No side at all: the load at the engine."""
ENGINE: Final = "engine"
GRPC_ENGINE: Final = "grpc_engine"
ONE_WORKER, TWO_WORKERS = "one_worker", "two_workers"
WORKERS: Final = {ONE_WORKER: 1, TWO_WORKERS: 2}
"""Gateways told how many workers to have."""
TRITON_HTTP: Final = "bench-triton-http"
TRITON_GRPC: Final = "bench-triton-grpc"
"""Routes to Triton, beside the one called MODEL to the OpenAI engine."""
GRPC_MODEL: Final = messages.MODEL_OF_ROUTE[messages.STREAM]
_READY_S: Final = 5.0
_ANSWER_LIMIT: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Engines:
    """Ports of the stand-in engines."""

    http: int
    grpc: int


def engine_part(run: RunDir, programs: Programs, engines: Engines) -> Part:
    """The stand-in with the OpenAI API and Triton's HTTP API."""
    return make_part(
        run, ENGINE, (str(programs.engine), str(engines.http)), engines.http, http_probe(engines.http, "/health")
    )


def grpc_engine_part(run: RunDir, engines: Engines) -> Part:
    """The stand-in for Triton's gRPC API, that of `headrace bench grpc`."""
    address = f"{LOOPBACK}:{engines.grpc}"
    module = "headrace.bench.kserve.engine"
    command = (sys.executable, "-m", module, "--listen", address, "--stream-messages", str(GRPC_TOKENS.chunks))
    return make_part(run, GRPC_ENGINE, command, engines.grpc, partial(grpc_answers, address))


def gateway_part(
    run: RunDir, name: str, engines: Engines, port: int, *, grpc_engine: bool, workers: int | None = None
) -> Part:
    """A gateway in front of the engines, the gRPC one only with `grpc_engine`; without `workers` as many as it has by
    default."""
    fleet_file = run.path / f"{name}.yaml"
    (admin,) = free_ports(1, taken=[port])
    spec = fleet_spec(engines, port, admin, grpc_engine=grpc_engine)
    fleet_file.write_text(yaml.safe_dump(msgspec.to_builtins(spec), sort_keys=False))
    options = () if workers is None else ("--workers", str(workers))
    command = (sys.executable, "-m", "headrace", "gateway", "--config", str(fleet_file), *options)
    routes = [MODEL, TRITON_HTTP, *([TRITON_GRPC] if grpc_engine else [])]
    return make_part(run, name, command, port, answers(port, *routes))


def fleet_spec(engines: Engines, port: int, admin: int, *, grpc_engine: bool) -> FleetSpec:
    """A pool and a route for each way to an engine."""
    http = f"http://{LOOPBACK}:{engines.http}"
    pools = {
        MODEL: PoolSpec(
            protocol="openai",
            model=MODEL,
            endpoints=[EndpointSpec(id="openai-1", http=http)],
            max_in_flight="off",
        ),
        TRITON_HTTP: PoolSpec(
            protocol="triton",
            transport="http",
            model="llmapi",
            endpoints=[EndpointSpec(id="triton-http-1", http=http)],
            max_in_flight="off",
        ),
    }
    if grpc_engine:
        endpoint = EndpointSpec(id="triton-grpc-1", grpc=f"{LOOPBACK}:{engines.grpc}")
        pools[TRITON_GRPC] = PoolSpec(protocol="triton", model=GRPC_MODEL, endpoints=[endpoint], max_in_flight="off")
    return FleetSpec(
        fleet="bench",
        pools=pools,
        routes={name: RouteSpec(pool=name) for name in pools},
        gateway=GatewaySpec(
            http=f"{LOOPBACK}:{port}",
            admin=f"{LOOPBACK}:{admin}",
            auth=AuthSpec(anonymous="allow"),
            drain=DrainSpec(settle="0s"),
        ),
    )


def make_part(run: RunDir, name: str, command: tuple[str, ...], port: int, ready: Probe, **env: str) -> Part:
    """A process of the bench that listens on `port`."""
    return Part(
        name=name,
        command=command,
        env={**environment(), **env},
        log=run.logs / f"{name}.log",
        ready=ready,
        address=f"http://{LOOPBACK}:{port}",
        vital=True,  # a side that ends while it is measured has no figures
    )


def answers(port: int, *models: str, headers: Sequence[str] = ()) -> Probe:
    """Ready when a short stream of each model comes to its end."""
    requests = [make_request(Stretch("ready", 1, 0, 100, 1, chat=model == MODEL), model, *headers) for model in models]

    async def probe() -> bool:
        return all([await _answers(port, request) for request in requests])

    return probe


async def _answers(port: int, request: bytes) -> bool:
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(_READY_S):
            reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=_ANSWER_LIMIT)
            try:
                writer.write(request)
                status = await reader.readline()
                if status.split(b" ")[1:2] != [b"200"]:
                    return False
                await reader.readuntil(b"[DONE]")
                return True
            finally:
                writer.close()
    return False
