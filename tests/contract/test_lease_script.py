"""The script by which gateways share limits, on real servers: equal to its model, atomic, gone when of no use."""

import asyncio
import random
from pathlib import Path

import pytest
from redis.asyncio import Redis

from router.admission.leases import PERMITS_EXPIRE_S, RateAsk, StreamAsk
from router.admission.limits import KINDS, Ask, Grant, Limits, Meter
from router.state.lease_script import GRANT, SCRIPT, arguments, grant
from tests.lease_store import LeaseStore
from tests.valkey import ValkeyProcess, servers_here

KEY = "headrace:{demo}:limits:acme/smollm2"


async def run(client: Redis, ask: Ask, gateway: str = "gw-a") -> Grant:
    answer = await client.eval(SCRIPT, 1, KEY, *arguments(gateway, ask))
    return grant(answer)


def some_ask(rng: random.Random) -> Ask:
    kinds = [kind for kind in KINDS if rng.random() < 0.8]
    rates = [
        (
            kind,
            RateAsk(
                limit=rng.choice([0.0, 60.0, 90_000.0]),
                want=rng.randrange(3000),
                believed=rng.uniform(-50, 90_000),
                owed=rng.choice([0.0, rng.uniform(0, 200)]),
                filled=rng.choice([0.0, rng.uniform(0, 20)]),
                back=rng.choice([0.0, rng.uniform(0, 50)]),
            ),
        )
        for kind in kinds
    ]
    streams = StreamAsk(rng.choice([0, 7, 40]), rng.randrange(4), rng.randrange(12)) if rng.random() < 0.8 else None
    return Ask(tuple(rates), streams)


@pytest.mark.parametrize("binary", servers_here(), ids=lambda path: Path(path).name)
async def test_the_script_does_what_its_model_does(binary: str, tmp_path: Path) -> None:
    rng = random.Random(4)
    with_clock = "local now = tonumber(ARGV[#ARGV])\nARGV[#ARGV] = nil\n" + GRANT
    async with ValkeyProcess(binary, tmp_path) as server, server.client() as client:
        script = client.register_script(with_clock)
        for _ in range(20):
            model, now = LeaseStore(), 1_800_000_000.0
            await client.flushall()
            for _ in range(60):
                now += rng.choice([0.0, 0.001, 0.3, 5.0, 20.0, -2.0])
                gateway, ask = rng.choice(["gw-a", "gw-b", "gw-c"]), some_ask(rng)
                answer = await script(keys=[KEY], args=[*arguments(gateway, ask), repr(now)])
                await client.persist(KEY)
                assert grant(answer) == model.grant(gateway, ask, now)
            fields: dict[bytes, bytes] = await client.hgetall(KEY)  # type: ignore[assignment]
            stored = {name.decode(): value.decode() for name, value in fields.items()}
            assert {kind: float(stored[kind]) for kind in model.levels} == model.levels
            permits = {name[1:]: int(value.split(":")[0]) for name, value in stored.items() if name[0] == "@"}
            assert permits == {name: count for name, (count, _) in model.permits.items()}


@pytest.mark.parametrize("binary", servers_here(), ids=lambda path: Path(path).name)
async def test_gateways_that_ask_at_once_get_no_more_than_there_is(binary: str, tmp_path: Path) -> None:
    async with ValkeyProcess(binary, tmp_path) as server, server.client() as client:
        ask = Ask((("requests", RateAsk(60, 7, 60)), ("prompt_tokens", RateAsk(600, 90, 600))), StreamAsk(10, 0, 3))
        grants = await asyncio.gather(*(run(client, ask, f"gw-{number}") for number in range(20)))
        assert sum(given.rates[0].units for given in grants) in (60, 61)
        assert 600 <= sum(given.rates[1].units for given in grants) <= 620
        assert sum(given.permits for given in grants) == 10


@pytest.mark.parametrize("binary", servers_here(), ids=lambda path: Path(path).name)
async def test_what_the_store_knows_expires_when_it_says_no_more_than_a_new_bucket(binary: str, tmp_path: Path) -> None:
    async with ValkeyProcess(binary, tmp_path) as server, server.client() as client:
        await run(client, Ask((("requests", RateAsk(60, 0, 60)),), None))
        assert await client.pttl(KEY) <= 60_000
        await run(client, Ask((("requests", RateAsk(60, 0, 60, owed=120)),), None))
        assert 110_000 < await client.pttl(KEY) <= 120_000
        await run(client, Ask((), StreamAsk(4, 0, 1)))
        assert await client.pttl(KEY) >= PERMITS_EXPIRE_S * 1000 - 500


async def test_an_emptied_store_does_not_hand_out_a_limit_twice(tmp_path: Path) -> None:
    async with ValkeyProcess(servers_here()[0], tmp_path) as server, server.client() as client:
        meter = Meter(Limits(requests=60), 0.0)
        meter.rates["requests"].spend(60, 0.0)
        for now in (0.1, 0.2):
            ask = meter.ask(None, now)
            meter.granted(ask, await run(client, ask), now)
        await client.flushall()
        meter.rates["requests"].spend(1, 1.0)
        answer = await run(client, meter.ask(None, 1.0))
        assert answer.rates[0].level < 2
