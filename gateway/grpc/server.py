"""The gRPC server of the client port: KServe v2 as Triton speaks it, and gRPC's health service.

The handlers are generic: they get and give bytes, so that no tensor is ever deserialised. What an engine must answer is
handed to it (`unary`, `stream`); what is about the gateway itself is answered here, in the terms of Triton: its models
are the routes that have Triton behind them. What would have to act on every replica at once, or on memory that only one
of them shares with the client, is refused with the reason.

gRPC opens its port with SO_REUSEPORT if it is let, and would then share it in silence with whoever has it; it is let
only where workers share the port on purpose. Whether it is free is asked with a plain bind before, for a reason that
people can read: here, or of all workers once by their supervisor.

What a client may take is for the library to hold where it is about connections, metadata and messages (`_options`). It
also breaks off streams beyond a number, but so that clients take it for a failure of the connection: so calls are
counted here, if that is asked for, and refused in words; the library's number is a wall behind that.
"""

import errno
import logging
import os
import resource
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from gateway.corridor import Corridor
from gateway.grpc.requests import Requests
from gateway.grpc.statuses import status_of
from gateway.grpc.stream import Streams
from gateway.grpc.unary import QUERIES, Unary
from gateway.http.client_response import NOBODY
from gateway.http.request_head import HEAD_LIMIT
from gateway.kserve import BODY_LIMIT, EXTENSIONS, any_servable, repository_index
from gateway.listening import free_port
from gateway.tls import HANDSHAKE_S, Certificate, Pem
from gateway.upstream.triton.raw import SERVICE
from router.errors import ApiError
from router.fleet import FleetView
from router.spec.gateway import GatewaySpec
from router.spec.units import host_and_port, size_bytes

logger = logging.getLogger(__name__)

_WALL = 4096
"""Calls that the library takes on a connection: no less than twice the cap, and not few, since a proxy's connection has
no cap."""
_OPTIONS = (
    ("grpc.max_send_message_length", BODY_LIMIT),
    # Without the first a part of the calls with metadata between the two would be refused, by the throw of a die.
    ("grpc.max_metadata_size", HEAD_LIMIT),
    ("grpc.absolute_max_metadata_size", HEAD_LIMIT),
    # Find clients that vanished without a word.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Triton's clients may be told to ping at any rate, calls or not (`KeepAliveOptions`): bear with them.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
)
_MEMORY = "The gateway shares no memory with its clients: send the tensors in the request."
_MODELS = "Models are loaded at the engines, not through the gateway: ask the server of an endpoint."
_SETTINGS = "These are settings of one server: ask the server of an endpoint, not the gateway."
_UNIMPLEMENTED = {
    **dict.fromkeys(
        (
            *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
            *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
        ),
        _MEMORY,
    ),
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), _MODELS),
    **dict.fromkeys(("TraceSetting", "LogSettings"), _SETTINGS),
}
_HEALTH = "grpc.health.v1.Health"
_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"


class GrpcFront:
    """The server and its handlers. Start it once, stop it once."""

    def __init__(self, corridor: Corridor, serving: Callable[[], bool], spec: GatewaySpec) -> None:
        """`serving` says whether the gateway takes requests: it does not while it drains."""
        self._spec = spec
        self._addresses = corridor.addresses
        self._fleet = corridor.fleet
        self._serving = serving
        self._server: Any = None
        self._requests = requests = Requests(corridor)
        unary = Unary(requests)
        bytes_in = grpc.unary_unary_rpc_method_handler
        health = {"ServerLive": self._live, "ServerReady": self._ready}
        counted = {
            "ServerMetadata": self._admitting(self._metadata),
            "RepositoryIndex": self._admitting(self._index),
            "ModelInfer": unary.infer,
            **{query.method: unary.query(query) for query in QUERIES},
            **{method: _refusing(reason) for method, reason in _UNIMPLEMENTED.items()},
        }
        counted = {method: self._counted(handler) for method, handler in counted.items()}
        infer_stream = self._counted(Streams(requests, serving).infer)
        self._handlers = {
            f"/{SERVICE}/{method}": bytes_in(handler) for method, handler in {**health, **counted}.items()
        }
        self._handlers[f"/{SERVICE}/ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(infer_stream)
        self._handlers[f"/{_HEALTH}/Check"] = bytes_in(self._check)

    async def start(self, address: str, certificate: Certificate | None = None, *, shared: bool) -> None:
        """Serve on `address`, alone or `shared` with other workers, with TLS where there is a certificate. Raises
        OSError if it is not to be had."""
        host, port = host_and_port(address)
        if not shared:
            free_port(address)
        self._server = grpc.aio.server(options=(*_options(self._spec), ("grpc.so_reuseport", int(shared))))
        self._server.add_generic_rpc_handlers((_Table(self._handlers),))
        target = f"[{host}]:{port}" if host and ":" in host else f"{host or '[::]'}:{port}"
        try:
            if certificate is None:
                bound = self._server.add_insecure_port(target)
            else:
                bound = self._server.add_secure_port(target, _credentials(certificate))
        except RuntimeError:
            bound = 0
        if not bound:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        await self._server.start()
        logger.info("grpc: listening on %s", address)

    async def stop(self, grace: float) -> None:
        """Take no new calls, wait `grace` seconds for those there are, then cancel them."""
        if self._server is not None:
            await self._server.stop(grace)

    def _counted(self, handler: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """`handler` for calls that are counted by connection and address, where there is a cap."""
        if not self._addresses.caps_streams:
            return handler

        async def call(message: Any, context: Any) -> Any:
            try:
                places = self._addresses.called(context.peer(), context.invocation_metadata() or ())
            except ApiError as error:
                refused = status_of(error)
                await context.abort(refused.code, refused.details)
            try:
                return await handler(message, context)
            finally:
                for place in places:
                    place.leave()

        return call

    def _admitting(
        self, handler: Callable[[bytes, Any, FleetView], Awaitable[bytes]]
    ) -> Callable[[bytes, Any], Awaitable[bytes]]:
        """What `handler` answers to those who may come in; it is given the fleet as they see it."""

        async def admit(message: bytes, context: Any) -> bytes:
            metadata = self._requests.metadata(context, "")
            await metadata.settle()
            try:
                fleet = self._requests.access.view(metadata.caller)
            except ApiError as error:
                refused = status_of(error)
                await context.abort(refused.code, refused.details, trailing_metadata=metadata.answer(NOBODY))
            return await handler(message, context, fleet)

        return admit

    async def _live(self, _: bytes, __: Any) -> bytes:
        return _encoded(service_pb2.ServerLiveResponse(live=True))

    async def _ready(self, _: bytes, __: Any) -> bytes:
        ready = self._serving() and any_servable(self._fleet.view, "grpc")
        return _encoded(service_pb2.ServerReadyResponse(ready=ready))

    async def _metadata(self, _: bytes, __: Any, ___: FleetView) -> bytes:
        return _encoded(
            service_pb2.ServerMetadataResponse(name="headrace", version=version("headrace"), extensions=EXTENSIONS)
        )

    async def _index(self, message: bytes, context: Any, fleet: FleetView) -> bytes:
        """The routes that have Triton behind them, as a repository's models."""
        try:
            asked = service_pb2.RepositoryIndexRequest.FromString(message)
        except Exception:  # protobuf's implementations raise different ones
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The request cannot be read.")
        response = service_pb2.RepositoryIndexResponse()
        for model in repository_index(fleet, "grpc", only_ready=asked.ready):
            response.models.add(name=model.name, version=model.version, state=model.state, reason=model.reason)
        return _encoded(response)

    async def _check(self, _: bytes, __: Any) -> bytes:
        return _SERVING if self._serving() else _NOT_SERVING


def _options(spec: GatewaySpec) -> tuple[tuple[str, int], ...]:
    """What the library holds clients to."""
    clients = spec.clients
    connections = clients.grpc_connections or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    return (
        *_OPTIONS,
        ("grpc.max_receive_message_length", min(size_bytes(spec.message_limit), BODY_LIMIT)),
        ("grpc.max_allowed_incoming_connections", min(connections, 2**31 - 1)),
        ("grpc.max_concurrent_streams", min(max(_WALL, 2 * (clients.streams_per_connection or 0)), 2**31 - 1)),
    )


def _credentials(certificate: Certificate) -> Any:
    """Of the certificate as it is at each connection, which grpc asks for in a thread of its own. TLS 1.2 and 1.3, and
    suites with forward secrecy and authenticated encryption only, are grpc's defaults."""
    given = certificate.pem

    def configuration(pem: Pem) -> Any:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)])

    def changed() -> Any:
        nonlocal given
        latest = certificate.pem
        if latest is given:
            return None
        given = latest
        return configuration(latest)

    return grpc.dynamic_ssl_server_credentials(configuration(given), changed)


class _Table(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Handlers by the names of their methods; what is not there is UNIMPLEMENTED."""

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)


def _refusing(reason: str) -> Callable[[bytes, Any], Any]:
    async def refuse(_: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)
        raise AssertionError("abort raises")

    return refuse


def _encoded(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
