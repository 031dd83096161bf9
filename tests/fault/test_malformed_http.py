"""Malformed HTTP, made up by the thousand: requests that were good, bent in the places that parsers disagree about.

A few seconds of it by default; `MALFORMED_SECONDS=600` for longer, `MALFORMED_SEED` for other ones.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import random
import re
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from gateway.http.connection import ClientConnection, Request
from gateway.http.request_body import RequestBody
from tests.harness import CHAT, STREAM, ScriptedEngine, answering, one_pool, running_gateway

SECONDS = float(os.environ.get("MALFORMED_SECONDS", "4"))
SEED = int(os.environ.get("MALFORMED_SEED", "1"))
AT_ONCE = 16
SILENCE_S = 0.03
"""How long a client waits for more before it leaves."""

# No body holds such a line: JSON has no bare line ends.
STATUS_LINE = re.compile(rb"HTTP/1\.1 ([0-9]{3}) [A-Za-z' -]*\r\n")
NEVER = {status.value for status in HTTPStatus if status >= 500} - {501, 505}

BODY, STREAMED = json.dumps(CHAT).encode(), json.dumps(STREAM).encode()
CHUNKED = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (BODY[:9], BODY[9:])) + b"0\r\n\r\n"
CHAT_LINE = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
GOOD = (
    CHAT_LINE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    CHAT_LINE + b"Content-Length: %d\r\n\r\n" % len(STREAMED) + STREAMED,
    CHAT_LINE + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    CHAT_LINE + b"Transfer-Encoding: chunked\r\nTrailer: x\r\n\r\n" + CHUNKED[:-2] + b"x: y\r\n\r\n",
    CHAT_LINE + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    CHAT_LINE + b"Connection: close\r\nX-Request-Id: a\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n",
    b"GET /v1/models/m HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET http://x/v1/models?a=b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v2/models/m/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
)
SPLICES = (
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b"\n\n",
        b"\0",
        b" ",
        b"\t",
        b":",
        b";",
        b",",
        b"\x7f",
        b"\x80",
        b"\xff",
        b"%00",
    ),
    *(b"Content-Length: 5\r\n", b"Content-Length: +5\r\n", b"Content-Length: 5, 5\r\n", b"Content-Length: \r\n"),
    *(b"Content-Length: 99999999999999999999\r\n", b"Content-Length: 0x5\r\n", b"content-length : 5\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: identity\r\n"),
    *(b"Transfer-Encoding:\x0bchunked\r\n", b"transfer-encoding: chunked, chunked\r\n", b" folded: x\r\n", b"\tx\r\n"),
    *(b"Host: y\r\n", b"Host:\r\n", b"Expect: 200-ok\r\n", b"Connection: close, \r\n", b"Upgrade: h2c\r\n", b": x\r\n"),
    *(
        b"HTTP/1.1",
        b"HTTP/1.0",
        b"HTTP/0.9",
        b"HTTP/2.0",
        b"HTTP/1.1 ",
        b"http/1.1",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ),
    *(b"0\r\n\r\n", b"-1\r\n", b"fffffffffffffffff\r\n", b"5;a=b\r\nhello\r\n", b"5 \r\n", b"0x5\r\n", b"0\r\nx\r\n"),
    *(b"x-headrace-timeouts: total=1\r\n", b"Authorization: Bearer \xff\r\n", b"Content-Encoding: gzip\r\n"),
    *(b"/../" * 20, b"/v1/models/" + b"%2e" * 50, b"a" * 300, b"X: " + b"y" * 20_000 + b"\r\n", b"x: y\r\n" * 200),
    *(b"\x16\x03\x01\x02\x00\x01", b'{"model":', b"[" * 500, b"GET / HTTP/1.1\r\n\r\n", b"PROXY UNKNOWN\r\n"),
)


def made_up(dice: random.Random) -> bytes:
    """One to three requests, most of them bent."""
    return b"".join(bent(dice, dice.choice(GOOD)) for _ in range(dice.choice((1, 1, 2, 3))))


def bent(dice: random.Random, request: bytes) -> bytes:
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3, 6))):
        at = dice.randrange(len(request) + 1)
        match dice.randrange(8):
            case 0 | 1 | 2:
                request = request[:at] + dice.choice(SPLICES) + request[at:]
            case 3:
                lines = request.split(b"\r\n")
                lines.insert(dice.randrange(len(lines)), dice.choice(SPLICES).strip(b"\r\n"))
                request = b"\r\n".join(lines)
            case 4:
                request = request[:at] + request[at + dice.choice((1, 1, 2, 20)) :]
            case 5:
                request = request[:at] + bytes([dice.randrange(256)]) + request[at + 1 :]
            case 6:
                lines = request.split(b"\r\n")
                dice.shuffle(lines)
                request = b"\r\n".join(lines)
            case _:
                request = request.replace(
                    *dice.choice(((b"\r\n", b"\n"), (b" ", b"\t"), (b":", b" :"), (b"1.1", b"1.0")))
                )
    return request


async def said(port: int, data: bytes, dice: random.Random) -> bytes:
    """What the gateway says to `data`, sent in pieces, until it closes or is silent, or the client has enough."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        with contextlib.suppress(ConnectionError):
            size = dice.choice((len(data), len(data), 1 + len(data) // 3, 7)) or 1
            pieces = [data[at : at + size] for at in range(0, min(len(data), 40 * size), size)]
            for piece in (*pieces, data[40 * size :]):
                if not writer.is_closing():
                    writer.write(piece)
                await asyncio.sleep(0)
            if dice.random() < 0.2 and not writer.is_closing():
                writer.write_eof()
            if dice.random() < 0.1:
                return received
            with contextlib.suppress(TimeoutError):
                while piece := await asyncio.wait_for(reader.read(1 << 16), SILENCE_S):
                    received += piece
    finally:
        (writer.transport.abort if dice.random() < 0.3 else writer.close)()
    return received


def alive() -> int:
    """Connections and requests that somebody still knows."""
    gc.collect()
    return sum(isinstance(one, ClientConnection | Request | RequestBody) for one in gc.get_objects())


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def test_whatever_is_sent_is_refused_served_or_cut_and_leaves_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = answering()

    seen: dict[int, int] = {}
    sent = 0

    async def client(dices: Iterator[random.Random], port: int, until: float) -> None:
        nonlocal sent
        while time.monotonic() < until:
            dice = next(dices)
            data = made_up(dice)
            received = await asyncio.wait_for(said(port, data, dice), 20)
            statuses = [int(status) for status in STATUS_LINE.findall(received)]
            assert not received or received.startswith(b"HTTP/1.1 "), (data, received)
            assert not NEVER.intersection(statuses), (data, received)
            for status in statuses:
                seen[status] = seen.get(status, 0) + 1
            sent += 1

    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())):
        pass  # opens what a process opens once
    files, before = open_files(), alive()
    async with ScriptedEngine(answer) as engine, running_gateway(one_pool(engine.endpoint())) as running:
        tasks = len(asyncio.all_tasks())
        clients = running.gateway._clients
        assert clients is not None
        dices = (random.Random(SEED * 1_000_000_007 + number) for number in itertools.count())
        until = time.monotonic() + SECONDS
        await asyncio.wait_for(
            asyncio.gather(*(client(dices, running.http_port, until) for _ in range(AT_ONCE))), SECONDS + 60
        )
        await running.until(lambda: not clients.connections, "no connection is left", 10)
        await running.until(lambda: len(asyncio.all_tasks()) <= tasks + len(engine._tasks), "no task is left", 10)
        # The two loops that look after deadlines keep the last one they looked at, tracebacks now and then one more:
        # never as many as there were clients, of the thousands of requests that they made.
        await running.until(lambda: alive() < before + AT_ONCE, "nothing is kept of connections and requests", 10)
    assert sent > 50
    assert {200, 400, 404} <= seen.keys(), seen
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    await running.until(lambda: open_files() <= files, "every file is closed", 10)
