"""What of a stream goes on without a thought, compiled and in Python: the same to the last byte and count."""

import gc
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.relay.accounting import GAP_BOUNDS, says_usage
from gateway.relay.events import whole_chunks
from gateway.relay.steady import COMPILED, Feed, PureFeed, PureSteadyStream, SteadyStream

BASES = [PureSteadyStream, SteadyStream] if COMPILED else [PureSteadyStream]
FEEDS = [PureFeed, Feed] if COMPILED else [PureFeed]
both = pytest.mark.parametrize("base", BASES)
needs_both = pytest.mark.skipif(not COMPILED, reason="needs a C compiler and Python's headers")

TEXT = b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
PARTS = [
    TEXT,
    b'data: {"choices":[],"usage":null}\n\n',
    b'data: {"choices":[],"usage": null,"x":{"usage":1}}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n',
    b'data: {"choices":[],"usage":null,"x":{"usage": {}}}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"usage\\":{"}}]}\n\n',
    b": ping\n\n",
    b"data: crlf\r\n\r\n",
    b"data: half",
    b'"usage":',
    b" {",
    b"\n",
    b"\n\n",
    b"",
]
SIZE_LINES = [b"%x\r\n", b"%X\r\n", b"000%x\r\n", b"%x;a=b\r\n", b"%x\n", b" %x\r\n", b"0x%x\r\n", b"000000000%x\r\n"]
USUAL = 4
"""How many of `SIZE_LINES` to draw once more for each of the others, so that whole streams come about."""


@dataclass
class Seen:
    """Everything a stream has done."""

    writes: list[bytes] = field(default_factory=list)
    received: list[tuple[bytes, float]] = field(default_factory=list)
    states: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass
class Client:
    """A client's transport; `take` gets what is written to it."""

    take: Callable[[bytes], object]
    closing: bool = False
    waiting: int = 0

    def write(self, data: bytes, /) -> None:
        self.take(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.waiting


@dataclass
class Step:
    """One read, `gap` seconds after the one before: is the stream steady, is the client gone, are the counts taken?"""

    data: bytes
    gap: float
    steady: bool
    gone: bool
    take: bool


def framed(parts: list[bytes], lines: list[bytes]) -> bytes:
    return b"".join(line % len(part) + part + b"\r\n" for part, line in zip(parts, lines, strict=True))


@st.composite
def runs(draw: st.DrawFn) -> bytes:
    """Chunks, more or less."""
    parts = draw(st.lists(st.lists(st.sampled_from(PARTS), max_size=3).map(b"".join), max_size=4))
    usual = st.sampled_from([SIZE_LINES[0]] * USUAL + SIZE_LINES)
    return framed(parts, draw(st.lists(usual, min_size=len(parts), max_size=len(parts))))


@st.composite
def reads(draw: st.DrawFn) -> bytes:
    """Chunks, cut anywhere or nowhere, perhaps with a byte exchanged."""
    data = draw(runs())
    if draw(st.integers(0, 3)):
        return data
    start, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
    changed = draw(st.sampled_from([b"", b"0", b"f", b"\r", b"\n", b"\x00", b"g"]))
    return data[:start] + changed + data[end:]


STEPS = st.builds(
    Step,
    reads(),
    st.sampled_from([0.0, *GAP_BOUNDS, 11.0]) | st.floats(0, 20),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([False, False, False, True]),
    st.booleans(),
)


def run(base: type[PureSteadyStream], steps: list[Step]) -> Seen:
    seen, counts, clock = Seen(), [0] * (len(GAP_BOUNDS) + 1), [1.0]

    class Stream(base):  # type: ignore[misc, valid-type]  # either of two
        def receive(self, data: bytes, now: float) -> None:
            seen.received.append((data, now))
            self.last_read = now

    def write(data: bytes) -> None:
        seen.writes.append(data)
        if gone:
            raise RuntimeError("the client has gone")

    stream = Stream(lambda: clock[0], counts)
    for step in steps:
        clock[0] += step.gap
        gone = step.gone
        stream.transport = Client(write) if step.steady else None
        stream.data_received(step.data)
        seen.states.append((tuple(counts), stream.last_read, stream.transport is None))
        if step.take:
            seen.states.append(stream.taken())
    seen.states.append(stream.taken())
    return seen


@needs_both
@given(st.lists(STEPS, max_size=8))
def test_both_do_the_same_with_every_stream(steps: list[Step]) -> None:
    assert run(SteadyStream, steps) == run(PureSteadyStream, steps)


@both
@given(reads() | st.binary(max_size=60))
@example(framed([TEXT], [b"%x\r\n"]))
@example(framed([TEXT] * 3, [b"%x\r\n"] * 3))
@example(framed([TEXT] * 2, [b"00000000000%x\r\n", b"%X\r\n"]))
@example(framed([PARTS[1]] * 2, [b"%x\r\n"] * 2))
@example(b"")
@example(b"\n\n\r\n")
@example(b"1\r\n\n\n\r\n")
@example(b"2\r\n\n\n\r\n")
@example(b"100000002\r\n\n\n\r\n")
@example(b"FFFFFFFF\r\n\n\n\r\n")
def test_steady_is_a_read_of_whole_events_in_chunks_without_usage(base: type[PureSteadyStream], data: bytes) -> None:
    seen = run(base, [Step(data, 0.1, steady=True, gone=False, take=False)])
    if whole_chunks(data) and not says_usage(data):
        assert (seen.writes, seen.received) == ([data], [])
    else:
        assert (seen.writes, seen.received) == ([], [(data, 1.1)])


@both
def test_what_was_written_is_counted_until_it_is_taken(base: type[PureSteadyStream]) -> None:
    reads = [framed([b"data: %d\n\n" % number], [b"%x\r\n"]) for number in range(3)]
    seen = run(base, [Step(data, 0.03, True, False, take=number == 2) for number, data in enumerate(reads)])
    counts, *_ = seen.states[2]
    assert sum(counts) == 3
    gap_total, size, last = seen.states[3]
    # The first gap is that since the stream was made, whose clock began at 0.
    assert (gap_total, size, last) == (pytest.approx(1.09), sum(map(len, reads)), tuple(reads[1:]))
    assert seen.states[4] == (0.0, 0, ())


@both
def test_a_client_that_has_gone_is_not_written_to_again(base: type[PureSteadyStream]) -> None:
    class Stream(base):  # type: ignore[misc, valid-type]
        received = 0

        def receive(self, data: bytes, now: float) -> None:
            self.received += 1

    def gone(_: bytes) -> None:
        raise RuntimeError

    stream = Stream(lambda: 0.0, [0] * (len(GAP_BOUNDS) + 1))
    stream.transport = Client(gone)
    data = framed([TEXT], [b"%x\r\n"])
    stream.data_received(data)
    assert (stream.transport, stream.received) == (None, 0)
    stream.data_received(data)
    assert stream.received == 1


@both
@pytest.mark.parametrize("fails", ["time", "write", "receive"])
def test_other_errors_are_not_swallowed(base: type[PureSteadyStream], fails: str) -> None:
    class Stream(base):  # type: ignore[misc, valid-type]
        def receive(self, data: bytes, now: float) -> None:
            raise ZeroDivisionError

    def fail(*_: bytes) -> float:
        raise ZeroDivisionError

    stream = Stream(fail if fails == "time" else lambda: 0.0, [0] * (len(GAP_BOUNDS) + 1))
    stream.transport = Client(fail) if fails == "write" else None
    with pytest.raises(ZeroDivisionError):
        stream.data_received(framed([TEXT], [b"%x\r\n"]))


@both
@pytest.mark.parametrize("bound", GAP_BOUNDS)
def test_a_gap_belongs_to_the_bucket_that_ends_with_it(base: type[PureSteadyStream], bound: float) -> None:
    counts = [0] * (len(GAP_BOUNDS) + 1)
    stream = base(lambda: bound, counts)
    stream.transport = Client(print)
    stream.data_received(framed([TEXT], [b"%x\r\n"]))
    assert counts.index(1) == GAP_BOUNDS.index(bound)


@both
def test_a_stream_that_is_let_go_keeps_nothing_alive(base: type[PureSteadyStream]) -> None:
    def time() -> float:
        return 0.0

    counts, written = [0] * (len(GAP_BOUNDS) + 1), object()
    data = framed([TEXT], [b"%x\r\n"])

    def use() -> "list[weakref.ref[object]]":
        class Stream(base):  # type: ignore[misc, valid-type]
            def receive(self, data: bytes, now: float) -> None:
                pass

            def swallow(self, data: bytes) -> object:
                return written

        Stream(time, counts).data_received(b"")  # let go at once
        stream = Stream(time, counts)
        stream.transport = Client(stream.swallow)  # a cycle
        for _ in range(1000):
            stream.data_received(data)
            stream.data_received(data[1:])
        stream.taken()
        stream.data_received(data)
        return [weakref.ref(stream), weakref.ref(Stream)]

    kept = (time, counts, data, written)
    before = [sys.getrefcount(one) for one in kept]
    left = use()
    gc.collect()
    assert [one() for one in left] == [None, None]
    assert [sys.getrefcount(one) for one in kept] == before
    assert counts[0] == 1001


@needs_both
def test_the_compiled_one_refuses_what_would_break_it() -> None:
    with pytest.raises(TypeError):
        SteadyStream(lambda: 0.0, ())  # type: ignore[arg-type]
    stream = SteadyStream(lambda: 0.0, [])
    stream.transport = Client(print)
    with pytest.raises(IndexError):
        stream.data_received(framed([TEXT], [b"%x\r\n"]))
    with pytest.raises(RuntimeError, match="not initialised"):
        SteadyStream.__new__(SteadyStream).data_received(b"")


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's connection, from both sides."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for one in (ours, theirs):
            one.setblocking(False)
        yield ours, theirs


def steady(base: type[PureSteadyStream], client: Client, descriptor: int) -> PureSteadyStream:
    stream = base(lambda: 0.0, [0] * (len(GAP_BOUNDS) + 1))
    stream.transport, stream.descriptor = client, descriptor
    return stream


def arrived(connection: socket.socket) -> bytes:
    """All that can be read now."""
    read = b""
    while True:
        try:
            read += connection.recv(1 << 20)
        except BlockingIOError:
            return read


@both
def test_each_byte_reaches_the_client_once_and_in_order_however_much_it_takes_at_a_time(
    base: type[PureSteadyStream],
) -> None:
    """The client's transport holds back what the kernel does not take, and more behind it, until it is written."""
    with connected() as (ours, theirs):
        late = bytearray()
        client = Client(late.extend)
        stream = steady(base, client, ours.fileno())
        sent = read = b""
        for number in range(200):
            data = framed([b"data: %d %b\n\n" % (number, b"x" * number * 50)], [b"%x\r\n"])
            stream.data_received(data)
            sent += data
            client.waiting = len(late)
            if number % 7 == 0:
                read += arrived(theirs)
            while late and number % 5 == 0:
                read += arrived(theirs)
                del late[: ours.send(late)]
                client.waiting = len(late)
        while late:
            read += arrived(theirs)
            del late[: ours.send(late)]
        assert read + arrived(theirs) == sent


@needs_both
def test_what_the_kernel_takes_does_not_wait_for_the_end_of_the_turn() -> None:
    with connected() as (ours, theirs):
        late: list[bytes] = []
        data = framed([TEXT], [b"%x\r\n"])
        steady(SteadyStream, Client(late.append), ours.fileno()).data_received(data)
        assert (arrived(theirs), late) == (data, [])


@both
@pytest.mark.parametrize("client", [{"closing": True}, {"waiting": 1}])
def test_a_descriptor_that_may_not_be_written_to_is_left_alone(
    base: type[PureSteadyStream], client: dict[str, Any]
) -> None:
    """That of a transport that is closing may already be somebody else's."""
    with connected() as (ours, theirs):
        written: list[bytes] = []
        data = framed([TEXT], [b"%x\r\n"])
        steady(base, Client(written.append, **client), ours.fileno()).data_received(data)
        assert (arrived(theirs), written) == (b"", [data])


@both
def test_the_transport_finds_out_what_is_wrong_with_a_socket(base: type[PureSteadyStream]) -> None:
    with connected() as (ours, theirs):
        theirs.close()
        written: list[bytes] = []
        data = framed([TEXT], [b"%x\r\n"])
        steady(base, Client(written.append), ours.fileno()).data_received(data)
        assert written == [data]


@dataclass(eq=False)
class Reader:
    """Who takes what is read, and may hand over to somebody else."""

    read: list[bytes] = field(default_factory=list)
    then: Callable[[], None] | None = None

    def data_received(self, data: bytes, /) -> None:
        self.read.append(data)
        if self.then is not None:
            self.then()

    def connection_lost(self, error: Exception | None) -> None:
        raise AssertionError


@pytest.mark.parametrize("base", FEEDS)
def test_a_feed_hands_reads_to_whoever_receives_them_now(base: type[PureFeed]) -> None:
    class Fed(base):  # type: ignore[misc, valid-type]  # either of two
        asked = 0

        def unasked(self) -> None:
            self.asked += 1

    def hand_over() -> None:
        feed.receiver = second

    def fail() -> None:
        raise ZeroDivisionError

    feed, second = Fed(), Reader()
    take = feed.data_received  # as an event loop does
    take(b"nobody")
    feed.receiver = Reader(then=hand_over)
    for data in (b"one", b"two", b"three"):
        take(data)
    assert (feed.asked, second.read) == (1, [b"two", b"three"])
    second.then = fail
    with pytest.raises(ZeroDivisionError):
        take(b"four")


@pytest.mark.parametrize("base", FEEDS)
def test_a_feed_that_is_let_go_keeps_nothing_alive(base: type[PureFeed]) -> None:
    def use() -> "weakref.ref[object]":
        class Fed(base):  # type: ignore[misc, valid-type]
            pass

        feed, reader = Fed(), Reader()
        reader.then = feed.unasked  # a cycle
        feed.receiver = reader
        return weakref.ref(reader)

    left = use()
    gc.collect()
    assert left() is None
