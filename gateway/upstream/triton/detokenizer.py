"""The token ids of one answer, message by message -> its text, its length in tokens and their log probabilities.

Work is in proportion to the new ids only (`tokens` says why that can be). The text ends before the first id that is an
end; that id still counts as generated, and what comes after it does not.

A log probability goes out with the text of its token. So each waits, with the place in the text where its token
begins, until the text has been returned to beyond that place; a token whose text was cut off with a stop string is
never told. Some releases send a message's log probabilities only, others repeat all since the beginning: which it is
shows in their number.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.upstream.triton.tokens import TokenCodec


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """A generated token. `start`: where its text begins in the answer's, in characters."""

    text: bytes
    logprob: float
    start: int


class Detokenizer:
    """What has come of one answer's ids. `prompt` is given if the engine repeats it in front of a whole answer."""

    __slots__ = ("_characters", "_codec", "_ends", "_prompt", "_waiting", "count", "ended", "prompt_tokens")

    def __init__(
        self,
        codec: TokenCodec,
        ends: frozenset[int],
        *,
        prompt_tokens: int,
        logprobs: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        self._codec = codec
        self._ends = ends
        self._prompt = tuple(prompt)
        self._waiting: deque[TokenLogprob] | None = deque() if logprobs else None
        self._characters = 0
        self.prompt_tokens = prompt_tokens
        self.count = 0
        """Generated tokens, the one that ended the answer included."""
        self.ended = False
        """An end has come."""

    def feed(self, ids: Sequence[int], logprobs: Sequence[float], decoder: codecs.IncrementalDecoder) -> str:
        """The text of the next ids, through the answer's UTF-8 `decoder`."""
        if self._prompt:
            if tuple(ids[: len(self._prompt)]) == self._prompt:
                ids = ids[len(self._prompt) :]
            self._prompt = ()
        end = next((at for at, id_ in enumerate(ids) if id_ in self._ends), None) if self._ends else None
        before, length = self.count, len(ids)
        self.count += len(ids) if end is None else end + 1
        self.ended = end is not None
        if end is not None:
            ids = ids[:end]
        if self._waiting is None:
            return decoder.decode(self._codec.text_of(ids))
        own = logprobs[before:] if before and len(logprobs) >= before + length else logprobs
        pieces: list[str] = []
        for id_, logprob in zip(ids, own, strict=False):
            text = self._codec.bytes_of(id_)
            self._waiting.append(TokenLogprob(text, logprob, self._characters))
            pieces.append(decoder.decode(text))
            self._characters += len(pieces[-1])
        pieces += [decoder.decode(self._codec.bytes_of(id_)) for id_ in ids[len(pieces) :]]
        return "".join(pieces)

    def due(self, characters: int) -> list[TokenLogprob] | None:
        """The log probabilities not told yet of tokens that begin within the first `characters`; None if not asked."""
        if self._waiting is None:
            return None
        found: list[TokenLogprob] = []
        while self._waiting and self._waiting[0].start < characters:
            found.append(self._waiting.popleft())
        return found
