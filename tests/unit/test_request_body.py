"""A request's body, however its bytes are cut."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.request_body import BODY_IDLE_S, SLOWEST_BYTES_PER_S, RequestBody
from gateway.http.request_head import parse_head
from router.errors import ApiError

LIMIT = 1_000_000


class Source:
    """A connection that only takes note."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.told.append("resume")


def body_of(source: Source, framing: str) -> RequestBody:
    return RequestBody(source, parse_head(f"POST / HTTP/1.1\r\nHost: x\r\n{framing}".encode()))


def with_length(content: bytes) -> tuple[str, bytes]:
    return f"Content-Length: {len(content)}", content


def in_chunks(content: bytes) -> tuple[str, bytes]:
    pieces = [content[start : start + 7] for start in range(0, len(content), 7)]
    wire = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return "Transfer-Encoding: chunked", wire + b"0\r\ntrailer: x\r\n\r\n"


@given(
    content=st.binary(max_size=60),
    behind=st.binary(max_size=10),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    chunked=st.booleans(),
    collects=st.booleans(),
)
def test_what_was_sent_is_what_is_taken_and_what_is_behind_it_stays(
    content: bytes, behind: bytes, cuts: list[int], chunked: bool, collects: bool
) -> None:
    framing, wire = in_chunks(content) if chunked else with_length(content)

    async def taken() -> tuple[bytes, bytes]:
        body = body_of(Source(), framing)
        body.begin(LIMIT)

        async def take() -> bytes:
            if collects:
                return await body.collect()
            pieces = []
            while piece := await body.read():
                pieces.append(piece)
            return b"".join(pieces)

        taking = asyncio.create_task(take())
        await asyncio.sleep(0)
        rest, sent = b"", wire + behind
        edges = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
        for start, end in itertools.pairwise(edges):
            piece = sent[start:end]
            rest += body.feed(piece) if not body.arrived else piece
            await asyncio.sleep(0)
        return await taking, rest

    assert asyncio.run(taken()) == (content, behind)


async def test_a_connection_is_read_no_further_than_a_slow_taker_allows() -> None:
    source = Source()
    body = body_of(source, "Content-Length: 900000")
    body.begin(LIMIT)
    body.feed(bytes(200_000))
    assert source.told == []
    body.feed(bytes(200_000))
    assert source.told == ["pause"]
    assert len(await body.read()) == 400_000
    assert source.told == ["pause", "resume"]


async def test_whoever_collects_pauses_nothing_and_is_bounded_by_the_limit() -> None:
    source = Source()
    body = body_of(source, "Transfer-Encoding: chunked")
    body.begin(LIMIT)
    body.feed(b"927c0\r\n" + bytes(600_000) + b"\r\n")
    assert source.told == ["pause"]
    collecting = asyncio.create_task(body.collect())
    await asyncio.sleep(0)
    assert source.told == ["pause", "resume"]
    body.feed(b"927c0\r\n" + bytes(600_000) + b"\r\n")
    with pytest.raises(ApiError) as caught:
        await collecting
    assert caught.value.status == 413


def test_an_announced_length_over_the_limit_is_refused_before_it_is_asked_for() -> None:
    source = Source()
    body = body_of(source, "Content-Length: 1000001\r\nExpect: 100-continue")
    with pytest.raises(ApiError) as caught:
        body.begin(LIMIT)
    assert (caught.value.status, source.written) == (413, b"")


def test_a_client_that_waits_is_asked_once_and_one_that_does_not_is_not() -> None:
    source = Source()
    body = body_of(source, "Content-Length: 3\r\nExpect: 100-Continue")
    body.begin(LIMIT)
    assert source.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    eager = body_of(source, "Content-Length: 3\r\nExpect: 100-continue")
    eager.feed(b"a")
    eager.begin(LIMIT)
    assert source.written == b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("collects", [True, False])
async def test_a_client_that_pauses_for_too_long_is_given_up(collects: bool) -> None:
    body = body_of(Source(), "Content-Length: 3")
    body.begin(LIMIT)
    taking = asyncio.create_task(body.collect() if collects else body.read())
    await asyncio.sleep(0)
    body.overdue(body.last_fed + BODY_IDLE_S - 1)
    await asyncio.sleep(0)
    assert not taking.done()
    body.overdue(body.last_fed + BODY_IDLE_S + 1)
    with pytest.raises(ApiError) as caught:
        await taking
    assert caught.value.status == 408
    assert body.feed(b"abc") == b""


@pytest.mark.parametrize("rate", [SLOWEST_BYTES_PER_S, SLOWEST_BYTES_PER_S // 2])
async def test_a_client_that_never_pauses_but_hardly_gets_on_is_given_up(rate: int) -> None:
    body = body_of(Source(), "Content-Length: 900000")
    body.begin(LIMIT)
    taking = asyncio.create_task(body.collect())
    await asyncio.sleep(0)
    began, seconds = body.last_fed, 0.0
    while not taking.done() and seconds < 3 * BODY_IDLE_S:
        seconds += 1
        body.last_fed = began + seconds
        body.feed(bytes(rate))
        body.overdue(began + seconds)
        await asyncio.sleep(0)
    if rate == SLOWEST_BYTES_PER_S:
        assert not taking.done()
        taking.cancel()
        return
    assert seconds > BODY_IDLE_S
    with pytest.raises(ApiError) as caught:
        await taking
    assert caught.value.status == 408


async def test_the_time_in_which_nobody_waits_for_a_client_is_not_its_own() -> None:
    body = body_of(Source(), "Content-Length: 900000")
    body.begin(LIMIT)
    body.feed(b"a")
    await body.read()
    body.overdue(body.last_fed + 10 * BODY_IDLE_S)
    body.feed(b"b")
    assert await body.read() == b"b"


async def test_what_is_dropped_is_read_on_and_thrown_away() -> None:
    source = Source()
    body = body_of(source, "Content-Length: 900000")
    body.begin(LIMIT)
    body.feed(bytes(400_000))
    body.drop()
    assert source.told == ["pause", "resume"]
    assert (body.feed(bytes(500_000) + b"more"), body.arrived, source.told) == (b"", False, ["pause", "resume"])


@pytest.mark.parametrize(
    "wire",
    [b"zz\r\n", b"3\nabc", b"3\r\nabcd\r\n", b"-1\r\n", b"3 3\r\n", b"3;a\x00\r\n", b"0\r\nGET / HTTP/1.1\r\n"],
)
async def test_bad_chunks_are_a_refusal(wire: bytes) -> None:
    body = body_of(Source(), "Transfer-Encoding: chunked")
    body.begin(LIMIT)
    body.feed(wire)
    with pytest.raises(ApiError) as caught:
        await body.collect()
    assert (caught.value.status, body.arrived) == (400, False)
