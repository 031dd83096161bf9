"""A connection without a network: whatever a server sends, cut wherever the network likes, means the same, and nothing
it sends comes out of the connection as an exception."""

from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstream.http2 import connection as connections
from gateway.upstream.http2 import frames
from gateway.upstream.http2.connection import CONNECTION_WINDOW, Connection
from gateway.upstream.http2.frames import ErrorCode, frame
from gateway.upstream.http2.frames import settings as settings_frame
from gateway.upstream.http2.grpc_stream import CallEnd, Cause, GrpcStream, framed
from gateway.upstream.http2.headers import BLOCK_BYTES, decode, encode
from gateway.upstream.http2.stream import RECEIVE_WINDOW
from tests.http2 import CUTS, HEAD, OK, Connected, FakeTransport, Heard, data, head, message, pieces, trailers


async def test_a_read_is_handed_on_once_to_each_call_with_all_its_messages() -> None:
    server = Connected()
    _, one = server.call()
    _, two = server.call()
    server.read(head(1), head(3), *(data(stream, message(b"%d" % stream)) for stream in (1, 3, 1)), trailers(3))
    assert one.reads == [[b"1", b"1"]]
    assert two.reads == [[b"3"]]
    assert two.ends == [CallEnd(Cause.STATUS, grpc.StatusCode.OK, "")]
    assert server.connection.streams == 1


@settings(deadline=None)
@given(CUTS)
async def test_an_answer_is_the_same_however_it_was_cut(cuts: list[int]) -> None:
    server = Connected()
    _, heard = server.call()
    words = encode((("grpc-status", "3"), ("grpc-message", "no%20%C3%A4 100%")))
    answer = head(1) + data(1, message(b"a") + message(b"b" * 300)[:100]) + data(1, message(b"b" * 300)[100:])
    for piece in pieces(answer + trailers(1, words), cuts):
        server.read(piece)
    assert heard.messages == [b"a", b"b" * 300]
    assert heard.ends == [CallEnd(Cause.STATUS, grpc.StatusCode.INVALID_ARGUMENT, "no ä 100%")]


NOISE = st.one_of(
    st.binary(max_size=60),
    st.builds(
        frame, st.integers(0, 10), st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 5, 7]), st.binary(max_size=20)
    ),
    st.sampled_from([head(1), head(3), data(1, message(b"x")), data(3, message(b"y")), trailers(1), trailers(3)]),
    st.builds(frames.rst_stream, st.sampled_from([1, 3]), st.sampled_from(ErrorCode)),
    st.builds(frames.window_update, st.sampled_from([0, 1, 3]), st.integers(0, frames.WINDOW_MOST)),
    st.builds(lambda key, value: settings_frame({key: value}), st.integers(0, 7), st.integers(0, 2**32 - 1)),
)


@settings(deadline=None)
@given(st.lists(NOISE, max_size=12), CUTS)
async def test_whatever_a_server_sends_every_call_has_one_end_and_nothing_is_raised(
    noise: list[bytes], cuts: list[int]
) -> None:
    server = Connected()
    calls = [server.call(b"x" * size)[1] for size in (10, 100_000)]
    for piece in pieces(b"".join(noise), cuts):
        server.read(piece)
    server.connection.connection_lost(None)
    assert [len(call.ends) for call in calls] == [1, 1]
    assert server.connection.streams == 0
    assert not server.connection.usable
    assert server.over


async def test_a_body_is_sent_as_far_as_there_is_room_and_holds_no_other_back() -> None:
    server = Connected(initial_window_size=100_000)
    server.call(b"l" * 150_000)
    sent = server.sent(frames.DATA)
    assert sum(len(payload) for *_, payload in sent) == frames.WINDOW  # the connection's
    server.call(b"short")
    server.read(frames.window_update(0, 1 << 20))
    assert [each[2] for each in server.sent(frames.DATA)][:2] == [1, 3], "a frame of each in turn"
    server.read(frames.window_update(1, 40_000))
    assert sum(len(payload) for *_, payload in server.sent(frames.DATA)) == 40_000
    server.read(frames.window_update(1, 40_000))
    (*_, (_, flags, _, payload)) = server.sent(frames.DATA)
    assert (len(payload), flags) == (10_005, frames.END_STREAM)


async def test_room_that_a_server_takes_back_is_not_used() -> None:
    server = Connected(initial_window_size=10)
    server.call(b"x" * 100)
    assert len(server.sent(frames.DATA)[0][3]) == 10
    server.read(settings_frame({frames.INITIAL_WINDOW_SIZE: 0}))
    server.read(frames.window_update(1, 10))
    assert server.sent(frames.DATA) == []
    server.read(frames.window_update(1, 1))
    assert len(server.sent(frames.DATA)[0][3]) == 1


async def test_a_body_waits_while_the_server_does_not_read() -> None:
    server = Connected()
    server.sent()
    server.connection.pause_writing()
    server.call(b"x")
    assert [each[0] for each in server.sent()] == [frames.HEADERS]
    server.connection.resume_writing()
    assert [each[0] for each in server.sent()] == [frames.DATA]


async def test_a_long_head_is_cut_into_frames() -> None:
    server = Connected()
    server.sent()
    server.connection.start(GrpcStream(Heard()), encode((("a", "x" * 40_000),)), framed(b""))
    sent = server.sent()
    assert [each[0] for each in sent] == [frames.HEADERS, frames.CONTINUATION, frames.CONTINUATION, frames.DATA]
    assert [each[1] for each in sent[:3]] == [0, 0, frames.END_HEADERS]
    assert decode(b"".join(each[3] for each in sent[:3])) == {b"a": b"x" * 40_000}


def answered(server: Connected, stream: int, size: int) -> None:
    """Let a server send an unfinished message of that many bytes."""
    start = b"\0" + (1 << 24).to_bytes(4)
    for at in range(0, size, frames.FRAME_BYTES):
        server.read(data(stream, (start if at == 0 else b"").ljust(min(frames.FRAME_BYTES, size - at), b"x")))


async def test_room_is_given_again_when_half_of_it_is_used_but_not_to_a_paused_stream() -> None:
    server = Connected()
    paused, _ = server.call()
    server.call()
    paused.pause()
    server.sent()
    for stream in (1, 3):
        server.read(head(stream))
        answered(server, stream, RECEIVE_WINDOW // 2)
    assert [each[2] for each in server.sent(frames.WINDOW_UPDATE)] == [3]
    paused.resume()
    assert server.sent(frames.WINDOW_UPDATE) == [
        (frames.WINDOW_UPDATE, 0, 1, (RECEIVE_WINDOW // 2).to_bytes(4)),
    ]


async def test_a_paused_call_is_told_nothing_until_it_goes_on_not_even_its_end() -> None:
    server = Connected()
    stream, heard = server.call()
    stream.pause()
    server.read(head(1), data(1, message(b"a")), trailers(1))
    assert (heard.reads, heard.ends) == ([], [])
    assert stream.done()
    stream.resume()
    assert (heard.reads, len(heard.ends)) == ([[b"a"]], 1)


async def test_the_connection_gives_room_for_what_nobody_wants_any_more() -> None:
    server = Connected()
    stream, heard = server.call()
    server.sent()
    assert stream.cancel()
    assert not stream.cancel()
    assert [each[0] for each in server.sent()] == [frames.RST_STREAM]
    for _ in range(CONNECTION_WINDOW // frames.FRAME_BYTES // 2):
        server.read(data(1, b"x" * frames.FRAME_BYTES))
    assert [each[2] for each in server.sent()] == [0]
    assert (heard.reads, heard.ends) == ([], [])
    assert server.connection.streams == 0


async def test_an_early_answer_ends_the_sending() -> None:
    server = Connected()
    server.call(b"x" * 200_000)
    server.sent()
    server.read(
        head(1, encode(((":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "8"))), last=True)
    )
    server.read(frames.window_update(0, 1 << 20))
    assert [each[0] for each in server.sent()] == [frames.RST_STREAM]


async def test_streams_beyond_what_the_server_allows_wait_for_others_to_end() -> None:
    server = Connected(max_concurrent_streams=1)
    _, first = server.call()
    given_up, _ = server.call()
    _, third = server.call()
    assert len(server.sent(frames.HEADERS)) == 1
    given_up.cancel()
    assert server.connection.streams == 2
    server.read(trailers(1, encode(((":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "0")))))
    assert len(first.ends) == 1
    assert [each[2] for each in server.sent(frames.HEADERS)] == [3]
    server.read(frames.frame(frames.GOAWAY, 0, 0, (1).to_bytes(4) + (0).to_bytes(4)))
    assert [end.cause for end in third.ends] == [Cause.REFUSED]


@pytest.mark.parametrize(
    ("fields", "cause", "code"),
    [
        ([(":status", "503")], Cause.STATUS, grpc.StatusCode.UNAVAILABLE),
        ([(":status", "404")], Cause.STATUS, grpc.StatusCode.UNIMPLEMENTED),
        ([(":status", "200"), ("content-type", "text/html")], Cause.MALFORMED, grpc.StatusCode.UNKNOWN),
        ([(":status", "200"), ("content-type", "application/grpc")], Cause.BROKEN, grpc.StatusCode.UNKNOWN),
        ([(":status", "4" * 5000)], Cause.STATUS, grpc.StatusCode.UNKNOWN),
        (
            [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "9" * 5000)],
            Cause.STATUS,
            grpc.StatusCode.UNKNOWN,
        ),
        (
            [(":status", "200"), ("content-type", "application/grpc+proto"), ("grpc-status", "99")],
            Cause.STATUS,
            grpc.StatusCode.UNKNOWN,
        ),
    ],
)
async def test_an_answer_of_fields_alone_is_a_status(
    fields: list[tuple[str, str]], cause: Cause, code: grpc.StatusCode
) -> None:
    server = Connected()
    _, heard = server.call()
    server.read(head(1, encode(((":status", "103"),))), head(1, encode(fields), last=True))
    assert [(end.cause, end.code) for end in heard.ends] == [(cause, code)]


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ([data(1, message(b"x"))], Cause.MALFORMED),
        ([head(1), data(1, b"\1\0\0\0\1x")], Cause.MALFORMED),
        ([head(1), head(1)], Cause.MALFORMED),
        ([head(1), data(1, message(b"x")[:3]), trailers(1)], Cause.BROKEN),
        ([head(1), frame(frames.DATA, frames.END_STREAM, 1, message(b"x"))], Cause.BROKEN),
        ([head(1), frames.rst_stream(1, ErrorCode.INTERNAL_ERROR)], Cause.STATUS),
        ([frames.rst_stream(1, ErrorCode.REFUSED_STREAM)], Cause.REFUSED),
        ([frame(frames.HEADERS, 0, 1, b""), *[frame(frames.CONTINUATION, 0, 1, b"x" * 9000)] * 2,
          frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"")], Cause.MALFORMED),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_one_stream_ends_no_other(answer: list[bytes], cause: Cause) -> None:
    server = Connected()
    _, broken = server.call()
    _, other = server.call()
    server.read(*answer, data(1, message(b"late")))
    assert [end.cause for end in broken.ends] == [cause]
    assert not other.ends
    server.read(head(3), data(3, message(b"y")), trailers(3))
    assert (other.messages, other.ends[0].ok) == ([b"y"], True)
    assert server.connection.usable


def flood(kind: int, payload: bytes) -> list[bytes]:
    return [frame(kind, 0, 0, payload)] * (connections.ANSWERS_UNREAD + 1)


FAULTS: dict[str, tuple[list[bytes], ErrorCode]] = {
    "not http/2": ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], ErrorCode.FRAME_SIZE_ERROR),
    "a stream nobody began": ([data(5, b"")], ErrorCode.PROTOCOL_ERROR),
    "a stream of the server's": ([head(2)], ErrorCode.PROTOCOL_ERROR),
    "data of no stream": ([data(0, b"")], ErrorCode.PROTOCOL_ERROR),
    "a push": ([frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2")], ErrorCode.PROTOCOL_ERROR),
    "a block that is interrupted": ([frame(frames.HEADERS, 0, 1, HEAD), data(1, b"")], ErrorCode.PROTOCOL_ERROR),
    "a block that goes on elsewhere": (
        [frame(frames.HEADERS, 0, 1, HEAD), frame(frames.CONTINUATION, 4, 3, b"")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a block that nobody began": ([frame(frames.CONTINUATION, 4, 1, b"")], ErrorCode.PROTOCOL_ERROR),
    "a block without end": (
        [frame(frames.HEADERS, 0, 1, b""), *[frame(frames.CONTINUATION, 0, 1, b"")] * 40_000],
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a block that is no HPACK": ([head(1, b"\xff\xff\xff\xff\xff\xff")], ErrorCode.COMPRESSION_ERROR),
    "padding longer than its frame": ([frame(frames.DATA, frames.PADDED, 1, b"\5abc")], ErrorCode.PROTOCOL_ERROR),
    "a window by nothing": ([frames.window_update(1, 0)], ErrorCode.PROTOCOL_ERROR),
    "a window without end": ([frames.window_update(0, frames.WINDOW_MOST)], ErrorCode.FLOW_CONTROL_ERROR),
    "settings cut short": ([frame(frames.SETTINGS, 0, 0, b"\0")], ErrorCode.FRAME_SIZE_ERROR),
    "windows too large": ([settings_frame({frames.INITIAL_WINDOW_SIZE: 2**31})], ErrorCode.FLOW_CONTROL_ERROR),
    "frames too small": ([settings_frame({frames.MAX_FRAME_SIZE: 1})], ErrorCode.PROTOCOL_ERROR),
    "pings without end": (flood(frames.PING, b"8 bytes."), ErrorCode.ENHANCE_YOUR_CALM),
    "settings without end": (flood(frames.SETTINGS, b""), ErrorCode.ENHANCE_YOUR_CALM),
    "more than there is room for": (
        [data(1, b"\0\1\0\0\0")] + [data(1, b"x" * frames.FRAME_BYTES)] * (RECEIVE_WINDOW // frames.FRAME_BYTES),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_breaks_the_protocol_is_told_so_and_all_its_calls_end(fault: str) -> None:
    server = Connected()
    stream, one = server.call()
    _, other = server.call()
    stream.pause()  # so that it is given no room
    server.read(head(1))
    server.connection.pause_writing()
    noise, code = FAULTS[fault]
    server.sent()
    server.read(*noise)
    (*_, (kind, _, _, payload)) = server.sent()
    assert kind == frames.GOAWAY
    assert ErrorCode(int.from_bytes(payload[4:8])) is code
    assert server.transport.closed
    stream.resume()
    assert [end.cause for call in (one, other) for end in call.ends] == [Cause.BROKEN] * 2
    assert "broke HTTP/2" in other.ends[0].details
    server.read(data(1, b"more"))
    server.connection.connection_lost(None)


async def test_questions_are_answered_as_long_as_the_answers_are_read() -> None:
    server = Connected()
    server.sent()
    for _ in range(3 * connections.ANSWERS_UNREAD):
        server.read(frame(frames.PING, 0, 0, b"question"))
    sent = server.sent()
    assert sent == [(frames.PING, frames.ACK, 0, b"question")] * (3 * connections.ANSWERS_UNREAD)


async def test_after_a_goaway_what_was_begun_goes_on_and_the_rest_was_never_looked_at() -> None:
    server = Connected()
    _, begun = server.call()
    _, refused = server.call()
    server.read(head(1), frame(frames.GOAWAY, 0, 0, (1).to_bytes(4) + (0).to_bytes(4) + b"max_age"))
    assert [end.cause for end in refused.ends] == [Cause.REFUSED]
    assert "max_age" in refused.ends[0].details
    assert not server.connection.usable
    assert not server.transport.closed
    server.read(data(1, message(b"x")), trailers(1))
    assert begun.ends[0].ok
    assert server.transport.closed


async def test_after_a_goaway_what_waits_to_begin_keeps_no_connection_open() -> None:
    server = Connected(max_concurrent_streams=1)
    _, begun = server.call()
    _, waiting = server.call()
    server.read(head(1), frame(frames.GOAWAY, 0, 0, (1).to_bytes(4) + (0).to_bytes(4)))
    assert [end.cause for end in waiting.ends] == [Cause.REFUSED]
    assert server.connection.streams == 1
    server.read(trailers(1))
    assert begun.ends[0].ok
    assert server.transport.closed


async def test_a_connection_whose_stream_ids_run_out_is_used_up() -> None:
    server = Connected()
    server.connection._next_id = frames.STREAM_ID_MOST
    _, heard = server.call()
    assert not server.connection.usable
    server.read(head(frames.STREAM_ID_MOST), trailers(frames.STREAM_ID_MOST))
    assert heard.ends[0].ok


async def test_a_server_that_does_not_introduce_itself_is_no_connection() -> None:
    over: list[Any] = []
    connection = Connection(over.append)
    connection.connection_made(FakeTransport())  # type: ignore[arg-type]
    connection.data_received(frame(frames.PING, 0, 0, b"question"))
    with pytest.raises(ConnectionError, match="SETTINGS"):
        await connection.ready
    assert over


async def test_the_longest_block_is_read() -> None:
    server = Connected()
    _, heard = server.call()
    room = BLOCK_BYTES - len(OK) - len(encode((("grpc-message", "x" * 16_000),))) + 16_000
    block = OK + encode((("grpc-message", "x" * room),))
    assert len(block) == BLOCK_BYTES
    server.read(head(1), trailers(1, block))
    assert heard.ends[0].details == "x" * room
