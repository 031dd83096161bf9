"""One answer: llama.cpp's callbacks turned into the pieces TensorRT-LLM's `ensemble` would send.

llama.cpp calls back with progress (dropped, but a chance to see a cancel), with text, and at the end with its figures.
Text goes out the moment it comes when the client streams and is collected otherwise. llama.cpp never splits a
character over two pieces, so the bytes of all pieces together are exactly the answer.

`min_tokens` has no counterpart in llama.cpp: the answer is made in two stretches, the first with the end token held
back, the second continuing behind it from the prefix cache.
"""

import time
from collections.abc import Callable
from typing import Any

from headrace.local.ensemble_request import EnsembleRequest
from headrace.local.ensemble_scheduler import Job, Usage


class EngineError(Exception):
    """llama.cpp refused or failed a request."""

    def __init__(self, message: str, *, invalid: bool) -> None:
        super().__init__(message)
        self.invalid = invalid


Complete = Callable[[dict[str, Any], Callable[[Any], bool]], object]
"""`xllamacpp.Server.handle_completions`: body, callback (true ends the generation)."""


def run_job(complete: Complete, job: Job, prefilled: Callable[[], None]) -> tuple[str, int]:
    """Make the answer of `job`; return its outcome and the number of blocks found in the cache."""
    generation = _Generation(job, prefilled)
    try:
        generation.run(complete)
    except EngineError as error:
        job.client.fail(str(error), invalid=error.invalid)
        return "failed", 0
    if generation.cancelled:
        job.client.cancelled()
        return "cancelled", generation.usage().reused_blocks
    usage = generation.usage()
    generation.finish(usage)
    return "finished", usage.reused_blocks


class _Generation:
    """State of one answer; used by one thread."""

    def __init__(self, job: Job, prefilled: Callable[[], None]) -> None:
        self._job = job
        self._request: EnsembleRequest = job.request
        self._prefilled = prefilled
        self._text: list[str] = []
        self._unsent_text: list[str] = []
        self._unsent_log_probs: list[float] = []
        self._sent_tokens = 0
        self._tokens = 0
        self._tokens_before = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._first_stretch = True
        self._ended_early = False
        self._error: EngineError | None = None
        self._scheduled_ns = time.monotonic_ns()
        self._first_token_ns = 0
        self._last_token_ns = 0
        self.cancelled = job.client.is_cancelled()

    def run(self, complete: Complete) -> None:
        request = self._request
        if request.min_tokens and not self.cancelled:
            complete(request.body(prompt=request.prompt, max_tokens=request.min_tokens, hold_end=True), self._on_chunks)
            self._after_stretch()
            self._first_stretch = False
            self._tokens_before = self._tokens
        left = request.max_tokens - self._tokens
        if left and not self.cancelled and not self._ended_early:
            prompt = request.prompt + "".join(self._text)
            complete(request.body(prompt=prompt, max_tokens=left, hold_end=False), self._on_chunks)
            self._after_stretch()

    def _after_stretch(self) -> None:
        if self._error:
            raise self._error

    def _on_chunks(self, chunks: Any) -> bool:
        for chunk in chunks if isinstance(chunks, list) else [chunks]:
            self._on_chunk(chunk)
        self.cancelled = self.cancelled or self._job.client.is_cancelled()
        return self.cancelled

    def _on_chunk(self, chunk: dict[str, Any] | None) -> None:
        if not chunk:
            return
        if error := chunk.get("error"):
            self._error = EngineError(str(error.get("message", error)), invalid=error.get("code") == 400)
            return
        timings = chunk.get("timings", {})
        if progress := chunk.get("prompt_progress"):
            self._on_progress(progress)
            return
        self._on_tokens(self._tokens_before + timings.get("predicted_n", 0))
        choice = chunk["choices"][0]
        log_probs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content", [])]
        self._unsent_log_probs += log_probs
        if text := choice["text"]:
            self._text.append(text)
            self._unsent_text.append(text)
            if self._request.stream:
                self._send()
        if choice["finish_reason"] == "stop" and self._first_stretch:
            self._ended_early = True

    def _on_progress(self, progress: dict[str, int]) -> None:
        if self._first_stretch:
            self._prompt_tokens, self._cached_tokens = progress["total"], progress["cache"]
        self._job.held_tokens = progress["processed"]

    def _on_tokens(self, tokens: int) -> None:
        if tokens > self._tokens:
            self._last_token_ns = time.monotonic_ns()
            self._first_token_ns = self._first_token_ns or self._last_token_ns
            self._tokens = tokens
            self._job.held_tokens = self._prompt_tokens + tokens
            self._prefilled()

    def _take_unsent(self) -> tuple[str, int, list[float]]:
        text, log_probs, tokens = "".join(self._unsent_text), self._unsent_log_probs, self._tokens - self._sent_tokens
        self._unsent_text, self._unsent_log_probs, self._sent_tokens = [], [], self._tokens
        return text, tokens, log_probs

    def _send(self) -> None:
        self._job.client.send(*self._take_unsent())

    def finish(self, usage: Usage) -> None:
        text, tokens, log_probs = self._take_unsent()
        if self._request.repeat_prompt:
            text = self._request.prompt + text
        self._job.client.finish(text, tokens, log_probs, usage)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._tokens,
            arrival_ns=self._job.arrival_ns,
            scheduled_ns=self._scheduled_ns,
            first_token_ns=self._first_token_ns,
            last_token_ns=self._last_token_ns,
        )
