"""What the bench's two gRPC servers have in common: any message size, bytes in and out, an orderly end."""

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from typing import Any, Final

import grpc
import uvloop

SERVICE: Final = "inference.GRPCInferenceService"
ANY_SIZE: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_GRACE_S: Final = 1.0


def channel_to(address: str) -> Any:
    """A channel of its own connection to `address`, to be made inside the event loop that uses it."""
    options = [*ANY_SIZE, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(address, options=options)


def serve(address: str, making: Coroutine[Any, Any, Mapping[str, Any]]) -> None:
    """Serve until SIGTERM or SIGINT. `making` makes the method handlers by name, inside the event loop.

    The event loop is the gateway's, so that it is no difference between the two.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(address, making))


async def _serve(address: str, making: Coroutine[Any, Any, Mapping[str, Any]]) -> None:
    handlers = await making
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = grpc.aio.server(options=[*ANY_SIZE, ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, dict(handlers)),))
    server.add_insecure_port(address)
    await server.start()
    try:
        await stopping.wait()
    finally:
        await server.stop(_GRACE_S)
