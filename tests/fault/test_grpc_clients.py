"""gRPC clients that take more than they may: calls, connections, messages, metadata, pings."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gateway.live_requests import RequestFilter
from gateway.upstream.http2 import frames
from gateway.upstream.http2.frames import FrameReader, frame
from gateway.upstream.triton.raw import SERVICE
from headrace.bench.kserve.messages import ONCE, STREAM, text_request
from router.spec.fleet import FleetSpec, RouteSpec
from router.spec.gateway import ClientsSpec, GatewaySpec
from tests.fault.held_triton import HeldTriton
from tests.harness import FAST_PROBES, RunningGateway, running_gateway

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@contextlib.asynccontextmanager
async def gateway(triton: HeldTriton, *, message_limit: str = "64MiB", **clients: Any) -> AsyncIterator[RunningGateway]:
    pools = triton.pools(probe=FAST_PROBES)
    routes = {route: RouteSpec(pool=route) for route in pools}
    limits = GatewaySpec(grpc=":8001", clients=ClientsSpec(**clients), message_limit=message_limit)
    spec = FleetSpec(fleet="test", pools=pools, routes=routes, gateway=limits)
    async with running_gateway(spec) as running:
        yield running


@contextlib.asynccontextmanager
async def channel(running: RunningGateway) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(running.grpc_address, options=options) as opened:
        yield opened


async def stream(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> Any:
    """A stream that has begun."""
    call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(metadata=metadata, timeout=10)
    await call.write(text_request(STREAM))
    await call.read()
    return call


async def told(channel: grpc.aio.Channel, *metadata: tuple[str, str], message: bytes = b"") -> tuple[Any, str]:
    """How a unary call ends."""
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer")(message or text_request(ONCE), metadata=metadata, timeout=10)
    return await call.code(), await call.details() or ""


def refused(running: RunningGateway, reason: str) -> float:
    return running.gateway.registry.get_sample_value("headrace_clients_refused_total", {"reason": reason}) or 0.0


async def test_calls_over_the_cap_of_a_connection_are_refused_until_one_has_finished() -> None:
    async with HeldTriton() as triton, gateway(triton, streams_per_connection=2) as running:
        async with channel(running) as one, channel(running) as other:
            held = [await stream(one) for _ in range(2)]
            code, details = await told(one)
            assert (code, details) == (EXHAUSTED, "This connection has too many calls open. Wait for one to finish.")
            with pytest.raises(grpc.aio.AioRpcError) as over:
                await stream(one)
            assert over.value.code() is EXHAUSTED
            live = await one.unary_unary(f"/{SERVICE}/ServerLive")(b"")
            assert live, "who asks for health is answered"
            assert (await told(other))[0] is grpc.StatusCode.OK
            held.pop().cancel()  # a client that leaves gives its place back, too
            await running.until(lambda: running.live_requests == 1, "one is gone")
            assert (await told(one))[0] is grpc.StatusCode.OK
            triton.let_go()
            await held[0].done_writing()
            assert await held[0].read()
            assert await held[0].read() is grpc.aio.EOF
            assert await held[0].code() is grpc.StatusCode.OK
            assert refused(running, "connection_streams") == 2
            assert not running.gateway._addresses._connection_streams._held


async def test_calls_over_the_cap_of_an_address_are_refused_over_all_its_connections() -> None:
    async with HeldTriton() as triton, gateway(triton, streams_per_peer=2) as running:
        async with channel(running) as one, channel(running) as other:
            held = [await stream(one), await stream(other)]
            for connection in (one, other):
                code, details = await told(connection)
                assert (code, details) == (EXHAUSTED, "Your address has too many calls open. Wait for one to finish.")
            held.pop().cancel()
            await running.until(lambda: running.live_requests == 1, "one is gone")
            assert (await told(one))[0] is grpc.StatusCode.OK
            assert refused(running, "peer_streams") == 2
            held.pop().cancel()
            await running.until_idle()
            assert not running.gateway._addresses._peer_streams._held


async def test_behind_a_trusted_proxy_calls_count_for_whom_it_names() -> None:
    caps: dict[str, Any] = {"streams_per_connection": 1, "streams_per_peer": 1, "trusted_proxies": ["127.0.0.1"]}
    first, second = (("x-forwarded-for", f"203.0.113.{number}") for number in (7, 8))
    async with HeldTriton() as triton, gateway(triton, **caps) as running, channel(running) as proxy:
        held = [await stream(proxy, first), await stream(proxy, second), await stream(proxy), await stream(proxy)]
        assert (await told(proxy, first))[0] is EXHAUSTED
        assert (await told(proxy, ("x-forwarded-for", "203.0.113.9, 203.0.113.8")))[0] is EXHAUSTED
        assert (await told(proxy, ("x-forwarded-for", "203.0.113.9")))[0] is grpc.StatusCode.OK
        assert refused(running, "peer_streams") == 2
        listed = await running.gateway.list_requests(RequestFilter())
        assert [row.client for row in listed.requests] == ["203.0.113.7", "203.0.113.8", "127.0.0.1", "127.0.0.1"]
        for call in held:
            call.cancel()


async def test_what_is_too_large_is_refused_in_words() -> None:
    async with HeldTriton() as triton, gateway(triton, message_limit="1MiB") as running, channel(running) as client:
        assert (await told(client, ("x-large", "a" * 15_000)))[0] is grpc.StatusCode.OK
        code, details = await told(client, ("x-large", "a" * 17_000))
        assert (code, "metadata size exceeds" in details) == (EXHAUSTED, True)
        code, details = await told(client, message=bytes(1024 * 1024 + 1))
        assert (code, "message larger than max" in details) == (EXHAUSTED, True)
        with pytest.raises(grpc.aio.AioRpcError) as over:
            call = client.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
            await call.write(bytes(1024 * 1024 + 1))
            await call.read()
        assert over.value.code() is EXHAUSTED


async def test_connections_over_the_cap_are_closed_and_others_go_on() -> None:
    async with HeldTriton() as triton, gateway(triton, grpc_connections=2) as running:
        async with channel(running) as one, channel(running) as other, channel(running) as over:
            assert [(await told(client))[0] for client in (one, other)] == [grpc.StatusCode.OK] * 2
            assert (await told(over))[0] is grpc.StatusCode.UNAVAILABLE
            assert [(await told(client))[0] for client in (one, other)] == [grpc.StatusCode.OK] * 2


@pytest.mark.parametrize("per_read", [1, 50])
async def test_a_client_that_pings_without_end_is_told_to_calm_down(per_read: int) -> None:
    async with HeldTriton() as triton, gateway(triton) as running, channel(running) as good:
        assert (await told(good))[0] is grpc.StatusCode.OK
        assert running.grpc_port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", running.grpc_port)
        writer.write(frames.PREFACE + frames.settings({}))
        found, read = FrameReader(), b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while not any(one[0] == frames.GOAWAY for one in found.feed(read)):
                    writer.write(frame(frames.PING, 0, 0, bytes(8)) * per_read)
                    read = await reader.read(65536)
                    assert read, "it is told why"
        writer.close()
        assert (await told(good))[0] is grpc.StatusCode.OK
