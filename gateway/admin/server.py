"""The admin API, served."""

import asyncio
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.admin.app import admin_app
from gateway.admin.view import AdminView
from gateway.listening import certificate, listen
from router.spec.gateway import GatewaySpec
from router.spec.units import is_loopback

logger = logging.getLogger(__name__)


@logger.addFilter
def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line is of more than what came: one about what is not HTTP quotes it, and that may be a token."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


class AdminServer:
    """The admin API of `gateway` on a port of its own. Start it once, stop it once."""

    def __init__(self, gateway: AdminView, token: str | None, spec: GatewaySpec) -> None:
        self._address, self._tls = spec.admin, spec.admin_tls
        knows_clients = self._tls is not None and self._tls.client_ca is not None
        exposed = not is_loopback(self._address)
        app = admin_app(gateway, token, client_certificates=knows_clients, exposed=exposed)
        self._runner = web.AppRunner(app, access_log=None, logger=logger)
        self._following: asyncio.Task[None] | None = None
        self._listening: list[asyncio.Server] = []

    async def start(self) -> None:
        """Serve. Raises ListenError if its address is not to be had, or a certificate for it."""
        own = certificate("admin_tls", self._tls)
        context = None
        if own is not None:
            context = own.context
            self._following = asyncio.create_task(own.follow(), name="admin certificate")
        await self._runner.setup()
        assert self._runner.server is not None
        self._listening = await listen(self._runner.server, "admin", self._address, tls=context)

    async def stop(self) -> None:
        for listening in self._listening:
            listening.close()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._runner.cleanup()
