"""The shared fleet documents against a real server: writing and following."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from headrace.local.ports import free_ports
from router.state.errors import StateUnavailable, WriteConflict
from router.state.store import DocumentStore, Mark
from tests.contract.state_gateways import DRAIN, FILE, OTHER_FILE, Gateway, document, documents_of, running, until
from tests.valkey import ValkeyProcess, servers_here


async def test_a_write_reaches_every_gateway_within_a_second(redis_server: ValkeyProcess) -> None:
    one, two = Gateway(redis_server.url), Gateway(redis_server.url)
    async with running(one, two):
        assert one.ids == two.ids == {"a", "r"}
        await one.state.put(document("endpoints", "a", DRAIN))
        assert one.drained("a"), "who writes reads its own write"
        await until(lambda: two.drained("a"), within_s=1)
        await two.state.delete("endpoints", "a", "cli")
        await until(lambda: not one.drained("a"), within_s=1)


async def test_gateways_with_the_same_file_do_not_disturb_each_other(redis_server: ValkeyProcess) -> None:
    one, two = Gateway(redis_server.url), Gateway(redis_server.url)
    async with running(one, two):
        await asyncio.sleep(1.2)
        assert len(one.calls) == len(two.calls) == 1
        assert not one.state.status.file_differs
        assert not two.state.status.file_differs


async def test_the_gateway_started_last_publishes_its_file_and_the_other_says_that_it_differs(
    redis_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "router.state.follower")
    first, last = Gateway(redis_server.url), Gateway(redis_server.url, OTHER_FILE)
    async with running(first, last):
        await until(lambda: first.ids == {"b", "r2"})
        assert first.state.status.file_differs
        assert not last.state.status.file_differs
        assert last.ids == {"b", "r2"}
        await last.state.put(document("endpoints", "a", DRAIN))  # a change that alters nothing of that is no news
        await first.state.publish(documents_of(FILE, "again"), "again")
        await until(lambda: not first.state.status.file_differs)
        await until(lambda: last.state.status.file_differs)
    began = "another gateway has published a different fleet file: that one is served, not this gateway's"
    ended = "the published fleet file is this gateway's again"
    said = [record.getMessage() for record in caplog.records if record.name == "router.state.follower"]
    assert said == [began, ended, began]  # of the first, and of the last


async def test_a_file_that_is_read_again_is_published_whoever_started_last(redis_server: ValkeyProcess) -> None:
    first, last = Gateway(redis_server.url), Gateway(redis_server.url)
    async with running(first, last):
        await last.state.put(document("endpoints", "a", DRAIN))
        await first.state.publish(documents_of(OTHER_FILE, "other"), "other")
        assert first.ids == {"b", "r2"}, "in force when it is said to be"
        await until(lambda: last.ids == {"b", "r2"}, within_s=1)
        assert last.state.status.file_differs
        assert not first.state.status.file_differs
        await last.state.publish(documents_of(FILE, "same"), "same")
        await until(lambda: first.ids == last.ids == {"a", "r"}, within_s=1)
        assert first.drained("a"), "what others have said of it still counts"


async def test_a_file_that_is_read_again_while_redis_is_away_is_published_when_it_is_back(tmp_path: Path) -> None:
    async with ValkeyProcess(servers_here()[0], tmp_path) as valkey:
        gateway = Gateway(valkey.url)
        async with running(gateway):
            valkey.kill()
            await until(lambda: not gateway.state.status.connected)
            await gateway.state.publish(documents_of(OTHER_FILE, "other"), "other")
            await valkey.start()
            await until(lambda: gateway.ids == {"b", "r2"}, within_s=5)


async def test_without_a_redis_section_a_file_that_is_read_again_is_the_fleet() -> None:
    gateway = Gateway(None)
    async with running(gateway):
        await gateway.state.publish(documents_of(OTHER_FILE, "other"), "other")
        assert gateway.ids == {"b", "r2"}
        assert gateway.state.documents == documents_of(OTHER_FILE, "other")


async def test_a_source_replaces_only_its_own_documents(redis_server: ValkeyProcess) -> None:
    gateway = Gateway(redis_server.url)
    store = DocumentStore(redis_server.url, "demo")
    found = [document("endpoints", name, {"pool": "p"}, "discovery") for name in ("d1", "d2")]
    async with running(gateway):
        await store.replace_source("discovery", found, Mark(1, ""))
        await until(lambda: gateway.ids == {"a", "r", "d1", "d2"})
        await store.replace_source("discovery", found[:1], Mark(2, ""))
        await until(lambda: gateway.ids == {"a", "r", "d1"})
        assert await store.replace_source("discovery", found, Mark(1, ""), even_later=False) == ""
    await store.close()


async def test_of_two_writers_with_the_same_generation_one_is_told(redis_server: ValkeyProcess) -> None:
    store = DocumentStore(redis_server.url, "demo")
    await store.put(document("routes", "x", {"pool": "p"}, generation=2))
    await store.put(document("routes", "x", {"pool": "p"}, generation=2))  # the same words twice are no conflict
    with pytest.raises(WriteConflict):
        await store.put(document("routes", "x", {"pool": "q"}, generation=2))
    assert bytes((await store.load()).documents["routes", "cli", "x"].spec) == b'{"pool":"p"}'
    await store.close()


async def test_a_follower_stops_in_whatever_moment_it_is_told_to(redis_server: ValkeyProcess) -> None:
    """Not every cancellation gets through redis-py, so each moment of a busy follower is tried."""
    writer = Gateway(redis_server.url)
    async with running(writer):
        for turns in range(40):
            gateway = Gateway(redis_server.url)
            await gateway.state.start()
            write = asyncio.create_task(writer.state.put(document("routes", "x", {}, generation=turns)))
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await gateway.state.stop()
            await write


async def test_a_trimmed_stream_loses_no_change(redis_server: ValkeyProcess) -> None:
    gateway = Gateway(redis_server.url)
    async with running(gateway), redis_server.client() as client:
        await gateway.state.put(document("routes", "one", {"pool": "p"}))
        await client.xtrim("headrace:{demo}:changes", maxlen=0, approximate=False)
        await gateway.state.put(document("routes", "two", {"pool": "p"}))
        assert gateway.ids == {"a", "r", "one", "two"}


async def test_the_stream_of_changes_is_capped(redis_server: ValkeyProcess) -> None:
    store = DocumentStore(redis_server.url, "demo")
    for generation in range(1500):
        await store.put(document("routes", "x", {"pool": "p"}, generation=generation))
    async with redis_server.client() as client:
        assert await client.xlen("headrace:{demo}:changes") < 1200
    await store.close()


async def cluster(client: Redis, *arguments: str | bytes) -> Any:
    return await client.execute_command("CLUSTER", *arguments)  # type: ignore[no-untyped-call]


@pytest.mark.timeout(30)
async def test_all_keys_of_a_write_lie_in_one_cluster_slot(tmp_path: Path) -> None:
    """A cluster refuses a script or transaction whose keys lie in several slots."""
    (bus,) = free_ports(1)
    cluster_options = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
    async with ValkeyProcess(servers_here()[0], tmp_path, *cluster_options) as server, server.client() as client:
        await cluster(client, "ADDSLOTSRANGE", "0", "16383")
        while b"cluster_state:ok" not in await cluster(client, "INFO"):  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.05)
        gateway = Gateway(server.url)
        async with running(gateway):
            await gateway.state.put(document("endpoints", "a", DRAIN))
            assert gateway.drained("a")
            assert gateway.state.status.connected
            slots = {await cluster(client, "KEYSLOT", key) for key in await client.keys("*")}
            assert len(slots) == 1


async def test_without_a_redis_section_the_file_is_the_fleet_and_a_write_names_the_key() -> None:
    gateway = Gateway(None)
    async with running(gateway):
        assert gateway.ids == {"a", "r"}
        assert not gateway.state.status.configured
        with pytest.raises(StateUnavailable, match="Add `redis:"):
            await gateway.state.put(document("endpoints", "a", DRAIN))


async def test_a_password_in_the_url_is_never_shown() -> None:
    store = DocumentStore("redis://user:secret@127.0.0.1:1/0", "demo")
    with pytest.raises(StateUnavailable) as refused:
        await store.put(document("endpoints", "a", DRAIN))
    assert "secret" not in str(refused.value)
    assert "127.0.0.1:1" in str(refused.value)
    await store.close()
