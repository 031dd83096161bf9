"""The least that has an admin API, on a real server, and how tests and the commands ask it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner, Result

from gateway.admin.app import admin_app
from gateway.admin.view import Lifecycle, Workers, no_requests_left
from gateway.configuration import Origins
from gateway.exchange import LiveExchanges
from gateway.live_requests import RequestFilter, RequestList, cancel_request, list_requests
from gateway.log_levels import LogLevel, LogLevels
from gateway.reload import Reloaded, ReloadError
from headrace.cli.main import app
from router.fleet import Endpoint, FleetView, compile_view
from router.merge import MergedFleet, merge
from router.retry import RetryBudget
from router.spec.documents import Document, file_documents
from router.spec.fleet import FleetSpec
from router.state.fleet import FleetState

FILE = {
    "fleet": "demo",
    "pools": {
        "p": {"protocol": "openai", "model": "m", "endpoints": [{"id": "a", "http": "http://127.0.0.1:1"}]},
        "t": {"protocol": "triton", "model": "ensemble"},
    },
    "routes": {"r": {"pool": "p"}},
}
NEW = {"id": "new", "pool": "p", "http": "http://127.0.0.1:9"}


@dataclass
class Gateway:
    """The least that has an admin API: the documents compiled into a view, and no traffic."""

    redis_url: str | None
    lifecycle: Lifecycle = "serving"
    fleet: FleetView = field(default_factory=FleetView)
    merged: MergedFleet = field(default_factory=lambda: merge([]))
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    url: str = ""
    workers: Workers | None = None
    anonymous: bool = True
    frozen: bool = False
    """Takes nothing over any more, as if compiling a change failed."""

    def __post_init__(self) -> None:
        documents = file_documents(msgspec.convert(FILE, FleetSpec), content_hash="h")
        self.log_levels = LogLevels()
        self.live = LiveExchanges(list, RetryBudget(0, 0))
        self.state = FleetState(self.redis_url, "demo", documents, "h", self._on_documents)

    def degraded(self) -> list[str]:
        return []

    async def list_requests(self, wanted: RequestFilter) -> RequestList:
        return list_requests(self.live, wanted)

    def configuration(self) -> tuple[FleetSpec, Origins]:
        return msgspec.convert(FILE, FleetSpec), Origins(content_hash="h")

    def set_log_level(self, name: str, level: LogLevel | None) -> None:
        self.log_levels.set_or_reset(name, level)

    async def cancel_request(self, id_: str) -> bool:
        return cancel_request(self.live, id_)

    async def reload(self) -> Reloaded:
        raise ReloadError("The file is refused: line 3.")

    def drained(self, endpoint: Endpoint) -> bool:
        return no_requests_left(endpoint)

    def _on_documents(self, documents: list[Document]) -> None:
        if self.frozen:
            return
        self.merged = merge(documents)
        self.fleet = compile_view(self.merged, self.fleet)


@asynccontextmanager
async def serving(redis_url: str | None, token: str | None = None) -> AsyncIterator[Gateway]:
    gateway = Gateway(redis_url)
    runner = web.AppRunner(admin_app(gateway, token))
    try:
        await gateway.state.start()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield gateway
    finally:
        await runner.cleanup()
        await gateway.state.stop()


async def call(gateway: Gateway, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method, gateway.url + path, data=None if body is None else json.dumps(body), headers=headers
        ) as r,
    ):
        return r.status, await r.json()


async def refused(gateway: Gateway, method: str, path: str, body: Any = None) -> tuple[int, str]:
    """Status and message of a refusal in the API's one shape."""
    status, answer = await call(gateway, method, path, body)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]["message"]


async def headrace(gateway: Gateway, *arguments: str, token: str | None = None) -> Result:
    """The command, in a thread: the gateway it talks to lives on this event loop."""
    environment = {"HEADRACE_ADMIN": gateway.url, "HEADRACE_ADMIN_TOKEN": token}
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)
