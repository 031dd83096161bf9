"""The shared fleet documents against a real Valkey (and Debian's Redis where it is installed)."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from router.merge import merge
from router.spec.documents import Document, Family, Source, file_documents
from router.spec.fleet import FleetSpec
from router.state.errors import StateUnavailable, WriteConflict
from router.state.fleet import FleetState
from router.state.store import DocumentStore, Mark
from tests.valkey import ValkeyProcess, free_port, servers_here

FILE = {
    "fleet": "demo",
    "pools": {"p": {"protocol": "openai", "model": "m", "endpoints": [{"id": "a", "http": "http://127.0.0.1:1"}]}},
    "routes": {"r": {"pool": "p"}},
}
OTHER_FILE = {
    "fleet": "demo",
    "pools": {"p": {"protocol": "openai", "model": "m", "endpoints": [{"id": "b", "http": "http://127.0.0.1:2"}]}},
    "routes": {"r2": {"pool": "p"}},
}
DRAIN = {"drain": True}


def documents_of(file: object, content_hash: str) -> list[Document]:
    return file_documents(msgspec.convert(file, FleetSpec), content_hash=content_hash)


def document(family: Family, id_: str, spec: object, source: Source = "cli", generation: int = 1) -> Document:
    raw = msgspec.Raw(msgspec.json.encode(spec))
    return Document(family=family, id=id_, source=source, generation=generation, spec=raw)


@dataclass
class Gateway:
    """A gateway's view of the fleet, as far as the shared state goes."""

    url: str | None
    file: object = field(default_factory=lambda: FILE)
    calls: list[list[Document]] = field(default_factory=list)

    def __post_init__(self) -> None:
        content_hash = str(hash(str(self.file)))
        self.state = FleetState(
            self.url, "demo", documents_of(self.file, content_hash), content_hash, self.calls.append
        )

    @property
    def ids(self) -> set[str]:
        fleet = merge(self.calls[-1])
        return {*fleet.endpoints, *fleet.routes}

    def drained(self, id_: str) -> bool:
        endpoint = merge(self.calls[-1]).endpoints.get(id_)
        return endpoint is not None and endpoint.drain


@asynccontextmanager
async def running(*gateways: Gateway) -> AsyncIterator[None]:
    try:
        for gateway in gateways:
            await gateway.state.start()
        yield
    finally:
        for gateway in gateways:
            await gateway.state.stop()


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> float:
    """Seconds until `condition` holds; fails when it does not in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "the condition did not come true in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


@pytest_asyncio.fixture(params=servers_here(), ids=lambda path: Path(path).name)
async def valkey(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ValkeyProcess]:
    server = ValkeyProcess(request.param, tmp_path)
    await server.start()
    try:
        yield server
    finally:
        server.kill()


async def test_a_write_reaches_every_gateway_within_a_second(valkey: ValkeyProcess) -> None:
    one, two = Gateway(valkey.url), Gateway(valkey.url)
    async with running(one, two):
        assert one.ids == two.ids == {"a", "r"}
        await one.state.put(document("endpoints", "a", DRAIN))
        assert one.drained("a"), "who writes reads its own write"
        assert await until(lambda: two.drained("a")) < 1
        await two.state.delete("endpoints", "a", "cli")
        assert await until(lambda: not one.drained("a")) < 1


async def test_gateways_with_the_same_file_do_not_disturb_each_other(valkey: ValkeyProcess) -> None:
    one, two = Gateway(valkey.url), Gateway(valkey.url)
    async with running(one, two):
        await asyncio.sleep(1.2)
        assert len(one.calls) == len(two.calls) == 1
        assert not one.state.status.file_differs
        assert not two.state.status.file_differs


async def test_the_gateway_started_last_publishes_its_file_and_the_other_says_that_it_differs(
    valkey: ValkeyProcess,
) -> None:
    first, last = Gateway(valkey.url), Gateway(valkey.url, OTHER_FILE)
    async with running(first, last):
        await until(lambda: first.ids == {"b", "r2"})
        assert first.state.status.file_differs
        assert not last.state.status.file_differs
        assert last.ids == {"b", "r2"}


async def test_a_source_replaces_only_its_own_documents(valkey: ValkeyProcess) -> None:
    gateway = Gateway(valkey.url)
    store = DocumentStore(valkey.url, "demo")
    found = [document("endpoints", name, {"pool": "p"}, "discovery") for name in ("d1", "d2")]
    async with running(gateway):
        await store.replace_source("discovery", found, Mark(1, ""))
        await until(lambda: gateway.ids == {"a", "r", "d1", "d2"})
        await store.replace_source("discovery", found[:1], Mark(2, ""))
        await until(lambda: gateway.ids == {"a", "r", "d1"})
        assert await store.replace_source("discovery", found, Mark(1, ""), even_later=False) == ""
    await store.close()


async def test_of_two_writers_with_the_same_generation_one_is_told(valkey: ValkeyProcess) -> None:
    store = DocumentStore(valkey.url, "demo")
    await store.put(document("routes", "x", {"pool": "p"}, generation=2))
    await store.put(document("routes", "x", {"pool": "p"}, generation=2))  # the same words twice are no conflict
    with pytest.raises(WriteConflict):
        await store.put(document("routes", "x", {"pool": "q"}, generation=2))
    assert bytes((await store.load()).documents["routes", "cli", "x"].spec) == b'{"pool":"p"}'
    await store.close()


async def test_documents_of_all_sources_survive_the_loss_of_redis_and_of_its_data(
    valkey: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.state")
    one, two = Gateway(valkey.url), Gateway(valkey.url)
    store = DocumentStore(valkey.url, "demo")
    async with running(one, two):
        await one.state.put(document("endpoints", "a", DRAIN))
        await store.replace_source("discovery", [document("endpoints", "d", {"pool": "p"}, "discovery")], Mark(1, ""))
        await until(lambda: two.drained("a") and "d" in two.ids and "d" in one.ids)
        calls = len(one.calls)
        valkey.kill()
        await until(lambda: not one.state.status.connected and not two.state.status.connected)
        lost = one.state.status
        assert lost.lost_since is not None
        assert lost.error is not None
        with pytest.raises(StateUnavailable):
            await one.state.put(document("endpoints", "a", DRAIN, generation=2))
        await asyncio.sleep(1.5)
        assert one.drained("a")
        await valkey.start()
        await until(lambda: one.state.status.connected and two.state.status.connected)
        assert one.state.status.lost_since is None
        await asyncio.sleep(0.7)
        assert len(one.calls) == calls, "nothing changed, so nothing was handed on"
        late = Gateway(valkey.url)
        async with running(late):
            assert late.drained("a")
            assert late.ids == {"a", "r", "d"}
    await store.close()
    losses = [record for record in caplog.records if "stays as last known" in record.message]
    returns = [record for record in caplog.records if record.message.endswith("is back")]
    assert (len(losses), len(returns)) == (2, 2), "one line per gateway and event, not one per try"


async def test_a_flushed_redis_is_filled_again_without_undoing_newer_writes(valkey: ValkeyProcess) -> None:
    gateway = Gateway(valkey.url)
    store = DocumentStore(valkey.url, "demo")
    async with running(gateway):
        for id_ in ("kept", "rewritten", "deleted"):
            await gateway.state.put(document("routes", id_, {"pool": "p"}, generation=5))
        known = await store.load()
        async with valkey.client() as client:
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


async def test_a_flush_is_noticed_without_any_write(valkey: ValkeyProcess) -> None:
    gateway = Gateway(valkey.url)
    store = DocumentStore(valkey.url, "demo")
    async with running(gateway), valkey.client() as client:
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


async def test_a_gateway_that_knows_less_does_not_take_the_overlays_away(valkey: ValkeyProcess) -> None:
    """A fresh gateway fills the emptied Redis with its file first; the old one still brings the drain back."""
    old = Gateway(valkey.url)
    async with running(old):
        await old.state.put(document("endpoints", "a", DRAIN))
        valkey.kill()
        await until(lambda: not old.state.status.connected)
        await valkey.start()
        fresh = Gateway(valkey.url)
        async with running(fresh):
            await until(lambda: fresh.drained("a") and old.state.status.connected)


async def test_a_redis_that_comes_back_with_an_old_dump_is_brought_up_to_date(valkey: ValkeyProcess) -> None:
    gateway = Gateway(valkey.url)
    async with running(gateway):
        await gateway.state.put(document("routes", "x", {"pool": "old"}, generation=1))
        async with valkey.client() as client:
            await client.save()
        await gateway.state.put(document("routes", "x", {"pool": "new"}, generation=2))
        await gateway.state.put(document("endpoints", "a", DRAIN))
        known = gateway.state.documents
        valkey.kill()
        await until(lambda: not gateway.state.status.connected)
        await valkey.start()
        await until(lambda: gateway.state.status.connected)
        assert gateway.state.documents == known
        store = DocumentStore(valkey.url, "demo")
        stored = (await store.load()).documents
        await store.close()
        assert stored["routes", "cli", "x"].generation == 2
        assert ("endpoints", "cli", "a") in stored


async def test_a_follower_stops_in_whatever_moment_it_is_told_to(valkey: ValkeyProcess) -> None:
    """Not every cancellation gets through redis-py, so each moment of a busy follower is tried."""
    writer = Gateway(valkey.url)
    async with running(writer):
        for turns in range(40):
            gateway = Gateway(valkey.url)
            await gateway.state.start()
            write = asyncio.create_task(writer.state.put(document("routes", "x", {}, generation=turns)))
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await gateway.state.stop()
            await write


async def test_a_frozen_redis_is_noticed_and_its_return_too(valkey: ValkeyProcess) -> None:
    gateway = Gateway(valkey.url)
    async with running(gateway):
        valkey.pause()
        await until(lambda: not gateway.state.status.connected, within_s=4)
        assert gateway.ids == {"a", "r"}
        began = time.monotonic()
        cold = Gateway(valkey.url)
        async with running(cold):
            assert time.monotonic() - began < 2
            assert cold.ids == {"a", "r"}
            valkey.resume()
            await until(lambda: gateway.state.status.connected and cold.state.status.connected, within_s=4)


async def test_a_gateway_started_without_redis_serves_its_file_and_publishes_it_later(valkey: ValkeyProcess) -> None:
    valkey.kill()
    gateway = Gateway(valkey.url)
    async with running(gateway):
        assert gateway.ids == {"a", "r"}
        assert not gateway.state.status.connected
        await valkey.start()
        await until(lambda: gateway.state.status.connected)
        store = DocumentStore(valkey.url, "demo")
        snapshot = await store.load()
        await store.close()
        assert {id_ for _, _, id_ in snapshot.documents} == {"p", "a", "r"}


async def test_a_late_publication_does_not_replace_that_of_a_gateway_started_later(valkey: ValkeyProcess) -> None:
    valkey.kill()
    first = Gateway(valkey.url)
    await first.state.start()
    await asyncio.sleep(0.01)
    last = Gateway(valkey.url, OTHER_FILE)
    async with running(last):
        await valkey.start()
        await until(lambda: first.state.status.connected and last.state.status.connected)
        await until(lambda: first.ids == last.ids == {"b", "r2"})
        assert first.state.status.file_differs
    await first.state.stop()


async def test_undecodable_documents_are_skipped_and_reported(valkey: ValkeyProcess) -> None:
    gateway = Gateway(valkey.url)
    async with running(gateway), valkey.client() as client:
        await client.hset("headrace:{demo}:routes", "cli/broken", b"\xff{")
        await client.hset("headrace:{demo}:routes", "cli/moved", msgspec.json.encode(document("routes", "other", {})))
        await gateway.state.put(document("routes", "good", {"pool": "p"}))
        assert gateway.ids == {"a", "r", "good"}
        assert len(gateway.state.status.problems) == 2
        assert "cli/broken" in gateway.state.status.problems[0]


@pytest.mark.parametrize("family", ["endpoints", "changes"])
async def test_a_key_of_another_type_is_reported_and_the_fleet_stays(valkey: ValkeyProcess, family: str) -> None:
    gateway = Gateway(valkey.url)
    key = f"headrace:{{demo}}:{family}"
    async with running(gateway), valkey.client() as client:
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


async def test_a_gateway_started_on_a_key_of_another_type_serves_its_file(valkey: ValkeyProcess) -> None:
    async with valkey.client() as client:
        await client.set("headrace:{demo}:changes", "x")
        gateway = Gateway(valkey.url)
        async with running(gateway):
            assert gateway.ids == {"a", "r"}
            assert any("cannot be published" in problem for problem in gateway.state.status.problems)
            await client.delete("headrace:{demo}:changes")
            await until(lambda: not gateway.state.status.problems)
            assert await client.hexists("headrace:{demo}:endpoints", "file/a")


async def test_a_trimmed_stream_loses_no_change(valkey: ValkeyProcess) -> None:
    gateway = Gateway(valkey.url)
    async with running(gateway), valkey.client() as client:
        await gateway.state.put(document("routes", "one", {"pool": "p"}))
        await client.xtrim("headrace:{demo}:changes", maxlen=0, approximate=False)
        await gateway.state.put(document("routes", "two", {"pool": "p"}))
        assert gateway.ids == {"a", "r", "one", "two"}


async def test_the_stream_of_changes_is_capped(valkey: ValkeyProcess) -> None:
    store = DocumentStore(valkey.url, "demo")
    for generation in range(1500):
        await store.put(document("routes", "x", {"pool": "p"}, generation=generation))
    async with valkey.client() as client:
        assert await client.xlen("headrace:{demo}:changes") < 1200
    await store.close()


async def cluster(client: Redis, *arguments: str | bytes) -> Any:
    return await client.execute_command("CLUSTER", *arguments)  # type: ignore[no-untyped-call]


@pytest.mark.timeout(30)
async def test_all_keys_of_a_write_lie_in_one_cluster_slot(tmp_path: Path) -> None:
    """A cluster refuses a script or transaction whose keys lie in several slots."""
    server = ValkeyProcess(servers_here()[0], tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    await server.start()
    try:
        async with server.client() as client:
            await cluster(client, "ADDSLOTSRANGE", "0", "16383")
            while b"cluster_state:ok" not in await cluster(client, "INFO"):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0.05)
        gateway = Gateway(server.url)
        async with running(gateway):
            await gateway.state.put(document("endpoints", "a", DRAIN))
            assert gateway.drained("a")
            assert gateway.state.status.connected
            async with server.client() as client:
                slots = {await cluster(client, "KEYSLOT", key) for key in await client.keys("*")}
                assert len(slots) == 1
    finally:
        server.kill()


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
