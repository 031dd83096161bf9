"""The messages of one answer -> text, finish reason and usage.

An `Answer` is fed every message of one sequence and returns the text that is now certain. It knows when the engine
should be told to stop: the engine was sent the stop strings too and ends by itself, within a message or two, but tokens
need not meet the characters of a stop string, and then it would go on to its limit for nobody. So after a stop string
`STOP_GRACE` more messages with text are let pass (the last ones carry the usage), and then `overrun` turns true.

Finish reason: the LLM-API model says it. The others do not; there it is `stop` if an end token was seen, `length` if as
many tokens came as were allowed, else `stop`. An ensemble that does not count its tokens sends at least one with each
message of text, which is a lower bound and exact for a stream.

Cached tokens: the engine counts whole KV blocks that it reused, the last of which may reach past the prompt; hence the
minimum with the prompt's length. Without the size of a block they are unknown, and left out. Draft tokens, of an engine
that speculates, are told as OpenAI tells predictions: accepted and rejected.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.upstream.triton.contract import (
    ACCEPTED_TOKENS,
    COMPLETION_TOKENS,
    DRAFT_TOKENS,
    FINISH_REASON,
    LOG_PROBS,
    PROMPT_TOKENS,
    REUSED_BLOCKS,
    SEQUENCE,
    TEXT,
    TOKEN_COUNT,
    TOKENS,
    Contract,
)
from gateway.upstream.triton.detokenizer import Detokenizer, TokenLogprob
from gateway.upstream.triton.tensors import unpack_bytes, unpack_integer, unpack_row
from gateway.upstream.triton.text import CumulativeText, StopTrimmer
from gateway.upstream.triton.tokens import TokenCodec

STOP_GRACE = 4


class EngineSaysError(Exception):
    """The engine sent an error instead of an answer; the text is its own."""


class EarlyEndError(Exception):
    """The engine ended the answer for a reason that is no regular end of a text."""


@dataclass(slots=True, frozen=True)
class Usage:
    """Token counts of one answer. What the engine does not tell is None."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    """Of the draft tokens, those that became part of the answer."""


COUNTS = (PROMPT_TOKENS, COMPLETION_TOKENS, REUSED_BLOCKS, DRAFT_TOKENS, ACCEPTED_TOKENS)


@dataclass(slots=True)
class Message:
    """One message of an answer, by the contract's fields."""

    text: bytes = b""
    tokens: Sequence[int] = ()
    token_count: int | None = None
    log_probs: Sequence[float] = ()
    finish_reason: str = ""
    sequence: int | None = None
    """Of which of several answers to one request it is a part."""
    counts: dict[str, int] = field(default_factory=dict)
    """What of `COUNTS` it tells."""
    final: bool = False
    """It is the request's last."""


def read_outputs(described: Iterable[tuple[str | None, str]], contents: Iterable[bytes]) -> Message:
    """What the tensors of a message hold; `described` are the field, if it is one of the contract's, and the type of
    each. Raises ValueError if a tensor is malformed."""
    message = Message()
    for (role, datatype), raw in zip(described, contents, strict=True):
        if role == TEXT:
            message.text = unpack_bytes(raw)
        elif role == TOKENS:
            message.tokens = unpack_row(datatype, raw)
        elif role == TOKEN_COUNT:
            message.token_count = unpack_integer(datatype, raw)
        elif role == LOG_PROBS:
            message.log_probs = unpack_row(datatype, raw)
        elif role in COUNTS:
            if (count := unpack_integer(datatype, raw)) is not None:
                message.counts[role] = count
        elif role == SEQUENCE:
            message.sequence = unpack_integer(datatype, raw)
        elif role == FINISH_REASON and (reason := unpack_bytes(raw)) not in (b"", b"None"):
            message.finish_reason = reason.decode("utf-8", "replace")
    return message


class TextCounter:
    """Counts the tokens of an answer that comes without a count: those that its text has when it is encoded again,
    which is seldom another number than was generated."""

    __slots__ = ("_codec", "_pieces", "prompt_tokens")

    def __init__(self, codec: TokenCodec, prompt_tokens: int) -> None:
        self._codec = codec
        self._pieces: list[str] = []
        self.prompt_tokens = prompt_tokens

    def add(self, text: str) -> None:
        self._pieces.append(text)

    @property
    def count(self) -> int:
        return len(self._codec.encode("".join(self._pieces), add_special=False))


class Answer:
    """What has been received of one answer.

    `tokens` makes text of token ids, for a contract that sends those; `counter` is for one that counts nothing, if the
    answer's usage is wanted.
    """

    __slots__ = (
        "_after_stop", "_completion_tokens", "_counter", "_counts", "_cumulative", "_decoder", "_emitted",
        "_finish_reason", "_kv_block_tokens", "_max_tokens", "_messages", "_tokens", "_trimmer", "overrun",
    )  # fmt: skip

    def __init__(
        self,
        contract: Contract,
        *,
        max_tokens: int,
        stop: tuple[str, ...],
        kv_block_tokens: int | None,
        tokens: Detokenizer | None = None,
        counter: TextCounter | None = None,
    ) -> None:
        self._cumulative = CumulativeText() if contract.cumulative else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._trimmer = StopTrimmer(stop)
        self._tokens = tokens
        self._max_tokens = max_tokens
        self._kv_block_tokens = kv_block_tokens
        self._messages = 0
        self._after_stop = 0
        self.overrun = False
        """The text is complete, but the engine goes on."""
        self._emitted = 0
        self._counter = counter
        counted = tokens or counter
        self._counts: dict[str, int] = {} if counted is None else {PROMPT_TOKENS: counted.prompt_tokens}
        self._completion_tokens: int | None = None
        self._finish_reason: str | None = None

    @property
    def started(self) -> bool:
        """A message with text has come."""
        return self._messages > 0

    def take(self, message: Message) -> str:
        """The text that is certain after this message. Raises TextChangedError."""
        if message.finish_reason:
            self._finish_reason = message.finish_reason
        for name, count in message.counts.items():
            if name == COMPLETION_TOKENS:  # of this message alone
                if count:
                    self._completion_tokens = (self._completion_tokens or 0) + count
            elif count or name != PROMPT_TOKENS:
                self._counts[name] = count
        if self._tokens is not None:
            ids, length = message.tokens, message.token_count
            return self._feed_tokens(self._tokens, ids if length is None else ids[: max(length, 0)], message.log_probs)
        text = message.text
        if not text or self._ended():
            return ""
        if self._cumulative is not None:
            text = self._cumulative.feed(text)
        return self._emit(self._trimmer.feed(self._decoder.decode(text)))

    def end(self) -> str:
        """The text held back, when the answer is complete."""
        rest = self._cumulative.end() if self._cumulative is not None else b""
        return self._emit(self._trimmer.feed(self._decoder.decode(rest, final=True)) + self._trimmer.end())

    def due_logprobs(self) -> list[TokenLogprob] | None:
        """Of the tokens whose text has been returned since the last time; None if they were not asked for."""
        return self._tokens.due(self._emitted) if self._tokens is not None else None

    @property
    def ended(self) -> bool:
        """What has come says by itself that no text follows. An end that it does not say is the stream's."""
        return self._after_end() or self._reached_limit()

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`, of a complete answer. Raises EarlyEndError if the engine names any other reason."""
        if self._after_end():
            return "stop"
        if self._finish_reason is not None:
            if self._finish_reason not in ("stop", "length"):
                raise EarlyEndError(self._finish_reason)
            return self._finish_reason
        return "length" if self._reached_limit() else "stop"

    @property
    def usage(self) -> Usage | None:
        """Token counts; None where the engine does not tell them."""
        prompt_tokens = self._counts.get(PROMPT_TOKENS)
        counted = self._tokens or self._counter
        completion_tokens = counted.count if counted is not None else self._completion_tokens
        if prompt_tokens is None or completion_tokens is None:
            return None
        blocks = self._counts.get(REUSED_BLOCKS)
        cached = None
        if blocks is not None and self._kv_block_tokens is not None:
            cached = min(prompt_tokens, blocks * self._kv_block_tokens)
        drafts, accepted = self._counts.get(DRAFT_TOKENS), self._counts.get(ACCEPTED_TOKENS)
        return Usage(prompt_tokens, completion_tokens, cached, drafts, accepted)

    def _feed_tokens(self, tokens: Detokenizer, ids: Sequence[int], logprobs: Sequence[float]) -> str:
        if not ids or self._ended():
            return ""
        return self._emit(self._trimmer.feed(tokens.feed(ids, logprobs, self._decoder)))

    def _ended(self) -> bool:
        """Count a message that has content; whether it comes after the end of the text."""
        self._messages += 1
        after = self._after_end()
        if after:
            self._after_stop += 1
            self.overrun = self._after_stop > STOP_GRACE
        return after

    def _after_end(self) -> bool:
        """A stop string or an end token has come."""
        return self._trimmer.stopped or (self._tokens is not None and self._tokens.ended)

    def _reached_limit(self) -> bool:
        counted = self._tokens.count if self._tokens is not None else self._completion_tokens
        return (self._messages if counted is None else counted) >= self._max_tokens

    def _emit(self, text: str) -> str:
        self._emitted += len(text)
        if self._counter is not None:
            self._counter.add(text)
        return text
