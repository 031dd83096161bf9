"""Engines that go on failing while their health checks say that all is well: how often they are asked, how soon they
are left alone, and what their clients get. The engines are scripted."""

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest

from router.spec.fleet import EndpointSpec, FleetSpec, OutlierSpec, TimeoutSpec
from router.spec.gateway import RetrySpec
from tests.harness import (
    CHAT,
    DONE,
    ONE,
    STREAM,
    EngineConnection,
    RunningGateway,
    ScriptedEngine,
    answering,
    one_pool,
    running_gateway,
    streaming,
)

TOO_LONG = b'{"object":"error","message":"This model\'s maximum context length is 16 tokens.","code":500}'
OWN = b'{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}'

whole = streaming(ONE, DONE)


def fleet(*endpoints: EndpointSpec, retry: RetrySpec | None = None, outlier: OutlierSpec | None = None) -> FleetSpec:
    spec = one_pool(*endpoints, timeouts=TimeoutSpec(first_byte="2s"))
    pool = msgspec.structs.replace(spec.pools["p"], outlier=outlier or OutlierSpec())
    gateway = msgspec.structs.replace(spec.gateway, retry=retry or RetrySpec())
    return msgspec.structs.replace(spec, pools={"p": pool}, gateway=gateway)


async def ask(
    client: aiohttp.ClientSession, running: RunningGateway, salt: int = 0, body: dict[str, Any] = STREAM
) -> tuple[int, bytes]:
    request = {**body, "cache_salt": str(salt)}
    async with client.post(f"{running.url}/v1/chat/completions", json=request) as response:
        return response.status, await response.read()


def counted(running: RunningGateway, name: str, **labels: str) -> float:
    return running.gateway.registry.get_sample_value(name, labels) or 0.0


class TestRetryBudget:
    @pytest.mark.parametrize("how", ["busy", "lost"])
    async def test_a_failing_pool_is_asked_a_tenth_more_often_and_no_more(
        self, client: aiohttp.ClientSession, how: str
    ) -> None:
        clients = 100
        all_there = asyncio.Event()

        async def fails(connection: EngineConnection) -> None:
            if len(engine.requests) == clients:
                all_there.set()
            await all_there.wait()
            if how == "busy":
                await answering("503 Service Unavailable", b"busy", "retry-after: 7")(connection)
            else:
                connection.reset()

        async with ScriptedEngine(fails) as engine:
            spec = fleet(*(engine.endpoint(f"e{n}") for n in range(4)))
            async with running_gateway(spec) as running:
                started = asyncio.get_running_loop().time()
                answers = await asyncio.gather(*(ask(client, running, salt) for salt in range(clients)))
                took = asyncio.get_running_loop().time() - started
                refused = counted(running, "headrace_retries_refused_total", route="m")
                attempts = sum(
                    counted(running, "headrace_attempts_total", endpoint=f"e{n}", reason=reason)
                    for n in range(4)
                    for reason in ("affinity", "spill", "fallback")
                )
        assert {status for status, _ in answers} == {503 if how == "busy" else 502}
        if how == "busy":
            assert {body for _, body in answers} == {b"busy"}
        assert clients < attempts <= clients * 1.1 + 3 + 3 * took
        assert refused >= clients - (attempts - clients)
        if (
            how == "busy"
        ):  # else a connection that was used before may have been taken for a stale one, and sent on anew
            assert len(engine.requests) == attempts

    async def test_retries_can_be_turned_off(self, client: aiohttp.ClientSession) -> None:
        async with ScriptedEngine(answering("503 Service Unavailable", b"busy", "retry-after: 7")) as engine:
            spec = fleet(engine.endpoint("a"), engine.endpoint("b"), retry=RetrySpec(budget="0%", min_per_second=0))
            async with running_gateway(spec) as running:
                assert {await ask(client, running, salt) for salt in range(10)} == {(503, b"busy")}
        assert len(engine.requests) == 10

    async def test_a_few_retries_are_allowed_to_a_quiet_gateway(self, client: aiohttp.ClientSession) -> None:
        async with ScriptedEngine(answering("503 Service Unavailable", b"busy")) as full, ScriptedEngine(whole) as good:
            async with running_gateway(fleet(full.endpoint("a"), good.endpoint("b"))) as running:
                salt = 0
                while not full.requests:
                    assert await ask(client, running, salt) == (200, ONE + DONE)
                    salt += 1
                assert counted(running, "headrace_attempts_total", endpoint="b", reason="fallback") == 1


class TestEjection:
    async def test_an_endpoint_that_keeps_failing_is_ejected_tried_with_one_request_and_readmitted(
        self, client: aiohttp.ClientSession
    ) -> None:
        recovered, go_on = False, asyncio.Event()

        async def ill(connection: EngineConnection) -> None:
            if not recovered:
                await answering("500 Internal Server Error", OWN)(connection)
                return
            await go_on.wait()
            await whole(connection)

        async with ScriptedEngine(ill) as bad, ScriptedEngine(whole) as good:
            outlier = OutlierSpec(failures=3, base_ejection="500ms")
            async with running_gateway(fleet(bad.endpoint("a"), good.endpoint("b"), outlier=outlier)) as running:
                a = running.gateway.fleet.endpoints["a"]
                salts = iter(range(1000))
                while len(bad.requests) < 3:
                    assert (await ask(client, running, next(salts)))[0] in (200, 500)
                assert a.phase == "unhealthy"
                assert "3 failed requests in a row, the last: Engine a answered 500." in a.detail
                assert counted(running, "headrace_endpoint_phase", endpoint="a", pool="p", phase="unhealthy") == 1
                assert counted(running, "headrace_ejections_total", endpoint="a") == 1
                assert counted(running, "headrace_upstream_failures_total", endpoint="a", failure="internal") == 3
                assert {await ask(client, running, next(salts)) for _ in range(20)} == {(200, ONE + DONE)}
                assert len(bad.requests) == 3

                recovered = True
                await running.until_phase("a", "ready")  # on trial
                assert a.state.outlier.ejected
                many = [asyncio.create_task(ask(client, running, next(salts))) for _ in range(20)]
                await running.until(lambda: sum(task.done() for task in many) == 19, "all but the one on trial")
                assert len(bad.requests) == 4
                go_on.set()
                assert {await task for task in many} == {(200, ONE + DONE)}
                assert a.detail == "ready"
                await asyncio.gather(*(ask(client, running, next(salts)) for _ in range(20)))
                assert len(bad.requests) > 5

    async def test_a_trial_whose_client_leaves_decides_nothing(self, client: aiohttp.ClientSession) -> None:
        recovered = False

        async def ill(connection: EngineConnection) -> None:
            if not recovered:
                await answering("500 Internal Server Error", OWN)(connection)
            else:
                await connection.client_gone()

        async with ScriptedEngine(ill) as bad, ScriptedEngine(whole) as good:
            outlier = OutlierSpec(failures=1, base_ejection="200ms")
            async with running_gateway(fleet(bad.endpoint("a"), good.endpoint("b"), outlier=outlier)) as running:
                a = running.gateway.fleet.endpoints["a"]
                salts = iter(range(1000))
                while not bad.requests:
                    await ask(client, running, next(salts))
                recovered = True
                await running.until_phase("a", "ready")
                many = [asyncio.create_task(ask(client, running, next(salts))) for _ in range(20)]
                await running.until(lambda: sum(task.done() for task in many) == 19, "all but the one on trial")
                assert (a.phase, a.state.outlier.trial is not None) == ("unhealthy", True)
                for task in many:
                    task.cancel()
                await running.until_phase("a", "ready")
                assert a.state.outlier.on_trial
                assert counted(running, "headrace_ejections_total", endpoint="a") == 1

    async def test_the_last_endpoint_is_never_ejected(self, client: aiohttp.ClientSession) -> None:
        async with ScriptedEngine(answering("500 Internal Server Error", OWN)) as engine:
            outlier = OutlierSpec(failures=1, max_ejected="100%")
            async with running_gateway(fleet(engine.endpoint(), outlier=outlier)) as running:
                assert {await ask(client, running, salt) for salt in range(10)} == {(500, OWN)}
                assert running.gateway.fleet.endpoints["engine"].phase == "ready"
        assert len(engine.requests) == 10

    async def test_an_ejected_endpoint_is_readmitted_when_it_is_the_only_one_left(
        self, client: aiohttp.ClientSession
    ) -> None:
        bad_answer, good = answering("500 Internal Server Error", OWN), ScriptedEngine(whole)
        async with ScriptedEngine(bad_answer) as bad, good:
            outlier = OutlierSpec(failures=1, base_ejection="300s")
            async with running_gateway(fleet(bad.endpoint("a"), good.endpoint("b"), outlier=outlier)) as running:
                salts = iter(range(1000))
                while not bad.requests:
                    await ask(client, running, next(salts))
                assert running.gateway.fleet.endpoints["a"].phase == "unhealthy"
                await good.die()
                await running.until_phase("a", "ready")
                bad.script = whole
                assert await ask(client, running) == (200, ONE + DONE)


class TestWhoseFault:
    @pytest.mark.parametrize("framing", ["length", "chunked", "close", "in pieces"])
    async def test_a_500_for_a_prompt_that_is_too_long_is_passed_on_as_a_400_and_counts_against_nobody(
        self, client: aiohttp.ClientSession, framing: str
    ) -> None:
        async def refuses(connection: EngineConnection) -> None:
            status, kind = "500 Internal Server Error", "content-type: application/json"
            if framing in ("length", "in pieces"):
                await connection.head(kind, f"content-length: {len(TOO_LONG)}", status=status)
            elif framing == "chunked":
                await connection.head(kind, "transfer-encoding: chunked", status=status)
            else:
                await connection.head(kind, "connection: close", status=status)
            if framing == "chunked":
                for piece in (TOO_LONG[:20], TOO_LONG[20:]):
                    await connection.chunk(piece)
                    await asyncio.sleep(0.01)
                await connection.end()
            elif framing == "in pieces":
                await connection.send(TOO_LONG[:20])
                await asyncio.sleep(0.02)
                await connection.send(TOO_LONG[20:])
            else:
                await connection.send(TOO_LONG)
            if framing == "close":
                connection.writer.close()

        async with ScriptedEngine(refuses) as first, ScriptedEngine(refuses) as second:
            outlier = OutlierSpec(failures=1)
            async with running_gateway(fleet(first.endpoint("a"), second.endpoint("b"), outlier=outlier)) as running:
                assert {await ask(client, running, salt) for salt in range(6)} == {(400, TOO_LONG)}
                assert {endpoint.phase for endpoint in running.gateway.fleet.endpoints.values()} == {"ready"}
                for endpoint in "ab":
                    assert not counted(
                        running, "headrace_upstream_failures_total", endpoint=endpoint, failure="internal"
                    )
        assert len(first.requests) + len(second.requests) == 6

    @pytest.mark.parametrize("size", [len(OWN), 8192, 300_000])
    async def test_an_engines_own_500_is_passed_on_byte_for_byte_and_tried_nowhere_else(
        self, client: aiohttp.ClientSession, size: int
    ) -> None:
        body = OWN.ljust(size)
        async with ScriptedEngine(answering("500 Internal Server Error", body)) as first:
            async with ScriptedEngine(answering("500 Internal Server Error", body)) as second:
                async with running_gateway(fleet(first.endpoint("a"), second.endpoint("b"))) as running:
                    assert await ask(client, running) == (500, body)
        assert len(first.requests) + len(second.requests) == 1

    async def test_an_error_whose_body_does_not_come_is_given_up_in_time(self, client: aiohttp.ClientSession) -> None:
        async def stalls(connection: EngineConnection) -> None:
            await connection.head("content-length: 100", status="500 Internal Server Error")
            await connection.client_gone()

        async with ScriptedEngine(stalls) as engine:
            spec = one_pool(engine.endpoint(), timeouts=TimeoutSpec(first_byte="100ms"))
            async with running_gateway(spec) as running:
                status, body = await ask(client, running)
        assert (status, json.loads(body)["error"]["code"]) == (504, "first_byte_timeout")

    async def test_an_error_that_breaks_off_never_looks_whole(self, client: aiohttp.ClientSession) -> None:
        async def breaks_off(connection: EngineConnection) -> None:
            await connection.head("content-length: 100", status="500 Internal Server Error")
            await connection.send(b"half")
            connection.reset()

        async with ScriptedEngine(breaks_off) as engine, running_gateway(fleet(engine.endpoint())) as running:
            with pytest.raises(aiohttp.ClientError):
                await ask(client, running)

    @pytest.mark.parametrize("status", ["429 Too Many Requests", "502 Bad Gateway", "504 Gateway Timeout"])
    async def test_busy_engines_and_proxies_without_one_send_the_request_elsewhere_and_are_quoted_at_last(
        self, client: aiohttp.ClientSession, status: str
    ) -> None:
        async with ScriptedEngine(answering(status, b"no", "retry-after: 7")) as bad, ScriptedEngine(whole) as good:
            retry = RetrySpec(budget="off")
            async with running_gateway(fleet(bad.endpoint("a"), good.endpoint("b"), retry=retry)) as running:
                assert {await ask(client, running, salt) for salt in range(6)} == {(200, ONE + DONE)}
            assert bad.requests
            async with running_gateway(fleet(bad.endpoint(), retry=retry)) as running:
                async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
                    assert (response.status, await response.read()) == (int(status[:3]), b"no")
                    assert response.headers["retry-after"] == "7"

    @pytest.mark.parametrize("busy", [True, False])
    async def test_an_engines_error_in_place_of_a_stream_sends_the_request_elsewhere(
        self, client: aiohttp.ClientSession, busy: bool
    ) -> None:
        error = b"data: " + (OWN.replace(b"500", b"503") if busy else OWN) + b"\n\n"
        async with ScriptedEngine(streaming(error, DONE)) as bad, ScriptedEngine(whole) as good:
            retry = RetrySpec(budget="off")
            async with running_gateway(fleet(bad.endpoint("a"), good.endpoint("b"), retry=retry)) as running:
                assert {await ask(client, running, salt) for salt in range(6)} == {(200, ONE + DONE)}
            assert bad.requests
            async with running_gateway(fleet(bad.endpoint())) as running:
                assert await ask(client, running) == (200, error + DONE)
                failure = "busy" if busy else "lost_before_answer"
                assert counted(running, "headrace_upstream_failures_total", endpoint="engine", failure=failure) == 1

    async def test_a_clients_error_in_place_of_a_stream_goes_to_the_client(self, client: aiohttp.ClientSession) -> None:
        error = b"data: " + TOO_LONG + b"\n\n"
        async with ScriptedEngine(streaming(error, DONE)) as first, ScriptedEngine(streaming(error, DONE)) as second:
            async with running_gateway(fleet(first.endpoint("a"), second.endpoint("b"))) as running:
                assert {await ask(client, running, salt) for salt in range(4)} == {(200, error + DONE)}
                for endpoint in "ab":
                    name = "headrace_upstream_failures_total"
                    assert not counted(running, name, endpoint=endpoint, failure="lost_before_answer")
        assert len(first.requests) + len(second.requests) == 4
