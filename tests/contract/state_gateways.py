"""Gateways as far as the shared state goes, for the tests of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from router.merge import merge
from router.spec.documents import Document, Family, Source, file_documents
from router.spec.fleet import FleetSpec
from router.state.fleet import FleetState

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


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until `condition` holds; raises TimeoutError when it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - a status has no event to wait for
            await asyncio.sleep(0.01)
