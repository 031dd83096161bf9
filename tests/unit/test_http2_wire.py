"""Frames, header fields and gRPC messages: cut wherever the network likes, they mean the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.http2 import frames, grpc_stream
from gateway.upstream.http2.frames import ErrorCode, Frame, FrameReader, Http2Error, frame
from gateway.upstream.http2.grpc_stream import MessageError, MessageReader, framed
from gateway.upstream.http2.headers import HeaderError, decode, encode
from tests.http2 import CUTS, data, pieces

FRAMES = st.tuples(
    st.integers(0, 255), st.integers(0, 255), st.integers(0, frames.STREAM_ID_MOST), st.binary(max_size=50)
)


@given(st.lists(FRAMES, max_size=8), CUTS)
def test_frames_are_the_same_however_they_were_cut(sent: list[Frame], cuts: list[int]) -> None:
    reader = FrameReader()
    whole = b"".join(frame(*each) for each in sent)
    assert [read for piece in pieces(whole, cuts) for read in reader.feed(piece)] == sent


def test_a_frame_that_is_too_large_is_refused_behind_those_before_it() -> None:
    read = []
    with pytest.raises(Http2Error) as caught:
        for each in FrameReader().feed(data(1, b"x" * frames.FRAME_BYTES) + data(1, b"x" * (frames.FRAME_BYTES + 1))):
            read.append(each)  # noqa: PERF402  # what came before the error counts
    assert len(read) == 1
    assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


@given(st.lists(st.binary(max_size=40), max_size=8), CUTS)
def test_messages_are_the_same_however_they_were_cut(sent: list[bytes], cuts: list[int]) -> None:
    reader = MessageReader()
    assert [read for piece in pieces(b"".join(map(framed, sent)), cuts) for read in reader.feed(piece)] == sent
    assert not reader.holding


@pytest.mark.parametrize("start", [b"\1\0\0\0\1x", b"\0" + (grpc_stream.MESSAGE_BYTES + 1).to_bytes(4)])
def test_a_message_that_is_compressed_or_too_long_is_refused(start: bytes) -> None:
    with pytest.raises(MessageError):
        MessageReader().feed(start)


@pytest.mark.parametrize(
    ("block", "fields"),
    [  # RFC 7541, appendices C.2 and C.4.1, the last behind a table that is resized to nothing
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", {b"custom-key": b"custom-header"}),
        ("040c2f73616d706c652f70617468", {b":path": b"/sample/path"}),
        ("100870617373776f726406736563726574", {b"password": b"secret"}),
        ("82", {b":method": b"GET"}),
        (
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            {b":method": b"GET", b":scheme": b"http", b":path": b"/", b":authority": b"www.example.com"},
        ),
        ("2082", {b":method": b"GET"}),
    ],
)
def test_the_blocks_of_the_rfc_are_read(block: str, fields: dict[bytes, bytes]) -> None:
    assert decode(bytes.fromhex(block)) == fields


NO_BLOCKS = {
    "an entry of the table that is kept empty": "be",
    "entry 0": "80",
    "a number without end": "7f8080808080",
    "a name and nothing": "000161",
    "nothing after all": "00",
    "a name that is too short": "0005616263",
    "room in the table": "3fe11f",
    "a table resized too late": "8220",
    "padding of more than an octet": "00821fff00",
    "padding of zeros": "00811800",
    "an end mark": "0084fffffffc00",
}


@pytest.mark.parametrize("block", NO_BLOCKS)
def test_a_block_that_is_none_is_refused(block: str) -> None:
    with pytest.raises(HeaderError):
        decode(bytes.fromhex(NO_BLOCKS[block]))


@given(st.lists(st.tuples(st.text("abc-", min_size=1), st.text(st.characters(codec="ascii", categories=["L", "N"])))))
def test_fields_come_back_as_they_were_encoded(fields: list[tuple[str, str]]) -> None:
    first: dict[bytes, bytes] = {}
    for name, value in fields:
        first.setdefault(name.encode(), value.encode())
    assert decode(encode(fields)) == first


def test_what_metadata_cannot_hold_is_left_out() -> None:
    assert decode(encode((("a", "é"), ("b", "x\r\ny"), ("c", "z" * 1000)))) == {b"c": b"z" * 1000}
