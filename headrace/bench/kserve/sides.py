"""The processes of the comparison: the stand-in engine, and in front of it each side.

The gateway is started as an operator would, by its command with a fleet file; settings in the environment are kept from
it. It has no Redis, since nothing on the path of a request waits for one.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import yaml

from headrace.bench.kserve.load import answers
from headrace.bench.kserve.messages import MODEL_OF_ROUTE, ONCE
from headrace.bench.processes import environment
from headrace.local.part import Part
from headrace.local.ports import LOOPBACK
from headrace.local.run_dir import RunDir
from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, RouteSpec
from router.spec.gateway import AuthSpec, DrainSpec, GatewaySpec

GATEWAY: Final = "gateway"
BARE: Final = "bare"
RENAMING: Final = "renaming_bare"
"""The bare proxy that appends names as the gateway must."""
ENGINE: Final = "engine"
PROXIES: Final = (GATEWAY, BARE, RENAMING)


@dataclass(frozen=True, slots=True)
class Ports:
    engine: int
    bare: int
    renaming: int
    grpc: int
    http: int
    admin: int


def engine_part(run: RunDir, ports: Ports, stream_messages: int) -> Part:
    """The stand-in for Triton."""
    options = ("--stream-messages", str(stream_messages))
    return _program(run, ENGINE, "headrace.bench.kserve.engine", ports.engine, options)


def proxy_parts(run: RunDir, ports: Ports) -> list[Part]:
    """Every side, in the order of PROXIES."""
    to_engine = ("--engine", f"{LOOPBACK}:{ports.engine}")
    names = ("--engine-model", MODEL_OF_ROUTE[ONCE], "--client-model", ONCE)
    proxy = "headrace.bench.kserve.bare_proxy"
    return [
        _gateway(run, ports),
        _program(run, BARE, proxy, ports.bare, to_engine),
        _program(run, RENAMING, proxy, ports.renaming, (*to_engine, *names)),
    ]


def address_of(side: str, ports: Ports) -> str:
    """Where a side takes calls; the engine too."""
    port = {GATEWAY: ports.grpc, BARE: ports.bare, RENAMING: ports.renaming, ENGINE: ports.engine}[side]
    return f"{LOOPBACK}:{port}"


def fleet_spec(ports: Ports) -> FleetSpec:
    """A pool and a route for each of the engine's models."""
    engine = f"{LOOPBACK}:{ports.engine}"
    return FleetSpec(
        fleet="bench",
        pools={
            route: PoolSpec(
                protocol="triton",
                model=model,
                endpoints=[EndpointSpec(id=f"{route}-1", grpc=engine)],
                max_in_flight="off",
            )
            for route, model in MODEL_OF_ROUTE.items()
        },
        routes={route: RouteSpec(pool=route) for route in MODEL_OF_ROUTE},
        gateway=GatewaySpec(
            http=f"{LOOPBACK}:{ports.http}",
            grpc=f"{LOOPBACK}:{ports.grpc}",
            admin=f"{LOOPBACK}:{ports.admin}",
            auth=AuthSpec(anonymous="allow"),
            drain=DrainSpec(settle="0s"),
        ),
    )


def _gateway(run: RunDir, ports: Ports) -> Part:
    fleet_file = run.path / "fleet.yaml"
    fleet_file.write_text(yaml.safe_dump(msgspec.to_builtins(fleet_spec(ports)), sort_keys=False))
    command = (sys.executable, "-m", "headrace", "gateway", "--config", str(fleet_file))
    return _part(run, GATEWAY, command, ports.grpc)


def _program(run: RunDir, name: str, module: str, port: int, options: tuple[str, ...]) -> Part:
    return _part(run, name, (sys.executable, "-m", module, "--listen", f"{LOOPBACK}:{port}", *options), port)


def _part(run: RunDir, name: str, command: tuple[str, ...], port: int) -> Part:
    address = f"{LOOPBACK}:{port}"
    return Part(
        name=name,
        command=command,
        env=environment(),
        log=run.logs / f"{name}.log",
        ready=partial(answers, address),
        address=f"grpc://{address}",
        vital=True,  # a side that ends while it is measured has no figures
    )
