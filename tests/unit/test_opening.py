"""When an answer has begun, however its bytes are cut, and what of its body is there by then."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.events import EVENT_LIMIT, EventTooLongError
from gateway.relay.http1 import FramingError
from gateway.upstream.opening import Opening

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
PROGRESS, TEXT = b"data: progress\n\n", b"data: text\n\n"


def is_progress(event: bytes) -> bool:
    return event == PROGRESS


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


ENDED = CHUNKED + chunk(PROGRESS + TEXT[:-2]) + b"0\r\n\r\n"
"""A stream whose last event lacks its blank line."""


def plain() -> Opening:
    return Opening()


def held() -> Opening:
    return Opening(holds_head=True)


def dropping() -> Opening:
    return Opening(is_progress, holds_head=True)


def begins_at(opening: Opening, answer: bytes) -> int | None:
    """After how many bytes, fed one by one, the answer has begun."""
    for at in range(len(answer)):
        opening.feed(answer[at : at + 1])
        if opening.begun:
            return at + 1
    return None


@pytest.mark.parametrize(
    ("make", "answer", "begun"),
    [
        (plain, CHUNKED, len(CHUNKED)),
        (plain, INTERIM + CHUNKED, len(INTERIM + CHUNKED)),
        (held, CHUNKED + chunk(TEXT), len(CHUNKED) + 1),
        (held, SIZED % 5 + b"hello", len(SIZED % 5)),
        (held, SIZED % 0, len(SIZED % 0)),
        (dropping, CHUNKED + chunk(PROGRESS) + chunk(TEXT), len(CHUNKED + chunk(PROGRESS) + chunk(TEXT)) - 2),
        (dropping, ENDED, len(ENDED)),
        (dropping, SIZED % 5 + b"hello", len(SIZED % 5)),
        (dropping, CHUNKED + chunk(PROGRESS), None),
    ],
)
def test_an_answer_begins_with_its_head_its_body_or_its_first_content(
    make: Callable[[], Opening], answer: bytes, begun: int | None
) -> None:
    assert begins_at(make(), answer) == begun


@given(st.data(), st.lists(st.sampled_from([PROGRESS, TEXT, b"data: \xf0\x9f\x99\x82\r\n\r\n"]), max_size=6))
def test_what_is_kept_of_the_body_is_all_but_the_preamble_however_it_is_cut(
    data: st.DataObject, events: list[bytes]
) -> None:
    body = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=5)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    answer = CHUNKED + b"".join(chunk(piece) for piece in pieces if piece)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    opening = dropping()
    for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True):
        opening.feed(answer[a:b])
    while events and is_progress(events[0]):
        del events[0]
    assert opening.begun == opening.talks == bool(events)
    assert opening.content == b"".join(events)


def test_a_size_is_there_when_so_much_is_read_or_nothing_more_can_be() -> None:
    opening = plain()
    opening.feed(SIZED % 5)
    assert opening.has(0)
    assert not opening.has(3)
    opening.feed(b"hel")
    assert opening.has(3)
    assert not opening.has(10)
    opening.feed(b"lo and more")
    assert opening.has(10)
    assert (opening.content, opening.reader.leftover) == (b"hello", b" and more")
    opening = plain()
    opening.feed(CHUNKED + chunk(TEXT) + b"nonsense\r\n")
    assert opening.has(1000)
    opening.feed(b"what follows nonsense is not looked at")
    assert opening.content == TEXT
    assert isinstance(opening.reader.error, FramingError)


@pytest.mark.parametrize(("first", "untouched"), [(b"", True), (b"H", False), (INTERIM, False)])
def test_nothing_has_come_until_something_has(first: bytes, untouched: bool) -> None:
    opening = plain()
    opening.feed(first)
    assert opening.untouched == untouched
    assert not opening.begun


@pytest.mark.parametrize(
    "answer",
    [
        INTERIM * 17,
        CHUNKED + chunk(PROGRESS) + b"0\r\n\r\n",
        CHUNKED + chunk(PROGRESS) + b"nonsense\r\n",
        b"HTTP/1.1 200 OK\r\nlong: " + b"x" * 70_000,
    ],
)
def test_what_cannot_become_an_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(FramingError):
        dropping().feed(answer)


def test_a_first_event_without_end_is_given_up() -> None:
    opening = dropping()
    opening.feed(CHUNKED)
    with pytest.raises(EventTooLongError):
        for _ in range(EVENT_LIMIT // 60_000 + 2):
            opening.feed(chunk(b"x" * 60_000))
