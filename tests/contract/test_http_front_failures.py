"""Triton's HTTP API when something goes wrong: clients that leave, engines that die, replicas that cannot serve."""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import pytest_asyncio

from router.spec.fleet import EndpointSpec, FleetSpec, PoolSpec, ProbeSpec, RouteSpec, TimeoutSpec
from router.spec.gateway import GatewaySpec, RetrySpec
from tests.contract.http_front import Front, ask, fleet_of, http_front
from tests.contract.triton_models_server import triton_models
from tests.harness import AT_ONCE, FAST_PROBES, OPEN, EngineConnection, ScriptedEngine, free_port, running_gateway

PATIENT_PROBES = ProbeSpec(interval="50ms", timeout="4s")
"""Triton takes a second to say that a model's process is dead."""
STREAM_PATH = "/v2/models/ensemble/generate_stream"


def script(**what: Any) -> bytes:
    return json.dumps({"text_input": json.dumps(what), "max_tokens": 10_000, "stream": True}).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def front() -> AsyncIterator[Front]:
    async with http_front() as started:
        yield started


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not await condition():  # noqa: ASYNC110 - counters are no events
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {seconds} s") from None


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind(front: Front) -> None:
    port = front.running.http_port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v2/models/typed_identity/infer HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 200_000
    )
    await writer.drain()
    await front.running.until(lambda: front.running.in_flight["typed_identity"] == 1, "the upload has begun")
    writer.transport.abort()
    await front.running.until_idle(2)


async def test_a_body_that_ends_early_is_refused(front: Front) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.running.http_port)
    writer.write(b"POST /v2/models/typed_identity/infer HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"20000\r\n" + b"x" * 0x20000 + b"\r\nzz\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(await reader.read()) == {"error": "The request body is not what its headers say."}
    writer.close()
    await front.running.until_idle(2)


@pytest.mark.parametrize("size", [10, 70_000, 300_000])
async def test_a_chunked_body_arrives_whole(front: Front, size: int) -> None:
    body = json.dumps({"text_input": "y" * size, "max_tokens": 5}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 10_000):
            yield body[at : at + 10_000]

    status, _, answer = await ask(front.running.url, "/v2/models/ensemble/generate", data=pieces())
    assert status == 200
    assert json.loads(answer)["text_output"] == "y" * size


async def test_a_body_over_the_limit_is_refused_before_it_is_read(front: Front) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.running.http_port)
    writer.write(b"POST /v2/models/typed_identity/infer HTTP/1.1\r\nhost: a\r\ncontent-length: 2147483648\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
    assert b"2147483647" in await reader.readuntil(b"}")
    writer.close()


async def test_a_killed_triton_ends_its_streams_with_an_error_event() -> None:
    async with triton_models("ensemble", "ensemble_whole", "typed_identity") as triton:
        async with running_gateway(fleet_of(triton)) as running, aiohttp.ClientSession() as http:
            async with http.post(running.url + STREAM_PATH, data=script(text="x" * 1000, cut=1, delay=0.05)) as answer:
                assert (await answer.content.readline()).startswith(b"data: {")
                await triton.kill()
                rest = await answer.content.read()
            assert rest.endswith(b"\n\n")
            last = json.loads(rest.strip().rpartition(b"\n\n")[2].removeprefix(b"data: "))
            assert last == {"error": "Engine ensemble broke off in the middle of its answer."}
            refused = await ask(running.url, "/v2/models/ensemble/generate", data=script(text="a"))
            assert refused[0] == 503
            assert refused[1]["retry-after"] == "1"
            assert set(json.loads(refused[2])) == {"error"}
            for id_ in running.gateway.fleet.endpoints:
                await running.until_phase(id_, "unhealthy")
            assert (await ask(running.url, "/v2/health/ready", "GET"))[0] == 400
            assert (await ask(running.url, "/v2/models/ensemble/ready", "GET"))[0] == 400
            await triton.start()
            await running.until_phase("ensemble", "ready")


async def test_a_dead_model_process_ends_its_streams_and_is_avoided() -> None:
    names = ("ensemble",)
    async with triton_models(*names) as first, triton_models(*names) as second:
        endpoints = [
            EndpointSpec(id=id_, grpc=triton.grpc, http=triton.http) for id_, triton in (("a", first), ("b", second))
        ]
        pool = PoolSpec(protocol="triton", model="ensemble", endpoints=endpoints, probe=PATIENT_PROBES)
        spec = FleetSpec(fleet="test", pools={"p": pool}, routes={"m": RouteSpec(pool="p")})
        path = "/v2/models/m/generate_stream"
        # A process that dies holding a lock takes Triton along, so it must be doing nothing.
        at_work = script(text="abc", cut=1, delay=20, deaf=True)
        async with running_gateway(spec) as running:
            streams = [
                asyncio.create_task(ask(running.url, path, data=at_work, headers={"x-session-id": "s"}))
                for _ in range(4)
            ]
            await running.until(lambda: sum(running.in_flight.values()) == 4, "the streams run")
            await asyncio.sleep(0.5)
            home = first if running.in_flight["a"] else second
            for process in psutil.Process(home.pid).children(recursive=True):
                process.kill()
            for _, _, body in await asyncio.wait_for(asyncio.gather(*streams), 10):
                assert b'data: {"error":"' in body
            status, _, body = await ask(running.url, path, data=script(text="alive"), headers={"x-session-id": "s"})
            assert (status, b"alive" in body) == (200, True)


async def test_a_model_unloaded_at_one_replica_is_served_by_the_other() -> None:
    async with triton_models("ensemble") as first, triton_models("ensemble") as second:
        endpoints = [
            EndpointSpec(id=id_, grpc=triton.grpc, http=triton.http) for id_, triton in (("a", first), ("b", second))
        ]
        pool = PoolSpec(protocol="triton", model="ensemble", endpoints=endpoints, probe=FAST_PROBES)
        gateway = GatewaySpec(retry=RetrySpec(budget="off"))  # all of them, if the probe is slow to find out
        spec = FleetSpec(fleet="test", pools={"p": pool}, routes={"m": RouteSpec(pool="p")}, gateway=gateway)
        async with running_gateway(spec) as running:
            await ask(first.http, "/v2/repository/models/ensemble/unload", data=b"{}")
            for _ in range(6):
                status, _, body = await ask(running.url, "/v2/models/m/generate", data=script(text="a"))
                assert (status, json.loads(body)["text_output"]) == (200, "a")


async def test_endpoints_without_an_http_address_are_passed_over(front: Front) -> None:
    async with running_gateway(fleet_of(front.triton, http=False)) as running:
        status, _, body = await ask(running.url, "/v2/models/ensemble/generate", data=script(text="a"))
        assert status == 400
        assert "`http` address" in json.loads(body)["error"]
        assert (await ask(running.url, "/v2/health/ready", "GET"))[0] == 400


async def test_requests_of_one_sequence_and_of_one_prompt_stay_together(front: Front) -> None:
    endpoints = [
        EndpointSpec(id=id_, grpc=front.triton.grpc, http=front.triton.http + base)
        for id_, base in (("a", ""), ("b", "/"), ("c", ""), ("d", "/"))
    ]
    pool = PoolSpec(protocol="triton", model="ensemble", endpoints=endpoints, probe=FAST_PROBES)
    spec = FleetSpec(fleet="test", pools={"p": pool}, routes={"m": RouteSpec(pool="p")})

    async def places(running: Any, *bodies: dict[str, Any]) -> set[str]:
        found = set()
        for body in bodies:
            sent = json.dumps({"max_tokens": 1, **body}).encode()
            status, headers, _ = await ask(running.url, "/v2/models/m/generate", data=sent)
            assert status == 200
            found.add(headers["x-headrace-endpoint"])
        return found

    async with running_gateway(spec) as running:
        prompts = [{"text_input": "p" * 5000 + str(n)} for n in range(8)]
        assert len(await places(running, *prompts)) == 1
        assert len(await places(running, *({"text_input": str(n)} for n in range(24)))) > 1
        assert len(await places(running, *({"text_input": str(n), "sequence_id": 7} for n in range(24)))) == 1


async def test_no_credential_and_no_hop_by_hop_header_reaches_the_engine(front: Front) -> None:
    async def answer(connection: EngineConnection) -> None:
        await connection.head("content-length: 2", "content-type: application/json", "set-cookie: a=b")
        await connection.send(b"{}")

    async with ScriptedEngine(answer) as engine:
        endpoint = EndpointSpec(id="e", grpc=front.triton.grpc, http=f"http://127.0.0.1:{engine.port}")
        pool = PoolSpec(protocol="triton", model="ensemble", endpoints=[endpoint], probe=FAST_PROBES)
        spec = FleetSpec(fleet="test", pools={"p": pool}, routes={"a/b c": RouteSpec(pool="p")})
        secret = {
            "authorization": "Bearer x", "cookie": "a=b", "x-api-key": "k", "te": "trailers", "upgrade": "h2c",
            "traceparent": "00-0-0-00", "endpoint-load-metrics-format": "text",
        }  # fmt: skip
        async with running_gateway(spec) as running:
            status, headers, body = await ask(
                running.url, "/v2/models/a%2Fb%20c/versions/1/infer", data=b"{}", headers=secret
            )
        assert (status, body) == (200, b"{}")
        assert "set-cookie" not in headers
        (request,) = engine.requests
        assert request.path == "/v2/models/ensemble/versions/1/infer"
        assert not request.headers.keys() & {"authorization", "cookie", "x-api-key", "te", "upgrade", "connection"}
        assert request.headers["traceparent"] == "00-0-0-00"
        assert request.headers["endpoint-load-metrics-format"] == "text"
        assert request.headers["x-request-id"] == headers["x-request-id"]


async def test_a_request_may_ask_for_shorter_deadlines(front: Front) -> None:
    async def never(connection: EngineConnection) -> None:
        await connection.client_gone()

    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # all that its queue holds: further connections are made never
            filling = sockets.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(full.getsockname())
        async with ScriptedEngine(never) as engine:
            ports = {"silent": engine.port, "full": full.getsockname()[1]}
            pools = {
                name: PoolSpec(
                    protocol="triton",
                    model="ensemble",
                    endpoints=[EndpointSpec(id=name, grpc=front.triton.grpc, http=f"http://127.0.0.1:{port}")],
                    probe=FAST_PROBES,
                    timeouts=TimeoutSpec(connect="60s", first_byte="60s"),
                )
                for name, port in ports.items()
            }
            spec = FleetSpec(fleet="test", pools=pools, routes={name: RouteSpec(pool=name) for name in pools})
            async with running_gateway(spec) as running:

                async def refusal(route: str, timeouts: str) -> tuple[int, str]:
                    headers = {"x-headrace-timeouts": timeouts}
                    async with asyncio.timeout(5):
                        status, _, body = await ask(
                            running.url, f"/v2/models/{route}/generate", data=script(text="a"), headers=headers
                        )
                    return status, msgspec.json.decode(body, type=dict[str, str])["error"]

                status, said = await refusal("silent", "soon")
                assert (status, engine.requests) == (400, [])
                assert said.startswith("Invalid x-headrace-timeouts header: 'soon' is none of connect, first_byte")
                status, said = await refusal("silent", "first_byte=100ms")
                assert (status, said) == (504, "The engine was silent for longer than the first_byte timeout of 0.1 s.")
                assert (await refusal("full", "connect=100ms"))[0] == 503


def memory(pid: int, which: str) -> int:
    """Resident bytes of a process: now (`VmRSS`), or at its highest (`VmHWM`)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))


async def test_a_large_body_is_never_held_whole(front: Front, tmp_path: Path) -> None:
    size = 100_000_000
    http_port, admin_port = free_port(), free_port()
    addresses = GatewaySpec(http=f"127.0.0.1:{http_port}", admin=f"127.0.0.1:{admin_port}", auth=OPEN, drain=AT_ONCE)
    spec = msgspec.structs.replace(fleet_of(front.triton), gateway=addresses)
    file = tmp_path / "fleet.yaml"
    file.write_bytes(msgspec.yaml.encode(spec))
    tensor = {"name": "UINT8_IN", "shape": [1, size], "datatype": "UINT8", "parameters": {"binary_data_size": size}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "headrace", "gateway", "--config", str(file))
    try:
        url = f"http://127.0.0.1:{http_port}"

        async def ready() -> bool:
            try:
                return (await ask(url, "/v2/models/typed_identity/ready", "GET"))[0] == 200
            except aiohttp.ClientError:
                return False

        await until(ready, "the gateway serves", 20)
        before = memory(process.pid, "VmRSS")
        length = {"inference-header-content-length": str(len(header))}
        content = os.urandom(1 << 20) * (size >> 20) + bytes(size % (1 << 20))
        status, _, body = await ask(url, "/v2/models/typed_identity/infer", data=header + content, headers=length)
        assert status == 200
        assert body.endswith(content)
        grown = memory(process.pid, "VmHWM") - before
        assert grown < size // 4, f"{grown} bytes more than before"
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize("pause", [0.0, 0.05])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/nope", "/v2/models/typed_identity/infer", "/v2/models/nope/infer", "/v2/nope"]
)
async def test_no_malformed_body_leaves_a_stack_trace_in_the_log(
    front: Front, caplog: pytest.LogCaptureFixture, path: str, pause: float
) -> None:
    for rest in (b"5\r\nhelloXX\r\n", b"zz\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", front.running.http_port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        await asyncio.sleep(pause)
        writer.write(rest)
        assert (await reader.readuntil(b"\r\n\r\n")).split()[1] in (b"400", b"404")
        await asyncio.sleep(0.05)  # what is left of the body is drained
        writer.close()
    assert [record for record in caplog.records if record.exc_info] == []
