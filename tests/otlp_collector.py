"""Collectors of traces, over both of OTLP's transports.

`collector` is a fake, for what is asserted of spans in detail, and of headers. It is made of OTLP's own messages and
gRPC stubs, so what is no OTLP does not arrive. `real_collector` is a program of others, written in Rust; what it has
taken it passes on to a fake as its backend.
"""

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.harness import free_port

Value = str | int | float | bool | list[Any] | None


@dataclass
class Collector:
    """What has arrived."""

    grpc_url: str = ""
    http_url: str = ""
    received: list[trace_service_pb2.ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    refuses: bool = False

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.headers.append(dict(context.invocation_metadata()))
        if self.refuses:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not here")
        self.received.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    async def post(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.received.append(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
        answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")

    @property
    def spans(self) -> list[Span]:
        """Every span that has arrived, in that order."""
        return [
            span
            for request in self.received
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    @property
    def resource(self) -> dict[str, Value]:
        return attributes(self.received[0].resource_spans[0].resource)

    async def until(self, arrived: Callable[[], bool], seconds: float = 15.0) -> None:
        """Wait for a condition of what has arrived."""
        async with asyncio.timeout(seconds):
            while not arrived():  # noqa: ASYNC110 - that of a fake
                await asyncio.sleep(0.02)


def attributes(told: Any) -> dict[str, Value]:
    """The attributes of a span, an event or a resource."""
    return {one.key: _value(one.value) for one in told.attributes}


def _value(value: Any) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    found: Value = getattr(value, kind)
    return found


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """A collector that listens on free ports."""
    running = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(running, server)  # type: ignore[no-untyped-call]
    running.grpc_url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/traces", running.post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    running.http_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    await server.start()
    try:
        yield running
    finally:
        await server.stop(0)
        await runner.cleanup()


@dataclass(frozen=True)
class RealCollector:
    """A collector that runs."""

    grpc_url: str
    http_url: str
    output: Path
    """What it says of the spans that it takes."""


@contextlib.asynccontextmanager
async def real_collector(backend: Collector, folder: Path) -> AsyncIterator[RealCollector]:
    """Rotel, which passes on to `backend` what it takes."""
    package = importlib.util.find_spec("rotel")
    if package is None or package.origin is None:
        pytest.skip("there is no rotel, the collector, for this platform")
    by_grpc, by_http = (f"127.0.0.1:{free_port()}" for _ in range(2))
    running = RealCollector(f"http://{by_grpc}", f"http://{by_http}", folder / "rotel.log")
    with running.output.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(Path(package.origin).with_name("rotel-agent"), "start", "--disable-batching"),
            *("--otlp-grpc-endpoint", by_grpc, "--otlp-http-endpoint", by_http),
            *("--exporter", "otlp", "--otlp-exporter-endpoint", backend.grpc_url),
            *("--debug-log", "traces", "--debug-log-verbosity", "detailed"),
            stdout=output,
            stderr=output,
            env={name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "ROTEL_"))},
        )
    try:
        async with asyncio.timeout(15):
            for address in (by_grpc, by_http):
                await _until_it_listens(address)
        yield running
    finally:
        process.terminate()
        await process.wait()


async def _until_it_listens(address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
