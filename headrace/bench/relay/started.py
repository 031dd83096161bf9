"""Starting the sides of a comparison, and what becomes of one that does not start.

Engines and gateways share a supervisor: if one of them fails, so does the bench. Each peer has a supervisor of its own,
because a peer that fails is only left out.
"""

from contextlib import AsyncExitStack

from headrace.bench.relay import figures
from headrace.bench.relay.peers import PEERS, Place, peer_part
from headrace.bench.relay.programs import Programs
from headrace.bench.relay.rounds import Side
from headrace.bench.relay.sides import (
    DIRECT,
    ENGINE,
    GATEWAY,
    GRPC_ENGINE,
    WORKERS,
    Engines,
    engine_part,
    gateway_part,
    grpc_engine_part,
)
from headrace.bench.usage import ProcessTree
from headrace.local.errors import LocalFleetError
from headrace.local.ports import free_ports
from headrace.local.progress import PlainProgress, TerminalProgress
from headrace.local.run_dir import RunDir
from headrace.local.supervisor import Supervisor


class Started:
    """The sides that run; `stack` stops them."""

    def __init__(
        self, run: RunDir, programs: Programs, progress: PlainProgress | TerminalProgress, stack: AsyncExitStack
    ) -> None:
        self._run = run
        self._programs = programs
        self._stack = stack
        self._engines = Engines(*free_ports(2))
        self._taken = [self._engines.http, self._engines.grpc]
        self.progress = progress
        self.sides: dict[str, Side] = {}
        stack.callback(progress.close)

    async def start_own(self, asked: frozenset[str]) -> None:
        """Start the engines and the gateways that the figures need.

        Raises:
            LocalFleetError: one of them does not start.
        """
        run, engines = self._run, self._engines
        grpc_engine = figures.wants(figures.TRITON_GRPC, asked)
        self.supervisor = await self._stack.enter_async_context(Supervisor(self.progress))
        await self.supervisor.start(
            [engine_part(run, self._programs, engines), *([grpc_engine_part(run, engines)] if grpc_engine else [])]
        )
        self._add(DIRECT, engines.http, self.supervisor.pid(ENGINE))
        if grpc_engine:
            self._add(GRPC_ENGINE, engines.grpc, self.supervisor.pid(GRPC_ENGINE))
        ports = {GATEWAY: self._port()}
        gateways = [gateway_part(run, GATEWAY, engines, ports[GATEWAY], grpc_engine=grpc_engine)]
        if figures.wants(figures.WORKERS, asked):
            for name, count in WORKERS.items():
                ports[name] = self._port()
                gateways.append(gateway_part(run, name, engines, ports[name], grpc_engine=False, workers=count))
        await self.supervisor.start(gateways)
        for name, port in ports.items():
            self._add(name, port, self.supervisor.pid(name))

    async def start_peer(self, name: str, left_out: dict[str, str]) -> None:
        """Start a peer; `left_out` gets the reason if it is not there or does not start."""
        port = self._port()
        part = peer_part(name, Place(self._run, self._engines.http, port))
        if part is None:
            left_out[name] = PEERS[name].missing
            return
        supervisor = await self._stack.enter_async_context(Supervisor(self.progress))
        try:
            await supervisor.start([part])
        except LocalFleetError as error:
            lines = str(error).splitlines()
            left_out[name] = " ".join(dict.fromkeys(("it does not start:", lines[0], lines[-1])))
            return
        self._add(name, port, supervisor.pid(name))

    def _add(self, name: str, port: int, pid: int) -> None:
        self.sides[name] = Side(port, ProcessTree(pid))

    def _port(self) -> int:
        (port,) = free_ports(1, taken=self._taken)
        self._taken.append(port)
        return port
