"""What the gateway asks a Triton about itself and its model, over HTTP, for endpoints that have no gRPC address.

Triton's HTTP API answers with the JSON form of the same messages as its gRPC API, and takes the same request in the
form of its generate extension.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
from google.protobuf import json_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2, service_pb2

from gateway.upstream.base import Failure, Headers, UpstreamError
from gateway.upstream.collected import Collected
from gateway.upstream.http_call import HttpCall
from gateway.upstream.http_connection import ConnectionPool
from gateway.upstream.http_get import get
from gateway.upstream.triton.control import Description
from gateway.upstream.triton.failures import from_http, is_stub_death
from gateway.upstream.triton.generate_form import error_text, generate_request
from gateway.upstream.triton.vitals import Sign


class _Server(msgspec.Struct):
    version: str = ""


class HttpControl:
    """`gateway.upstream.triton.control.Control` over HTTP. `pool` is closed by its owner."""

    def __init__(self, pool: ConnectionPool, connect_timeout: float, own: Callable[[], Headers] = tuple) -> None:
        self._pool = pool
        self._connect = connect_timeout
        self._own = own

    async def unready(self, model: str) -> str | None:
        status, _ = await get(self._pool, "/v2/health/ready", self._connect, self._own())
        if status != 200:
            return "the server is not ready"
        status, _ = await get(self._pool, f"/v2/models/{quote(model, safe='')}/ready", self._connect, self._own())
        return None if status == 200 else f"model {model!r} is not ready"

    async def describe(self, model: str) -> Description:
        path = f"/v2/models/{quote(model, safe='')}"
        try:
            server = msgspec.json.decode(await self._document("/v2"), type=_Server)
            metadata = json_format.Parse(
                await self._document(path), service_pb2.ModelMetadataResponse(), ignore_unknown_fields=True
            )
            config = json_format.Parse(
                await self._document(path + "/config"), model_config_pb2.ModelConfig(), ignore_unknown_fields=True
            )
        except (msgspec.DecodeError, json_format.ParseError) as error:
            raise self._unreadable(error) from None
        return Description(server.version, metadata, config)

    async def failed_ns(self, model: str) -> int:
        path = f"/v2/models/{quote(model, safe='')}/stats"
        try:
            statistics = json_format.Parse(
                await self._document(path), service_pb2.ModelStatisticsResponse(), ignore_unknown_fields=True
            )
        except json_format.ParseError as error:
            raise self._unreadable(error) from None
        return sum(version.inference_stats.fail.ns for version in statistics.model_stats)

    async def generate(self, message: Any, decoupled: bool, deadline: float) -> Sign:
        call = HttpCall(self._pool, generate_request(self._pool, message, self._own(), stream=decoupled), self._connect)
        try:
            async with asyncio.timeout(deadline):
                head = await call.send()
                sink = Collected()
                await call.relay(sink)
        except TimeoutError:
            return Sign.NOTHING
        finally:
            call.close()
        text = error_text(sink.body)
        if is_stub_death(text):
            return Sign.DEAD
        if head.status != 200:
            judged = from_http(head.status, text, endpoint=self._pool.endpoint, received=False)
            if judged.endpoint_fault:
                raise judged
        return Sign.TOKEN

    async def close(self) -> None:
        pass

    def _unreadable(self, error: Exception) -> UpstreamError:
        return UpstreamError(
            Failure.PROTOCOL, f"Engine {self._pool.endpoint} describes itself in a way that cannot be read: {error}."
        )

    async def _document(self, path: str) -> bytes:
        status, body = await get(self._pool, path, self._connect, self._own())
        if status != 200:
            raise from_http(status, error_text(body), endpoint=self._pool.endpoint, received=False)
        return body
