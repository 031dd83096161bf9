"""A stand-in for Triton whose streams are held: no real one can be told to."""

import asyncio
from typing import Any

import grpc
import msgspec

from gateway.upstream.triton.raw import SERVICE
from headrace.bench.kserve.engine import make_handlers
from headrace.bench.kserve.messages import MODEL_OF_ROUTE, ONCE, stream_responses
from headrace.bench.kserve.messages import STREAM as STREAM_ROUTE
from router.spec.fleet import EndpointSpec, PoolSpec


class HeldTriton:
    """Holds the second and last message of all streams but those that are asked to be short."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self._server = grpc.aio.server()
        self.endpoint = EndpointSpec(id="unknown")

    async def __aenter__(self) -> "HeldTriton":
        infer = grpc.stream_stream_rpc_method_handler(self._infer)
        handlers = {**await make_handlers(1), "ModelStreamInfer": infer}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.endpoint = EndpointSpec(id="triton", grpc=f"127.0.0.1:{port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    def pools(self, **options: Any) -> dict[str, PoolSpec]:
        """Pools for the bench's models that answer once and with a stream; `options` are further fields of theirs."""
        return {
            route: PoolSpec(
                protocol="triton",
                model=MODEL_OF_ROUTE[route],
                endpoints=[msgspec.structs.replace(self.endpoint, id=f"triton-{route}")],
                **options,
            )
            for route in (ONCE, STREAM_ROUTE)
        }

    def let_go(self) -> None:
        held, self.held = self.held, asyncio.Event()
        held.set()

    async def _infer(self, _: object, context: Any) -> None:
        first, last = stream_responses(MODEL_OF_ROUTE[STREAM_ROUTE], 2)
        while (message := await context.read()) is not grpc.aio.EOF:
            held = self.held
            await context.write(first)
            if b"short" not in message:
                await held.wait()
            await context.write(last)
