"""A gateway in the test's own process, and engines that do what no real engine can be made to do.

`running_gateway` starts a real gateway on free ports and checks, when the test is through, that every counter is back
where it was. `ScriptedEngine` is a fake: an HTTP server whose every answer is a script. Real engines cannot be told to
die in the middle of a chunk.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from gateway.app import Gateway
from router.spec.documents import Document
from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, ProbeSpec, RedisSpec, RouteSpec, TimeoutSpec
from router.spec.gateway import AuthSpec, DrainSpec, GatewaySpec, OverloadSpec

ONE = b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
TWO = b'data: {"choices":[{"delta":{"content":"two \xf0\x9f\x99\x82"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}
"""Requests to the route of `one_pool`, and events an engine answers with."""

OPEN = AuthSpec(anonymous="allow")
"""Of a gateway that anybody may call."""
CALM = OverloadSpec(loop_lag="off", cpu="off")
"""Of a gateway that takes no notice of how busy the test's machine is."""
AT_ONCE = DrainSpec(settle="0s")
"""Of a gateway process for which nobody sends requests any more when it is told to stop."""

Script = Callable[["EngineConnection"], Awaitable[None]]


_given_ports: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, and none that was given before: the kernel may choose one twice in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


@dataclass
class RunningGateway:
    """A started gateway and where it listens."""

    gateway: Gateway
    http_port: int
    admin_port: int
    grpc_port: int | None
    """None if the fleet has no `gateway.grpc`."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def in_flight(self) -> dict[str, int]:
        return {id_: endpoint.state.in_flight for id_, endpoint in self.gateway.fleet.endpoints.items()}

    def apply(self, documents: Iterable[Document]) -> None:
        """Change the fleet as if the shared state had changed."""
        self.gateway._live_fleet.apply(documents)

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
        """Wait for `condition`, or fail with `what`."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():  # noqa: ASYNC110 - counters are no events
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {seconds} s") from None

    async def until_phase(self, endpoint: str, phase: str, seconds: float = 5.0) -> None:
        def arrived() -> bool:
            return endpoint in self.gateway.fleet.endpoints and self.gateway.fleet.endpoints[endpoint].phase == phase

        await self.until(arrived, f"{endpoint} is {phase}", seconds)

    async def until_idle(self, seconds: float = 5.0) -> None:
        await self.until(
            lambda: not any(self.in_flight.values()) and not self.live_requests, "every counter back at zero", seconds
        )

    @property
    def live_requests(self) -> int:
        return int(self.gateway.registry.get_sample_value("headrace_live_requests") or 0)


@contextlib.asynccontextmanager
async def running_gateway(
    spec: FleetSpec, *, wait_ready: bool = True, admin_token: str | None = None
) -> AsyncIterator[RunningGateway]:
    """A gateway for `spec` on free ports; on leaving, its counters must be back at zero. Its `auth` counts only
    where it has tenants."""
    http_port, admin_port = free_port(), free_port()
    grpc_port = free_port() if spec.gateway.grpc is not None else None
    addresses = GatewaySpec(
        http=f"127.0.0.1:{http_port}",
        grpc=f"127.0.0.1:{grpc_port}" if grpc_port is not None else None,
        admin=f"127.0.0.1:{admin_port}",
        body_limit=spec.gateway.body_limit,
        message_limit=spec.gateway.message_limit,
        expose_routing=spec.gateway.expose_routing,
        access_log=spec.gateway.access_log,
        tracing=spec.gateway.tracing,
        retry=spec.gateway.retry,
        tls=spec.gateway.tls,
        admin_tls=spec.gateway.admin_tls,
        clients=spec.gateway.clients,
        overload=CALM,
        auth=spec.gateway.auth if spec.tenants else OPEN,
    )
    gateway = Gateway(msgspec.structs.replace(spec, gateway=addresses), "hash", admin_token)
    running = RunningGateway(gateway, http_port, admin_port, grpc_port)
    await gateway.start()
    try:
        if wait_ready:
            for id_ in gateway.fleet.endpoints:
                await running.until_phase(id_, "ready", 10)
        yield running
        await running.until_idle()
    finally:
        await gateway.stop()


@dataclass
class EngineConnection:
    """One request at a scripted engine."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    path: str
    headers: dict[str, str]
    body: bytes

    async def send(self, data: bytes) -> None:
        if self.writer.is_closing():  # uvloop raises a RuntimeError
            raise ConnectionResetError
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, *headers: str, status: str = "200 OK") -> None:
        await self.send("\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode())

    async def events(self, *events: bytes) -> None:
        """A chunked event stream's head and whole events, one chunk and one write each."""
        await self.head("content-type: text/event-stream", "transfer-encoding: chunked")
        for event in events:
            await self.chunk(event)

    async def chunk(self, payload: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(payload), payload))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def stream(self, *events: bytes) -> None:
        """A whole event stream."""
        await self.events(*events)
        await self.end()

    async def json(self, body: bytes = b"{}", *headers: str, status: str = "200 OK") -> None:
        """A whole answer that says it is JSON."""
        await self.head("content-type: application/json", f"content-length: {len(body)}", *headers, status=status)
        await self.send(body)

    def reset(self) -> None:
        """Break the connection as a dying process does."""
        self.writer.transport.abort()

    async def client_gone(self) -> bool:
        """Wait until the other side has closed the connection."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read(1) == b""
        return True


def answering(status: str = "200 OK", body: bytes = b"{}", *headers: str) -> Script:
    """A script that says `body`."""

    async def script(connection: EngineConnection) -> None:
        await connection.json(body, *headers, status=status)

    return script


def streaming(*events: bytes) -> Script:
    """A script that streams `events`."""

    async def script(connection: EngineConnection) -> None:
        await connection.stream(*events)

    return script


@dataclass
class ScriptedEngine:
    """A fake OpenAI-protocol engine. `script` answers every generation request; probes are answered by `healthy`."""

    script: Script
    healthy: bool = True
    models: bytes = b'{"data":[]}'
    props: bytes = b"{}"
    """What llama.cpp says of itself."""
    port: int = 0
    requests: list[EngineConnection] = field(default_factory=list)
    probed_with: set[str | None] = field(default_factory=set)
    """What probes have sent as their Authorization."""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Stop listening and break every connection."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (connection := await _read_request(reader, writer)) is not None:
                if connection.path == "/health":
                    self.probed_with.add(connection.headers.get("authorization"))
                    status = "200 OK" if self.healthy else "503 Service Unavailable"
                    await connection.head("content-length: 0", status=status)
                elif connection.path in ("/v1/models", "/props"):
                    body = self.models if connection.path == "/v1/models" else self.props
                    await connection.head(f"content-length: {len(body)}")
                    await connection.send(body)
                else:
                    self.requests.append(connection)
                    await self.script(connection)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the gateway closed the connection, as it may
        except asyncio.CancelledError:
            pass  # by `die`, which waits for it
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    def endpoint(self, id_: str = "engine") -> EndpointSpec:
        return EndpointSpec(id=id_, http=f"http://127.0.0.1:{self.port}")


@dataclass
class HeldEngine(ScriptedEngine):
    """An engine whose streams go on until they are let go."""

    script: Script = field(init=False)
    held: list[asyncio.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.script = self._hold

    async def _hold(self, connection: EngineConnection) -> None:
        self.held.append(let_go := asyncio.Event())
        await connection.events(ONE)
        await let_go.wait()
        await connection.chunk(DONE)
        await connection.end()

    def let_go(self, count: int | None = None) -> None:
        """Let the first `count` streams end, or all."""
        for one in self.held[:count]:
            one.set()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> EngineConnection | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    request_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return EngineConnection(reader, writer, request_line.split(" ")[1], headers, body)


FAST_PROBES = ProbeSpec(interval="50ms", timeout="1s")


def one_pool(
    *endpoints: EndpointSpec,
    timeouts: TimeoutSpec | None = None,
    redis: str | None = None,
    body_limit: str = "32MiB",
    probe: ProbeSpec = FAST_PROBES,
    **options: Any,
) -> FleetSpec:
    """A fleet of one OpenAI-protocol pool behind the route `m`; `options` are further fields of the pool."""
    pool = PoolSpec(
        protocol="openai",
        model="engine-model",
        endpoints=list(endpoints),
        timeouts=timeouts or TimeoutSpec(),
        probe=probe,
        **options,
    )
    return FleetSpec(
        fleet="test",
        redis=RedisSpec(url=redis) if redis else None,
        pools={"p": pool},
        routes={"m": RouteSpec(pool="p")},
        gateway=GatewaySpec(body_limit=body_limit),
    )
