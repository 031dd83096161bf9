"""How an answer begins: its head, and as much of its body as is read before anybody relays it.

Until an answer has begun, it may still be tried elsewhere. Usually it has with its head. But engines send the head of a
stream before they have begun with the prompt, so `holds_head` waits for the first of the body too. And some can be made
to send events before their first content: `preamble` tells of an event that it is one of those; they are dropped, and
the answer has begun with the first event that is none.

What has been read of the body is kept without its framing, to be looked at (an error may be in it) and then relayed.
"""

from collections.abc import Callable

from gateway.relay.events import EVENT_LIMIT, EventTooLongError, event_end
from gateway.relay.http1 import HEAD_LIMIT, BodyReader, FramingError, ResponseHead, body_reader, parse_head

_INTERIM_LIMIT = 16
"""1xx responses before the real one."""


class Opening:
    """The beginning of one answer."""

    __slots__ = ("_bytes", "_holds_head", "_interim", "_preamble", "begun", "content", "head", "reader", "talks")

    head: ResponseHead
    """Once the answer has begun."""
    reader: BodyReader
    """Takes the framing off the body; once the answer has begun."""

    def __init__(self, preamble: Callable[[bytes], bool] | None = None, *, holds_head: bool = False) -> None:
        self._preamble = preamble
        self._holds_head = holds_head
        self._bytes: bytes | None = b""
        """What has been read of the head; None once it is there."""
        self._interim = 0
        self.begun = False
        """The engine has committed to this answer."""
        self.talks = False
        """Some of the body has come, and not only a preamble."""
        self.content = b""
        """What has been read of the body, without its framing."""

    @property
    def untouched(self) -> bool:
        """Whether not a byte of the answer has come."""
        return self._bytes == b"" and not self._interim

    def has(self, size: int) -> bool:
        """Whether the answer has begun, and so much of its body is there, or as much as there is."""
        if not self.begun:
            return False
        return len(self.content) >= size or self.reader.complete or self.reader.error is not None

    def feed(self, data: bytes) -> None:
        """Take what the engine has sent. Raises FramingError or EventTooLongError."""
        if self._bytes is not None:
            data = self._read_head(self._bytes + data)
        if not data:
            return
        if self.reader.error is None:
            self.content += self.reader.feed(data)
        if self._preamble is not None:
            self._drop_preamble(self._preamble)
        else:
            self.begun = self.talks = True

    def _read_head(self, read: bytes) -> bytes:
        """Take the head, once it is there, and return the body bytes that came with it."""
        while (end := read.find(b"\r\n\r\n")) >= 0:
            head, read = parse_head(read[:end]), read[end + 4 :]
            if head.status >= 200:
                self._bytes = None
                self._begin_body(head)
                return read
            self._interim += 1
            if self._interim > _INTERIM_LIMIT:
                raise FramingError(f"more than {_INTERIM_LIMIT} interim responses")
        if len(read) > HEAD_LIMIT:
            raise FramingError(f"a response head of more than {HEAD_LIMIT} bytes")
        self._bytes = read
        return b""

    def _begin_body(self, head: ResponseHead) -> None:
        self.head = head
        self.reader = body_reader(head)
        streamed = head.events and not self.reader.complete
        if not (streamed and head.chunked):
            self._preamble = None
        self.begun = self._preamble is None and not (self._holds_head and streamed)

    def _drop_preamble(self, preamble: Callable[[bytes], bool]) -> None:
        while (end := event_end(self.content)) and preamble(self.content[:end]):
            self.content = self.content[end:]
        reader = self.reader
        if end or (reader.complete and self.content):
            self._preamble = None
            self.begun = self.talks = True
        elif reader.error is not None or reader.complete:
            raise reader.error or FramingError("a stream without content")
        elif len(self.content) > EVENT_LIMIT:
            raise EventTooLongError
