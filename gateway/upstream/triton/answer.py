"""The messages of one answer -> text, finish reason and usage.

An `Answer` is fed every ModelInferResponse of a stream and returns the text that is now certain. It knows when the
engine should be told to stop: the engine was sent the stop strings too and ends by itself, within a message or two,
but tokens need not meet the characters of a stop string, and then it would go on to its limit for nobody. So after a
stop string `STOP_GRACE` more messages with text are let pass (the last ones carry the usage), and then `overrun`
turns true.

Finish reason: the LLM-API model says it. An ensemble does not; there it is `length` if as many tokens came as were
allowed, else `stop`. An ensemble that does not count its tokens sends at least one with each message of text, which is
a lower bound and exact for a stream.

Cached tokens: the engine counts whole KV blocks that it reused, the last of which may reach past the prompt; hence the
minimum with the prompt's length. Without the size of a block they are unknown, and left out.
"""

import codecs
from dataclasses import dataclass
from typing import Any

from gateway.upstream.triton.contract import (
    COMPLETION_TOKENS,
    FINISH_REASON,
    PROMPT_TOKENS,
    REUSED_BLOCKS,
    TEXT,
    Contract,
)
from gateway.upstream.triton.tensors import unpack_bytes, unpack_integer
from gateway.upstream.triton.text import CumulativeText, StopTrimmer

STOP_GRACE = 4


class EarlyEndError(Exception):
    """The engine ended the answer for a reason that is no regular end of a text."""


@dataclass(slots=True, frozen=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class Answer:
    """What has been received of one answer."""

    __slots__ = (
        "_after_stop", "_completion_tokens", "_cumulative", "_decoder", "_finish_reason", "_kv_block_tokens",
        "_max_tokens", "_messages", "_prompt_tokens", "_reused_blocks", "_roles", "_trimmer",
    )  # fmt: skip

    def __init__(
        self, contract: Contract, *, max_tokens: int, stop: tuple[str, ...], kv_block_tokens: int | None
    ) -> None:
        self._roles = {name: field for field, name in contract.outputs.items()}
        self._cumulative = CumulativeText() if contract.cumulative else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._trimmer = StopTrimmer(stop)
        self._max_tokens = max_tokens
        self._kv_block_tokens = kv_block_tokens
        self._messages = 0
        self._after_stop = 0
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._reused_blocks: int | None = None
        self._finish_reason: str | None = None

    @property
    def started(self) -> bool:
        """A message with text has come."""
        return self._messages > 0

    @property
    def overrun(self) -> bool:
        """The text is complete, but the engine goes on."""
        return self._after_stop > STOP_GRACE

    def feed(self, response: Any) -> str:
        """The text that is certain after this message. Raises TextChangedError, or ValueError for malformed tensors."""
        text = b""
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            role = self._roles.get(output.name)
            if role == TEXT:
                text = unpack_bytes(raw)
            elif role == COMPLETION_TOKENS:
                if count := unpack_integer(output.datatype, raw):
                    self._completion_tokens = (self._completion_tokens or 0) + count
            elif role == PROMPT_TOKENS:
                if count := unpack_integer(output.datatype, raw):
                    self._prompt_tokens = count
            elif role == REUSED_BLOCKS:
                if (count := unpack_integer(output.datatype, raw)) is not None:
                    self._reused_blocks = count
            elif role == FINISH_REASON and (reason := unpack_bytes(raw)) not in (b"", b"None"):
                self._finish_reason = reason.decode("utf-8", "replace")
        if not text:
            return ""
        self._messages += 1
        if self._trimmer.stopped:
            self._after_stop += 1
            return ""
        if self._cumulative is not None:
            text = self._cumulative.feed(text)
        return self._trimmer.feed(self._decoder.decode(text))

    def end(self) -> str:
        """The text held back, when the answer is complete."""
        rest = self._cumulative.end() if self._cumulative is not None else b""
        return self._trimmer.feed(self._decoder.decode(rest, final=True)) + self._trimmer.end()

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`, of a complete answer. Raises EarlyEndError if the engine names any other reason."""
        if self._trimmer.stopped:
            return "stop"
        if self._finish_reason is not None:
            if self._finish_reason not in ("stop", "length"):
                raise EarlyEndError(self._finish_reason)
            return self._finish_reason
        tokens = self._messages if self._completion_tokens is None else self._completion_tokens
        return "length" if tokens >= self._max_tokens else "stop"

    @property
    def usage(self) -> Usage | None:
        """Token counts; None where the engine does not tell them."""
        if self._prompt_tokens is None or self._completion_tokens is None:
            return None
        cached = None
        if self._reused_blocks is not None and self._kv_block_tokens is not None:
            cached = min(self._prompt_tokens, self._reused_blocks * self._kv_block_tokens)
        return Usage(self._prompt_tokens, self._completion_tokens, cached)
