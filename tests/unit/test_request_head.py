"""How the head of a client's request is read, and what is refused because it could be read in two ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.request_head import MOST_HEADERS, BadHeadError, parse_head

HOST = b"\r\nHost: x"


def refused(head: bytes) -> int:
    with pytest.raises(BadHeadError) as caught:
        parse_head(head)
    return caught.value.status


def test_a_usual_head_is_taken_apart() -> None:
    head = parse_head(b"POST /v1/a%20b?x=%2F HTTP/1.1\r\nHost: x\r\nX-Two:  a \t\r\nx-two:b\r\nContent-Length: 007")
    assert (head.method, head.path, head.raw_path) == ("POST", "/v1/a b", "/v1/a%20b")
    assert head.headers == {"host": "x", "x-two": "a,b", "content-length": "007"}
    assert (head.http11, head.keep_alive, head.chunked, head.content_length) == (True, True, False, 7)


def test_a_proxys_form_of_target_names_the_path() -> None:
    assert parse_head(b"GET http://gw:8000/v1/models?a HTTP/1.1" + HOST).path == "/v1/models"
    assert parse_head(b"GET HTTPS://gw HTTP/1.1" + HOST).path == "/"
    assert parse_head(b"OPTIONS * HTTP/1.1" + HOST).path == "*"


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [
        (b"1.1", None, True),
        (b"1.1", b"close", False),
        (b"1.1", b"Keep-Alive, CLOSE", False),
        (b"1.1", b"closed", True),
        (b"1.0", None, False),
        (b"1.0", b"keep-alive", True),
        (b"1.0", b"keep-alive, close", False),
    ],
)
def test_who_keeps_the_connection(version: bytes, connection: bytes | None, kept: bool) -> None:
    line = b"" if connection is None else b"\r\nConnection: " + connection
    assert parse_head(b"GET / HTTP/" + version + HOST + line).keep_alive is kept


@pytest.mark.parametrize(
    "lines",
    [
        b"\r\nContent-Length: 5\r\nContent-Length: 5",
        b"\r\nContent-Length: 5\r\nContent-Length: 6",
        b"\r\nContent-Length: 5, 5",
        b"\r\nContent-Length: +5",
        b"\r\nContent-Length: 0x5",
        b"\r\nContent-Length: 5 5",
        b"\r\nContent-Length: -1",
        b"\r\nContent-Length:",
        b"\r\nContent-Length: \xb2",
        b"\r\nContent-Length: " + b"9" * 19,
        b"\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        b"\r\nTransfer-Encoding: chunked\r\nContent-Length: 5",
        b"\r\nContent-Length : 5",
        b"\r\n Content-Length: 5",
        b"\r\nX: a\r\n b",
        b"\r\nX: a\r\n\tb",
        b"\r\nX: a\nContent-Length: 5",
        b"\r\nX: a\rContent-Length: 5",
        b"\r\nX: a\x00",
        b"\r\nX: a\x7f",
        b"\r\nX",
        b"\r\n: a",
        b"\r\nX\xe9: a",
        b"\r\nHost: y",
        b"\nX: a",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(lines: bytes) -> None:
    assert refused(b"POST / HTTP/1.1" + HOST + lines) == 400


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b"chunked, chunked", b"identity", b"xchunked", b"chunked;a=b", b""]
)
def test_a_transfer_coding_other_than_chunked_is_not_understood(coding: bytes) -> None:
    assert refused(b"POST / HTTP/1.1" + HOST + b"\r\nTransfer-Encoding: " + coding) == 501


def test_chunked_is_known_however_it_is_written_but_not_in_http_1_0() -> None:
    assert parse_head(b"POST / HTTP/1.1" + HOST + b"\r\nTRANSFER-ENCODING:\tChunked ").chunked
    assert refused(b"POST / HTTP/1.0" + HOST + b"\r\nTransfer-Encoding: chunked") == 400


@pytest.mark.parametrize(
    "line",
    [b"GET /", b"GET / HTTP/1.1 ", b" GET / HTTP/1.1", b"GET  / HTTP/1.1", b"GET / http/1.1", b"G(T / HTTP/1.1",
     b"GET /a b HTTP/1.1", b"GET\t/ HTTP/1.1", b"GET /\xc3\xa9 HTTP/1.1",
     b"GET ?a HTTP/1.1", b"GET a HTTP/1.1", b"CONNECT a:80 HTTP/1.1", b"GET ftp://a/ HTTP/1.1", b"GET /a#b HTTP/1.1",
     b"GET / HTTP/1.11", b"GET / HTTP/11", b"", b"\x16\x03\x01"],
)  # fmt: skip
def test_a_malformed_request_line_is_refused(line: bytes) -> None:
    assert refused(line + HOST) == 400


def test_other_versions_are_named() -> None:
    assert refused(b"PRI * HTTP/2.0") == 505
    assert refused(b"GET / HTTP/0.9" + HOST) == 505


def test_a_request_of_http_1_1_has_a_host() -> None:
    assert refused(b"GET / HTTP/1.1") == 400
    assert parse_head(b"GET / HTTP/1.0").headers == {}


def test_too_many_headers_are_431() -> None:
    assert refused(b"GET / HTTP/1.1" + HOST + b"\r\na: b" * MOST_HEADERS) == 431


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: b"GET / HTTP/1.1\r\nHost: x\r\nA: b" + tail))
def test_whatever_comes_is_a_head_or_refused(data: bytes) -> None:
    try:
        head = parse_head(data)
    except BadHeadError:
        return
    assert all("\r" not in text and "\n" not in text for pair in head.headers.items() for text in pair)
    assert head.raw_path.isascii() and head.raw_path.isprintable()


@given(
    st.lists(st.tuples(st.from_regex(r"\Ax-[a-z0-9]{1,8}\Z"), st.from_regex(r"\A[!-~]([ -~]*[!-~])?\Z")), max_size=20)
)
def test_every_header_that_is_sent_is_read(pairs: list[tuple[str, str]]) -> None:
    lines = "".join(f"\r\n{name}: {value}" for name, value in pairs)
    head = parse_head(f"GET / HTTP/1.1\r\nHost: x{lines}".encode())
    for name in {name for name, _ in pairs}:
        assert head.headers[name] == ",".join(value for key, value in pairs if key == name)
