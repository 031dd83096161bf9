"""What an answer says about itself (token usage, finish reason) and how it came, without decoding it.

A name in double quotes and a colon can only be a key in JSON: inside a string its quotes are escaped. So a read that
does not contain `"usage":` holds no usage, and one search of its bytes is all that nearly every read costs. The rest is
looked for where it always is: the finish reason in the last few reads of a stream, usage near the end of a whole body.

Engines are asked for usage whether or not the client was interested (`stream_options.include_usage`), because limits
and costs are counted in tokens. What comes only for that reason, an event with usage and an empty list of choices, is
taken out again. An event that says more (text, an error) is left as it is.
"""

import contextlib
import re
from bisect import bisect_left
from collections import deque
from typing import Annotated

import msgspec

from gateway.relay.events import END_MARK, event_end, last_boundary
from gateway.series import Histogram

GAP_BOUNDS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
"""Upper ends of the buckets that times between two reads of a stream are counted in, in seconds."""
USAGE_KEY = b'"usage":'
_SAYS_USAGE = re.compile(rb'"usage": ?\{')
_USAGE = re.compile(rb'"usage": ?(\{(?:[^{}]++|\{[^{}]*+\})*+\})')
"""A usage object, whose details may be objects of one level."""
_REASON = re.compile(rb'"finish_reason": ?"([a-z_]{1,32})"')
_SEAM_BYTES = 4096
"""How much of a whole body is kept of one read, for usage that is cut in two."""
_LAST_READS = 3
"""The reads in which a stream's finish reason is looked for: it may be followed by usage and `[DONE]`."""


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Tokens = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens = None
    completion_tokens: _Tokens = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] | None = None
    error: msgspec.Raw | None = None


_event = msgspec.json.Decoder(_Event)
_usage = msgspec.json.Decoder(_Usage)


def says_usage(data: bytes) -> bool:
    """Whether there is usage in `data`; many engines say `"usage":null` in every event before the last."""
    return USAGE_KEY in data and _SAYS_USAGE.search(data) is not None


class Account:
    """What is known of one answer, filled in while it is relayed."""

    __slots__ = (
        "_gaps",
        "_last",
        "_seam",
        "body_bytes",
        "cached_tokens",
        "completion_tokens",
        "finish_reason",
        "gap_counts",
        "gap_total",
        "prompt_tokens",
        "shows_usage",
    )

    def __init__(self, *, shows_usage: bool, gaps: Histogram | None = None) -> None:
        """`shows_usage`: the client wants a stream's usage event. `gaps`: where the times between two reads of a stream
        are counted, in seconds."""
        self.shows_usage = shows_usage
        self._gaps = gaps or Histogram(GAP_BOUNDS)
        self.gap_counts = self._gaps.counts
        """How many times between two reads fell into each bucket of `GAP_BOUNDS`."""
        self.gap_total = 0.0
        """The sum of those, in seconds."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Tokens of the prompt that the engine had in its KV cache."""
        self.completion_tokens = 0
        self.finish_reason = ""
        """That of the choice which ended last; empty if none is known."""
        self.body_bytes = 0
        self._last: deque[bytes] = deque(maxlen=_LAST_READS)
        self._seam = b""

    def relayed(self, events: bytes) -> None:
        """Note whole events that were passed on, framed or not."""
        self.body_bytes += len(events)
        self._last.append(events)

    def streamed(self, gap_total: float, body_bytes: int, reads: tuple[bytes, ...]) -> None:
        """Note reads that were passed on as they came: seconds between them (each of which has been counted), their
        bytes, and the last of them."""
        self.gap_total += gap_total
        self.body_bytes += body_bytes
        self._last += reads

    def gap(self, seconds: float) -> None:
        """Note the time between two reads of a stream."""
        self.gap_counts[bisect_left(GAP_BOUNDS, seconds)] += 1
        self.gap_total += seconds

    def without_usage(self, events: bytes) -> bytes:
        """Note the usage in `events`, which are whole, and return those of them that the client is to get."""
        kept, kept_to, read_to = [], 0, 0
        for found in _SAYS_USAGE.finditer(events):
            if found.start() < read_to:
                continue  # more of an event that has been read
            start = read_to + last_boundary(events[read_to : found.start()])
            read_to = event_end(events, found.start()) or len(events)
            if not self._read_event(events[start:read_to]) and not self.shows_usage:
                kept.append(events[kept_to:start])
                kept_to = read_to
        return b"".join((*kept, events[kept_to:]))

    def read_whole(self, piece: bytes) -> None:
        """Note the usage in a piece of a body that is no stream."""
        self.body_bytes += len(piece)
        text = self._seam + piece
        for found in _USAGE.finditer(text):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                self._count(_usage.decode(found[1]))
        if reasons := _REASON.findall(text):
            self.finish_reason = reasons[-1].decode()
        self._seam = text[-_SEAM_BYTES:]

    def said(self, mark: re.Pattern[bytes]) -> bool:
        """Whether `mark` is in what was passed on last."""
        return any(mark.search(read) is not None for read in self._last)

    @property
    def ended(self) -> bool:
        """The client has all of the answer, but perhaps the end of its framing."""
        return bool(self.finish_reason) or self.said(END_MARK)

    def finish(self) -> None:
        """The answer has ended: look for what its end says."""
        self._gaps.total += self.gap_total
        self.gap_total = 0.0
        for read in reversed(self._last):
            if found := _REASON.findall(read):
                self.finish_reason = found[-1].decode()
                break
        self._last.clear()
        self._seam = b""

    def _read_event(self, event: bytes) -> bool:
        """Note an event's usage; whether there is more to the event than that."""
        start = event.find(b"{")
        try:
            read = _event.decode(event[start : event.rfind(b"}") + 1])
        except (msgspec.DecodeError, RecursionError):
            return True  # whatever it is, it is not ours to judge
        if read.usage is None:
            return True
        self._count(read.usage)
        return read.choices != [] or read.error is not None

    def count(self, prompt: int, completion: int, cached: int) -> None:
        """Take over an engine's usage, in tokens."""
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = prompt, completion, cached

    def _count(self, usage: _Usage) -> None:
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        self.count(usage.prompt_tokens or 0, usage.completion_tokens or 0, cached or 0)
