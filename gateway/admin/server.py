"""The admin API, served."""

import asyncio

from aiohttp import web

from gateway.admin.app import admin_app
from gateway.admin.view import AdminView
from gateway.listening import listen


class AdminServer:
    """The admin API of `gateway` on a port of its own. Start it once, stop it once."""

    def __init__(self, gateway: AdminView, token: str | None) -> None:
        self._runner = web.AppRunner(admin_app(gateway, token), access_log=None)
        self._listening: list[asyncio.Server] = []

    async def start(self, address: str) -> None:
        """Serve. Raises ListenError if `address` is not to be had."""
        await self._runner.setup()
        assert self._runner.server is not None
        self._listening = await listen(self._runner.server, "admin", address)

    async def stop(self) -> None:
        for listening in self._listening:
            listening.close()
        await self._runner.cleanup()
