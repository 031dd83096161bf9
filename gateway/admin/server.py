"""The admin API, served."""

import asyncio

from aiohttp import web

from gateway.admin.app import admin_app
from gateway.admin.view import AdminView
from gateway.listening import certificate, listen
from router.spec.fleet import AdminTlsSpec


class AdminServer:
    """The admin API of `gateway` on a port of its own. Start it once, stop it once."""

    def __init__(self, gateway: AdminView, token: str | None, tls: AdminTlsSpec | None = None) -> None:
        knows_clients = tls is not None and tls.client_ca is not None
        self._runner = web.AppRunner(admin_app(gateway, token, client_certificates=knows_clients), access_log=None)
        self._tls = tls
        self._following: asyncio.Task[None] | None = None
        self._listening: list[asyncio.Server] = []

    async def start(self, address: str) -> None:
        """Serve. Raises ListenError if `address` is not to be had, or a certificate for it."""
        own = certificate("admin_tls", self._tls)
        context = None
        if own is not None:
            context = own.context
            self._following = asyncio.create_task(own.follow(), name="admin certificate")
        await self._runner.setup()
        assert self._runner.server is not None
        self._listening = await listen(self._runner.server, "admin", address, tls=context)

    async def stop(self) -> None:
        for listening in self._listening:
            listening.close()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._runner.cleanup()
