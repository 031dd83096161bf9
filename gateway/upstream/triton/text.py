"""From pieces of text as an engine sends them to the text a client is to see.

Three small machines in a row, each fed with pieces and asked at the end for what it held back:

- `CumulativeText`: some models repeat the whole text with every message; what is new is the rest after what was seen.
- a UTF-8 decoder: an engine that cuts bytes where its tokens end may cut a character; its beginning waits for its end.
- `StopTrimmer`: TensorRT-LLM ends *after* a stop string, which stays in its text, while OpenAI's clients must not see
  it. So whatever may be the beginning of a stop string waits until the next piece decides.

The stop string that counts is the one complete first; of several complete at the same character, the longest. That is
where an engine that looks at every character would have stopped, and it does not depend on how the text was cut.
"""

import re

REPLACEMENT = "�".encode()


class TextChangedError(Exception):
    """A cumulative model took back text that it had sent before."""


class CumulativeText:
    """New bytes of a text that comes whole every time.

    A detokenizer shows a character of which it has not all bytes yet as U+FFFD, and replaces it later: such marks at
    the end of the text wait until something follows them.
    """

    __slots__ = ("_latest", "_seen")

    def __init__(self) -> None:
        self._seen = b""
        self._latest = b""

    def feed(self, text: bytes) -> bytes:
        """The bytes that are new in `text`. Raises TextChangedError if bytes returned before have changed."""
        if not text:
            return b""
        stable = text
        while stable.endswith(REPLACEMENT):
            stable = stable[: -len(REPLACEMENT)]
        seen = self._seen
        if not stable.startswith(seen):
            raise TextChangedError
        self._seen, self._latest = stable, text
        return stable[len(seen) :]

    def end(self) -> bytes:
        """What was held back."""
        return self._latest[len(self._seen) :]


class StopTrimmer:
    """Text up to the first of `stops`; see the module's docstring for which is first.

    `stops` must not hold empty strings. Once `stopped` is true, everything fed is dropped.
    """

    __slots__ = ("_first", "_held", "_longest", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._first = re.compile("|".join(sorted({re.escape(stop[0]) for stop in stops}))) if stops else None
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The text that is now certain to come before any stop string."""
        if self._first is None:
            return piece
        if self.stopped:
            return ""
        text = self._held + piece if self._held else piece
        candidate = self._first.search(text)
        if candidate is None:
            self._held = ""
            return text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop, candidate.start())) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        candidate = self._first.search(text, max(candidate.start(), len(text) - self._longest + 1))
        while candidate is not None:
            start = candidate.start()
            rest = text[start:]
            if any(stop.startswith(rest) for stop in self._stops):
                self._held = rest
                return text[:start]
            candidate = self._first.search(text, start + 1)
        self._held = ""
        return text

    def end(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
