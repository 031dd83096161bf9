"""Clients on plain sockets: what they were sent is bytes, and how it ended is known."""

import asyncio
import json
import socket
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Api(StrEnum):
    """What may be asked for, by the path that takes it; `{}` is the route."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    INFER = "/v2/models/{}/infer"
    GENERATE = "/v2/models/{}/generate"
    GENERATE_STREAM = "/v2/models/{}/generate_stream"

    @property
    def kserve(self) -> bool:
        return self.startswith("/v2")


STREAMS = (Api.CHAT, Api.COMPLETIONS, Api.GENERATE_STREAM)
PLAIN_ONES = (Api.CHAT, Api.COMPLETIONS, Api.EMBEDDINGS, Api.INFER, Api.GENERATE)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client's."""

    api: Api
    stream: bool
    version: str = "1.1"
    """Of the client's HTTP."""
    elsewhere: bool = False
    """There is a second endpoint, which is well."""
    usage: bool = False
    """The client asks for a stream's usage."""

    def request(self, route: str, request_id: str) -> bytes:
        body: dict[str, Any]
        if self.api in (Api.GENERATE, Api.GENERATE_STREAM):
            body = {"text_input": "hi", "max_tokens": 5}
        elif self.api is Api.INFER:
            body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]}
        else:
            prompts: dict[Api, dict[str, Any]] = {
                Api.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
                Api.COMPLETIONS: {"prompt": "hi"},
                Api.EMBEDDINGS: {"input": "hi"},
            }
            body = {"model": route, **prompts[self.api]}
            if self.stream:
                body["stream"] = True
            if self.usage:
                body["stream_options"] = {"include_usage": True}
        encoded = json.dumps(body).encode()
        lines = [
            f"POST {self.api.format(route)} HTTP/{self.version}",
            "host: x",
            f"x-request-id: {request_id}",
            "content-type: application/json",
            f"content-length: {len(encoded)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + encoded


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a request. Without a single whole head, `status` is 0."""

    status: int
    headers: dict[str, str] = field(repr=False)
    body: bytes
    whole: bool
    """Nothing tells the client that something is missing."""
    rest: bytes = b""
    """What followed the response."""

    @property
    def keeps(self) -> bool:
        return self.whole and self.headers.get("connection") != "close"


class MalformedError(Exception):
    """The response is not HTTP."""


def read_response(received: bytes, ended: str = "") -> Seen | None:
    """The response that `received` begins with, None if it is not complete yet. `ended` says how the connection did:
    "" (not yet), "fin" or "rst"."""
    head, blank, rest = received.partition(b"\r\n\r\n")
    if not blank:
        return Seen(0, {}, received, whole=False) if ended else None
    status_line, *lines = head.decode("latin-1").split("\r\n")
    if not status_line.startswith("HTTP/1.1 "):
        raise MalformedError(f"status line {status_line!r}")
    pairs = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    headers = dict(pairs)
    if len(headers) != len(pairs):
        raise MalformedError(f"a header twice: {pairs}")
    status = int(status_line.split(" ")[1])
    if "transfer-encoding" in headers:
        if "content-length" in headers:
            raise MalformedError("two framings")
        body, behind, whole = _dechunk(rest)
    elif "content-length" in headers:
        length = int(headers["content-length"])
        body, behind, whole = rest[:length], rest[length:], len(rest) >= length
    else:
        body, behind, whole = rest, b"", ended == "fin"
    return Seen(status, headers, body, whole, behind) if whole or ended else None


def _dechunk(data: bytes) -> tuple[bytes, bytes, bool]:
    """Body, what follows it, and whether it is whole."""
    body = b""
    while True:
        line, end, data = data.partition(b"\r\n")
        if not end:
            return body, b"", False
        try:
            size = int(line, 16)
        except ValueError:
            raise MalformedError(f"chunk size {line[:40]!r}") from None
        if not size:
            if data and not data.startswith(b"\r\n"):
                raise MalformedError(f"a trailer {data[:40]!r}")
            return body, data[2:], data.startswith(b"\r\n")
        body += data[:size]
        if len(data) < size + 2:
            return body, b"", False
        if data[size : size + 2] != b"\r\n":
            raise MalformedError(f"behind a chunk: {data[size : size + 40]!r}")
        data = data[size + 2 :]


class Client:
    """One client's connection, made anew when the gateway has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: socket.socket | None = None

    async def ask(self, request: bytes) -> Seen:
        """Send a request and read the response, or up to the end of the connection."""
        loop = asyncio.get_running_loop()
        if self._connection is None:
            self._connection = socket.socket()
            self._connection.setblocking(False)
            await loop.sock_connect(self._connection, ("127.0.0.1", self._port))
        received, ended, seen = b"", "", None
        await loop.sock_sendall(self._connection, request)
        while seen is None:
            try:
                piece = await loop.sock_recv(self._connection, 262_144)
            except ConnectionResetError:
                piece, ended = b"", "rst"
            else:
                ended = "" if piece else "fin"
            received += piece
            seen = read_response(received, ended)
        if not seen.keeps or ended:
            self.close()
        return seen

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
