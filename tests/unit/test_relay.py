"""What the relay's framing promises: however reads are cut, the client gets the same bytes, and only whole events."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.events import EVENT_LIMIT, EventHolder, EventTooLongError, whole_chunks
from gateway.relay.http1 import ChunkedReader, FramingError, parse_head

LINE = st.binary(max_size=40).map(lambda data: b"data: " + data.replace(b"\n", b"").replace(b"\r", b""))
EVENT = st.tuples(LINE, st.sampled_from([b"\n\n", b"\r\n\r\n"])).map(b"".join)
EVENTS = st.lists(EVENT, max_size=8).map(b"".join)


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """`data` in pieces."""
    at = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


def chunked(pieces: list[bytes], extension: bytes = b"") -> bytes:
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces if piece)


@given(st.data(), EVENTS, LINE)
def test_an_unfinished_event_is_held_and_everything_before_it_passed_on(
    data: st.DataObject, events: bytes, rest: bytes
) -> None:
    holder = EventHolder()
    out = [holder.feed(piece) for piece in data.draw(cut(events + rest)) if piece]
    assert b"".join(out) == events
    assert all(not piece or piece.endswith((b"\n\n", b"\n\r\n")) for piece in out)
    assert holder.holding == bool(rest)
    assert holder.rest() == rest


def test_an_event_without_end_is_given_up() -> None:
    holder = EventHolder()
    with pytest.raises(EventTooLongError):
        for _ in range(EVENT_LIMIT // 1000 + 2):
            holder.feed(b"x" * 1000)


@given(st.data(), st.binary(max_size=300), st.sampled_from([b"", b";name=value"]), st.sampled_from([b"", b"a: b\r\n"]))
def test_a_chunked_body_reads_the_same_however_it_is_cut(
    data: st.DataObject, body: bytes, extension: bytes, trailer: bytes
) -> None:
    framed = chunked(data.draw(cut(body)), extension) + b"0\r\n" + trailer + b"\r\n" + b"NEXT"
    reader = ChunkedReader()
    read, left = [], b""
    for piece in data.draw(cut(framed)):
        if reader.complete:
            left += piece
        else:
            read.append(reader.feed(piece))
            left += reader.leftover
    assert b"".join(read) == body
    assert reader.complete
    assert left == b"NEXT"


@given(st.data(), st.lists(EVENT, min_size=1, max_size=4).map(b"".join))
def test_a_read_of_chunks_that_each_end_an_event_may_go_on_as_it_is(data: st.DataObject, events: bytes) -> None:
    events = events.replace(b"\r\n\r\n", b"\n\n")
    pieces = [piece for piece in data.draw(cut(events)) if piece]
    framed = chunked(pieces)
    assert whole_chunks(framed) == all(piece.endswith(b"\n\n") for piece in pieces)
    for end in range(1, len(framed)):
        if whole_chunks(framed[:end]):
            reader = ChunkedReader()
            assert reader.feed(framed[:end]).endswith(b"\n\n")
            assert reader.at_boundary


@given(st.binary(max_size=100))
def test_what_is_passed_on_as_it_is_reads_as_chunks(data: bytes) -> None:
    framed = data + b"\n\n\r\n"
    if whole_chunks(framed):
        reader = ChunkedReader()
        assert reader.feed(framed).endswith(b"\n\n")
        assert reader.at_boundary


@pytest.mark.parametrize(
    "framed",
    [
        b"0\r\n\r\n",
        b"3\r\nab\n\n\r\n",
        b"-4\r\nab\n\n\r\n",
        b"0x4\r\nab\n\n\r\n",
        b"1_0\r\nab\n\n\r\n",
        b"4;x=y\r\nab\n\n\r\n",
        b"\n\n\r\n",
    ],
)
def test_the_last_chunk_and_malformed_framing_take_the_long_way(framed: bytes) -> None:
    assert not whole_chunks(framed)


@pytest.mark.parametrize(
    "framed",
    [
        b"3\r\nabcd\r\n",
        b"zz\r\n",
        b"3\nabc\r\n",
        b"-1\r\n",
        b"1" * 5000,
        b"\r\n",
        b"0x3\r\nabc\r\n",
        b"3;a\rb\r\nabc\r\n",
        b"3;\x00\r\nabc\r\n",
        b"0\r\na\r\r\n",
        b"0\r\na: b\r\n c\r\n",
        b"0\r\nGET / HTTP/1.1\r\n",
        b"0\r\n" + b"a: b\r\n" * 5000,
    ],
)
def test_malformed_chunking_is_refused(framed: bytes) -> None:
    reader = ChunkedReader()
    reader.feed(framed)
    assert reader.error is not None


def test_what_came_before_malformed_chunking_is_not_lost() -> None:
    reader = ChunkedReader()
    assert reader.feed(b"3\r\nabc\r\n2\r\nde\r\nnonsense\r\n") == b"abcde"
    assert isinstance(reader.error, FramingError)


def test_a_head_says_how_its_body_ends() -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: text/plain; charset=utf-8")
    assert (head.status, head.content_length, head.chunked, head.keep_alive) == (200, 5, False, True)
    assert head.header("content-type") == "text/plain; charset=utf-8"
    assert parse_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked").chunked
    assert not parse_head(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1").keep_alive
    assert not parse_head(b"HTTP/1.0 200 OK\r\nContent-Length: 1").keep_alive
    assert not parse_head(b"HTTP/1.1 200 OK").keep_alive
    assert parse_head(b"HTTP/1.1 204 No Content").content_length == 0


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/2 200 OK",
        b"ICY 200 OK",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\nfolded: a\r\n b",
        b"HTTP/1.1 200 OK\r\nbare: a\nother: b",
        b"HTTP/1.1 200 OK\r\nspace before : a",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\n\r\nother: b",
        b"HTTP/1.1 200 OK\r\nbare\n: a",
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(FramingError):
        parse_head(head)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_readers_fail_otherwise_than_by_refusing(data: bytes) -> None:
    ChunkedReader().feed(data)
    with contextlib.suppress(FramingError):
        parse_head(data)
