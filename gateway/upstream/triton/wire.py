"""Text -> the JSON and server-sent events of the OpenAI API.

In a stream nearly every event differs from the one before by its text alone. So what is constant is encoded once per
request, and an event is three byte strings put together, with no object built per token. Of several answers to one
request each has a wire of its own, which puts its number into everything; `end` is written by any one of them.
"""

from typing import Any

import msgspec

from gateway.upstream.triton.answer import Usage
from gateway.upstream.triton.detokenizer import TokenLogprob

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"


class Wire:
    """One answer in OpenAI's form: a `choice` of a `whole` body, or events, each complete with its blank line."""

    __slots__ = ("_after", "_before", "_chat", "_head", "_include_usage", "_index")

    def __init__(
        self, *, chat: bool, request_id: str, created: int, model: str, include_usage: bool, index: int = 0
    ) -> None:
        self._chat = chat
        self._index = index
        self._include_usage = include_usage
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + request_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": model,
        }
        event = self._event({"content": _MARK} if chat else _MARK, None)
        self._before, self._after = event.split(_encode(_MARK))

    def choice(self, text: str, finish: str, logprobs: list[TokenLogprob] | None = None) -> dict[str, Any]:
        """The answer as a part of `whole`."""
        content: Any = {"role": "assistant", "content": text, "refusal": None} if self._chat else text
        return {
            "index": self._index,
            "message" if self._chat else "text": content,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": finish,
        }

    def whole(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        """The body of a response that is not streamed."""
        body: dict[str, Any] = {**self._head, "choices": choices}
        if self._chat:
            body["object"] = "chat.completion"
        if usage is not None:
            body["usage"] = _usage_object(usage)
        return _encode(body)

    def opening(self) -> bytes:
        """What comes before any text: in a chat, the event that names the role."""
        return self._event({"role": "assistant", "content": "", "refusal": None}, None) if self._chat else b""

    def text(self, text: str, logprobs: list[TokenLogprob] | None = None) -> bytes:
        """One event with new text."""
        if logprobs is not None:
            return self._event({"content": text} if self._chat else text, None, logprobs)
        return b"".join((self._before, _encode(text), self._after))

    def closing(self, finish: str) -> bytes:
        """The answer's last event, with its finish reason."""
        return self._event({} if self._chat else "", finish)

    def end(self, usage: Usage | None) -> bytes:
        """The end of the response: usage where it was asked for and is known, and the end mark."""
        if self._include_usage and usage is not None:
            return _data({**self._head, "choices": [], "usage": _usage_object(usage)}) + DONE
        return DONE

    def _event(
        self, content: dict[str, Any] | str, finish: str | None, logprobs: list[TokenLogprob] | None = None
    ) -> bytes:
        choice = {
            "index": self._index,
            "delta" if self._chat else "text": content,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": finish,
        }
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return _data(body)

    def _logprobs(self, tokens: list[TokenLogprob] | None) -> dict[str, Any] | None:
        """The log probabilities in the form of the API called; a token that is part of a character shows as U+FFFD."""
        if tokens is None:
            return None
        texts = [token.text.decode("utf-8", "replace") for token in tokens]
        if self._chat:
            content = [
                {"token": text, "logprob": token.logprob, "bytes": list(token.text), "top_logprobs": []}
                for text, token in zip(texts, tokens, strict=True)
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": [token.start for token in tokens],
        }


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def _usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`; cached and draft tokens only where they are known."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.draft_tokens is not None and usage.accepted_tokens is not None:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": max(usage.draft_tokens - usage.accepted_tokens, 0),
        }
    return counts
