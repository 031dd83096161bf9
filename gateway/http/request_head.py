"""The head of a client's request (RFC 9112), read strictly.

A request that a proxy in front and this gateway could read in two ways is how requests are smuggled. So nothing is
mended here: a bare line feed, a folded header, a space before a colon, more than one length, a length beside a transfer
coding, a coding other than `chunked` or a missing host end the connection.

One regular expression tells whether the whole head is well-formed, another takes it apart: a few microseconds for the
ten headers of a usual request.
"""

import re
from urllib.parse import unquote

import msgspec

HEAD_LIMIT = 16 * 1024
"""Bytes of a request's line and headers."""
MOST_HEADERS = 128

_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_VALUE = r"[\t -~\x80-\xff]"
_HEAD = re.compile(
    rf"({_TOKEN}{{1,32}}) ([!-\"$-~]+) HTTP/([0-9])\.([0-9])((?:\r\n{_TOKEN}++:{_VALUE}*+)*+)",
)
_HEADER = re.compile(rf"\r\n({_TOKEN}+):[\t ]*({_VALUE}*)")
_LENGTH = re.compile(r"[0-9]{1,18}")
_ORIGIN = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


class BadHeadError(Exception):
    """A head that is refused with `status`; the message is a sentence for the client."""

    def __init__(self, status: int, message: str, code: str = "bad_http_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class RequestHead(msgspec.Struct, gc=False):
    """What a client asks for, and how its body is delimited."""

    method: str
    raw_path: str
    """As it was sent, without the query."""
    path: str
    """`raw_path` with its escapes undone."""
    headers: dict[str, str]
    """By their names in lower case. What was sent more than once is joined by commas."""
    http11: bool
    """Not HTTP/1.0."""
    keep_alive: bool
    chunked: bool
    content_length: int
    """0 for a body that is chunked, and without one."""

    @property
    def expects_continue(self) -> bool:
        """The client waits to be asked for its body."""
        return self.http11 and self.headers.get("expect", "").lower() == "100-continue"


def parse_head(data: bytes) -> RequestHead:
    """The head in `data`, which ends before the blank line. Raises BadHeadError."""
    found = _HEAD.fullmatch(data.decode("latin-1"))
    if found is None:
        raise BadHeadError(400, "The request is not valid HTTP/1.1.")
    method, target, major, minor, lines = found.groups()
    if major != "1":
        raise BadHeadError(505, "The request is of a version of HTTP that is not spoken here: use HTTP/1.1.")
    pairs = _HEADER.findall(lines)
    if len(pairs) > MOST_HEADERS:
        raise BadHeadError(431, f"The request has more than {MOST_HEADERS} headers.", "headers_too_large")
    headers: dict[str, str] = {}
    for name, value in pairs:
        name, value = name.lower(), value.rstrip("\t ")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    http11 = minor != "0"
    if (http11 and "host" not in headers) or (len(headers) < len(pairs) and _count(pairs, "host") > 1):
        raise BadHeadError(400, "A request has exactly one Host header.")
    length = _content_length(headers)
    chunked = _is_chunked(headers, http11)
    raw_path = target.partition("?")[0]
    if raw_path[:1] != "/" and raw_path != "*":
        origin = _ORIGIN.match(raw_path)
        if origin is None:
            raise BadHeadError(400, "The request's target is neither a path nor a URL.")
        raw_path = raw_path[origin.end() :] or "/"
    connection = headers.get("connection")
    if connection is None:
        keep_alive = http11
    else:
        options = {option.strip(" \t") for option in connection.lower().split(",")}
        keep_alive = "close" not in options and (http11 or "keep-alive" in options)
    path = unquote(raw_path) if "%" in raw_path else raw_path
    return RequestHead(method, raw_path, path, headers, http11, keep_alive, chunked, length)


def _count(pairs: list[tuple[str, str]], name: str) -> int:
    return sum(key.lower() == name for key, _ in pairs)


def _content_length(headers: dict[str, str]) -> int:
    text = headers.get("content-length")
    if text is None:
        return 0
    if _LENGTH.fullmatch(text) is None:
        raise BadHeadError(400, "The request's Content-Length is not one number.")
    if "transfer-encoding" in headers:
        raise BadHeadError(400, "The request has both Content-Length and Transfer-Encoding.")
    return int(text)


def _is_chunked(headers: dict[str, str], http11: bool) -> bool:
    coding = headers.get("transfer-encoding")
    if coding is None:
        return False
    if not http11:
        raise BadHeadError(400, "A request of HTTP/1.0 has no Transfer-Encoding.")
    if coding.lower() != "chunked":
        raise BadHeadError(501, "The only Transfer-Encoding understood here is chunked.")
    return True
