"""An engine stays reachable by its name while the resolver is away."""

import asyncio

import pytest

from gateway.upstream import addresses
from gateway.upstream.addresses import HostAddresses

GONE = OSError("the resolver is away")


class Resolver:
    """Gives `answers` one after another, the last one for ever; None hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str] | OSError | None) -> None:
        self.answers = answers
        self.asked = 0
        monkeypatch.setattr(addresses, "resolve", self.resolve)
        monkeypatch.setattr(addresses, "FRESH_S", 0.0)

    async def resolve(self, host: str, port: int) -> list[str]:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        await asyncio.sleep(0.01 if answer is not None else 3600)
        if isinstance(answer, OSError):
            raise answer
        assert answer is not None
        return answer


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_an_address_is_not_looked_up(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    resolver = Resolver(monkeypatch, GONE)
    assert await HostAddresses(address, 80).get() == [address]
    assert resolver.asked == 0


async def test_a_real_name_is_resolved() -> None:
    assert set(await HostAddresses("localhost", 80).get()) <= {"127.0.0.1", "::1"}


async def test_a_name_that_was_never_resolved_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Resolver(monkeypatch, GONE, ["10.0.0.1"])
    host = HostAddresses("engine", 80)
    with pytest.raises(OSError, match="away"):
        await host.get()
    assert await host.get() == ["10.0.0.1"]


async def test_known_addresses_are_used_on_while_the_resolver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    Resolver(monkeypatch, ["10.0.0.1"], GONE, ["10.0.0.2"])
    host = HostAddresses("engine", 80)
    assert [await host.get() for _ in range(3)] == [["10.0.0.1"], ["10.0.0.1"], ["10.0.0.2"]]


async def test_known_addresses_are_used_on_while_the_resolver_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PATIENCE_S", 0.01)
    resolver = Resolver(monkeypatch, ["10.0.0.1"], None)
    host = HostAddresses("engine", 80)
    assert [await host.get() for _ in range(3)] == [["10.0.0.1"]] * 3
    assert resolver.asked == 2, "who comes while a lookup is under way waits for that one"


async def test_one_who_stops_waiting_ends_no_lookup_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch, ["10.0.0.1"])
    host = HostAddresses("engine", 80)
    impatient, patient = asyncio.create_task(host.get()), asyncio.create_task(host.get())
    await asyncio.sleep(0)
    impatient.cancel()
    assert await patient == ["10.0.0.1"]
    assert resolver.asked == 1
