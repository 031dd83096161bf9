"""The first client of the embedded fleet: asks one question through the gateway and measures what came back.

It speaks the OpenAI API over streaming HTTP like any client, and takes a stream for an answer only if it ended as the
protocol says: with a finish reason and `[DONE]`.
"""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import aiohttp
import msgspec

from headrace.local.errors import LocalFleetError

ANSWER_DEADLINE_S: Final = 300.0
SILENCE_DEADLINE_S: Final = 60.0
METRICS_DEADLINE_S: Final = 1.0
LINE_LIMIT_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; tokens are None where the engine did not report them, times are milliseconds."""

    text: str
    model: str
    endpoint: str | None
    ttft_ms: float
    total_ms: float
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    finish_reason: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """One line for people."""
        return (
            f"endpoint {self.endpoint or 'unknown'}, TTFT {self.ttft_ms:.0f} ms, total {self.total_ms:.0f} ms, "
            f"prompt {_count(self.prompt_tokens)} tokens ({_count(self.cached_tokens)} cached), "
            f"completion {_count(self.completion_tokens)} tokens, finish reason {self.finish_reason}"
        )


def chat_body(route: str, question: str, max_tokens: int) -> dict[str, Any]:
    """The request: greedy, streaming, with usage."""
    return {
        "model": route,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(url: str, route: str, question: str, max_tokens: int) -> Answer:
    """Ask the gateway at `url` once.

    Raises:
        LocalFleetError: no complete answer came; says what came instead.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_DEADLINE_S, sock_read=SILENCE_DEADLINE_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=LINE_LIMIT_BYTES) as session:
            started = time.perf_counter()
            body = chat_body(route, question, max_tokens)
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    text = _message(await response.text(errors="replace"))
                    raise LocalFleetError(f"the gateway answered with status {response.status}: {text}")
                reading = _Reading(started)
                async for data in _events(response.content):
                    reading.take(data)
                return reading.answer(response.headers.get("x-headrace-endpoint"))
    except TimeoutError as error:
        raise LocalFleetError("the gateway did not answer in time: see its log for the reason") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise LocalFleetError(f"the answer broke off: {error}") from error


async def live_requests(admin_url: str) -> int:
    """How many requests the gateway is working on, by its metrics; 0 if it does not say."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=METRICS_DEADLINE_S)) as session,
            session.get(f"{admin_url}/metrics") as response,
        ):
            for line in (await response.text()).splitlines():
                if line.startswith("headrace_live_requests "):
                    return int(float(line.partition(" ")[2]))
    return 0


def _message(body: str) -> str:
    """The message of an OpenAI error; the beginning of whatever else the body is."""
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        return str(msgspec.json.decode(body)["error"]["message"])
    return body[:2000]


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The `data:` lines of an event stream; OpenAI's events have one each."""
    async for line in content:
        if line.startswith(b"data:"):
            yield line[5:].strip()


class _Reading:
    """Collects one stream."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._text: list[str] = []
        self._first: float | None = None
        self._model = ""
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._done = False

    def take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = msgspec.json.decode(data)
        if error := event.get("error"):
            raise LocalFleetError(f"the stream ended with an error: {error.get('message', error)}")
        self._model = event.get("model") or self._model
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", []):
            if content := choice.get("delta", {}).get("content"):
                self._first = self._first or time.perf_counter()
                self._text.append(content)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def answer(self, endpoint: str | None) -> Answer:
        ended = time.perf_counter()
        if not self._done or self._finish_reason is None:
            raise LocalFleetError("the stream ended before the answer was complete")
        if self._first is None:
            raise LocalFleetError(f"the answer is empty (finish reason {self._finish_reason})")
        return Answer(
            text="".join(self._text),
            model=self._model,
            endpoint=endpoint,
            ttft_ms=round((self._first - self._started) * 1e3, 1),
            total_ms=round((ended - self._started) * 1e3, 1),
            prompt_tokens=self._usage.get("prompt_tokens"),
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            completion_tokens=self._usage.get("completion_tokens"),
            finish_reason=self._finish_reason,
        )


def _count(tokens: int | None) -> str:
    return "?" if tokens is None else str(tokens)
