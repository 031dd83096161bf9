"""Clients that have gone while the request that is to be cancelled for it has not been yet: what their engines send
meanwhile is no error."""

import asyncio

from gateway.http.client_response import ClientResponse
from gateway.http.request_head import RequestHead, parse_head
from gateway.upstream.http_call import HttpCall
from gateway.upstream.http_connection import ConnectionPool
from router.errors import ApiError
from tests.harness import DONE, ONE, TWO, EngineConnection, ScriptedEngine


class GoneClient:
    """The connection of one."""

    transport: asyncio.Transport | None = None
    response: ClientResponse | None = None
    descriptor = -1
    writing_paused = False
    ending = False

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def client_of(self, head: RequestHead) -> str:
        return ""

    def refuse_body(self, error: ApiError) -> None: ...


async def test_a_stream_goes_on_to_its_end_for_a_client_that_has_gone() -> None:
    async def streams(connection: EngineConnection) -> None:
        await connection.events()
        for event in (ONE, TWO, DONE):
            await asyncio.sleep(0.01)
            await connection.chunk(event)
        await connection.end()

    async with ScriptedEngine(streams) as engine:
        request = b"POST / HTTP/1.1\r\nhost: e\r\ncontent-length: 0\r\n\r\n"
        call = HttpCall(ConnectionPool("e", f"http://127.0.0.1:{engine.port}"), (request,), 1.0)
        await call.send()
        response = ClientResponse(GoneClient(), parse_head(b"GET / HTTP/1.1\r\nHost: x"), (), exposes_routing=True)
        response.start(200, (), None)
        async with asyncio.timeout(5):
            await call.relay(response)
        assert response.complete
