"""A collector of traces, over both of OTLP's transports.

It is a fake: no collector is to be had as a package of PyPI, Debian or npm. It is made of OTLP's own messages and gRPC
stubs, so what is no OTLP does not arrive.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

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
