"""The shared fleet documents when Redis is lost, frozen, emptied, restored from an old dump, or holds other things."""

import asyncio
import logging
import time

import msgspec
import pytest

from router.state.errors import StateUnavailable
from router.state.store import DocumentStore, Mark
from tests.contract.state_gateways import DRAIN, OTHER_FILE, Gateway, document, running, until
from tests.valkey import ValkeyProcess


async def test_documents_of_all_sources_survive_the_loss_of_redis_and_of_its_data(
    redis_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.state")
    one, two = Gateway(redis_server.url), Gateway(redis_server.url)
    store = DocumentStore(redis_server.url, "demo")
    async with running(one, two):
        await one.state.put(document("endpoints", "a", DRAIN))
        await store.replace_source("discovery", [document("endpoints", "d", {"pool": "p"}, "discovery")], Mark(1, ""))
        await until(lambda: two.drained("a") and "d" in two.ids and "d" in one.ids)
        calls = len(one.calls)
        redis_server.kill()
        await until(lambda: not one.state.status.connected and not two.state.status.connected)
        lost = one.state.status
        assert lost.lost_since is not None
        assert lost.error is not None
        with pytest.raises(StateUnavailable):
            await one.state.put(document("endpoints", "a", DRAIN, generation=2))
        await asyncio.sleep(1.5)
        assert one.drained("a")
        await redis_server.start()
        await until(lambda: one.state.status.connected and two.state.status.connected)
        assert one.state.status.lost_since is None
        await asyncio.sleep(0.7)
        assert len(one.calls) == calls, "nothing changed, so nothing was handed on"
        late = Gateway(redis_server.url)
        async with running(late):
            assert late.drained("a")
            assert late.ids == {"a", "r", "d"}
    await store.close()
    losses = [record for record in caplog.records if "stays as last known" in record.message]
    returns = [record for record in caplog.records if record.message.endswith("is back")]
    assert (len(losses), len(returns)) == (2, 2), "one line per gateway and event, not one per try"


async def test_a_flushed_redis_is_filled_again_without_undoing_newer_writes(redis_server: ValkeyProcess) -> None:
    gateway = Gateway(redis_server.url)
    store = DocumentStore(redis_server.url, "demo")
    async with running(gateway):
        for id_ in ("kept", "rewritten", "deleted"):
            await gateway.state.put(document("routes", id_, {"pool": "p"}, generation=5))
        known = await store.load()
        async with redis_server.client() as client:
            await client.flushall()
        await store.put(document("routes", "rewritten", {"pool": "new"}, generation=6))
        await store.delete("routes", "deleted", "cli")
        await store.restore(known)
        routes = {
            id_: d.generation for (family, _, id_), d in (await store.load()).documents.items() if family == "routes"
        }
        assert routes == {"r": 1, "kept": 5, "rewritten": 6}
        await until(lambda: gateway.ids == {"a", "r", "kept", "rewritten"})
    await store.close()


async def test_a_flush_is_noticed_without_any_write(redis_server: ValkeyProcess) -> None:
    gateway = Gateway(redis_server.url)
    store = DocumentStore(redis_server.url, "demo")
    async with running(gateway), redis_server.client() as client:
        await gateway.state.put(document("endpoints", "a", DRAIN))
        before = (await store.load()).documents
        await client.flushall()
        await asyncio.sleep(1.5)
        assert (await store.load()).documents == before
        await client.delete("headrace:{demo}:endpoints")  # an eviction takes one key only
        await asyncio.sleep(1.5)
        assert (await store.load()).documents == before
        assert gateway.drained("a")
    await store.close()


async def test_a_gateway_that_knows_less_does_not_take_the_overlays_away(redis_server: ValkeyProcess) -> None:
    """A fresh gateway fills the emptied Redis with its file first; the old one still brings the drain back."""
    old = Gateway(redis_server.url)
    async with running(old):
        await old.state.put(document("endpoints", "a", DRAIN))
        redis_server.kill()
        await until(lambda: not old.state.status.connected)
        await redis_server.start()
        fresh = Gateway(redis_server.url)
        async with running(fresh):
            await until(lambda: fresh.drained("a") and old.state.status.connected)


async def test_a_redis_that_comes_back_with_an_old_dump_is_brought_up_to_date(redis_server: ValkeyProcess) -> None:
    gateway = Gateway(redis_server.url)
    async with running(gateway):
        await gateway.state.put(document("routes", "x", {"pool": "old"}, generation=1))
        async with redis_server.client() as client:
            await client.save()
        await gateway.state.put(document("routes", "x", {"pool": "new"}, generation=2))
        await gateway.state.put(document("endpoints", "a", DRAIN))
        known = gateway.state.documents
        redis_server.kill()
        await until(lambda: not gateway.state.status.connected)
        await redis_server.start()
        await until(lambda: gateway.state.status.connected)
        assert gateway.state.documents == known
        store = DocumentStore(redis_server.url, "demo")
        stored = (await store.load()).documents
        await store.close()
        assert stored["routes", "cli", "x"].generation == 2
        assert ("endpoints", "cli", "a") in stored


async def test_a_frozen_redis_is_noticed_and_its_return_too(redis_server: ValkeyProcess) -> None:
    gateway = Gateway(redis_server.url)
    async with running(gateway):
        redis_server.pause()
        await until(lambda: not gateway.state.status.connected, within_s=4)
        assert gateway.ids == {"a", "r"}
        began = time.monotonic()
        cold = Gateway(redis_server.url)
        async with running(cold):
            assert time.monotonic() - began < 2
            assert cold.ids == {"a", "r"}
            redis_server.resume()
            await until(lambda: gateway.state.status.connected and cold.state.status.connected, within_s=4)


async def test_a_gateway_started_without_redis_serves_its_file_and_publishes_it_later(
    redis_server: ValkeyProcess,
) -> None:
    redis_server.kill()
    gateway = Gateway(redis_server.url)
    async with running(gateway):
        assert gateway.ids == {"a", "r"}
        assert not gateway.state.status.connected
        await redis_server.start()
        await until(lambda: gateway.state.status.connected)
        store = DocumentStore(redis_server.url, "demo")
        snapshot = await store.load()
        await store.close()
        assert {id_ for _, _, id_ in snapshot.documents} == {"p", "a", "r"}


async def test_a_late_publication_does_not_replace_that_of_a_gateway_started_later(redis_server: ValkeyProcess) -> None:
    redis_server.kill()
    first = Gateway(redis_server.url)
    await first.state.start()
    await asyncio.sleep(0.01)
    last = Gateway(redis_server.url, OTHER_FILE)
    async with running(last):
        await redis_server.start()
        await until(lambda: first.state.status.connected and last.state.status.connected)
        await until(lambda: first.ids == last.ids == {"b", "r2"})
        assert first.state.status.file_differs
    await first.state.stop()


async def test_undecodable_documents_are_skipped_and_reported(redis_server: ValkeyProcess) -> None:
    gateway = Gateway(redis_server.url)
    async with running(gateway), redis_server.client() as client:
        await client.hset("headrace:{demo}:routes", "cli/broken", b"\xff{")
        await client.hset("headrace:{demo}:routes", "cli/moved", msgspec.json.encode(document("routes", "other", {})))
        await gateway.state.put(document("routes", "good", {"pool": "p"}))
        assert gateway.ids == {"a", "r", "good"}
        problems = gateway.state.status.problems  # in whatever order the server keeps the fields of a hash
        assert len(problems) == 2
        assert all(any(field in problem for problem in problems) for field in ("'cli/broken'", "'cli/moved'"))


@pytest.mark.parametrize("family", ["endpoints", "changes"])
async def test_a_key_of_another_type_is_reported_and_the_fleet_stays(redis_server: ValkeyProcess, family: str) -> None:
    gateway = Gateway(redis_server.url)
    key = f"headrace:{{demo}}:{family}"
    async with running(gateway), redis_server.client() as client:
        await gateway.state.put(document("endpoints", "a", DRAIN))
        await client.set(key, "x")
        await until(lambda: any(key in problem for problem in gateway.state.status.problems))
        assert gateway.drained("a")
        with pytest.raises(StateUnavailable, match="WRONGTYPE"):
            await gateway.state.put(document("pools", "q", {"protocol": "openai", "model": "m"}))
        await client.delete(key)
        await until(lambda: not gateway.state.status.problems)
        await gateway.state.put(document("routes", "good", {"pool": "p"}))
        assert gateway.drained("a")
        assert gateway.ids == {"a", "r", "good"}


async def test_a_gateway_started_on_a_key_of_another_type_serves_its_file(redis_server: ValkeyProcess) -> None:
    async with redis_server.client() as client:
        await client.set("headrace:{demo}:changes", "x")
        gateway = Gateway(redis_server.url)
        async with running(gateway):
            assert gateway.ids == {"a", "r"}
            assert any("cannot be published" in problem for problem in gateway.state.status.problems)
            await client.delete("headrace:{demo}:changes")
            await until(lambda: not gateway.state.status.problems)
            assert await client.hexists("headrace:{demo}:endpoints", "file/a")
