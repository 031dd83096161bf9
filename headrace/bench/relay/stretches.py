"""The kinds of load: how long prompts and answers are, how fast answers come, and how many at once.

Token counts are turned into bytes at four a token. Prompts repeat a sentence behind a number that each connection has
of its own, as each conversation has its own beginning; a connection asks the same again and again.
"""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from headrace.local.ports import LOOPBACK

PLACE: Final = "########"
"""Where the load puts a connection's number."""
MODEL: Final = "bench"
"""The route or model asked for, on every side; also the engine's name for it."""
_SENTENCE: Final = "A headrace is the channel that feeds water to the turbines. "


@dataclass(frozen=True, slots=True)
class Stretch:
    """One kind of load."""

    name: str
    chunks: int
    """Of one answer."""
    gap_us: int
    """Between two chunks, by the engine's clock."""
    prompt_bytes: int
    connections: int
    chat: bool = True
    """Chat completions; else completions, which need no chat template."""


ONE_CHUNK: Final = Stretch("1chunk", 1, 0, 800, 16)
STREAM: Final = Stretch("64chunk", 64, 5000, 800, 100)
LONG_STREAM: Final = Stretch("512chunk", 512, 5000, 800, 100)
PROMPT_8K: Final = Stretch("8k_prompt", 1, 0, 32_000, 16)
PROMPT_100K: Final = Stretch("100k_prompt", 1, 0, 400_000, 16)
LATENCY: Final = Stretch("latency", 60, 100_000, 800, 1000)
COMPLETION: Final = Stretch("completion", 64, 5000, 800, 100, chat=False)
"""STREAM for engines that take raw text."""
GRPC_TOKENS: Final = Stretch("grpc", 250, 0, 2048, 4, chat=False)
"""For the stand-in of `headrace bench grpc`, which answers as fast as it can."""
HELD_GAP_US: Final = 1_000_000
HELD_PROMPT_BYTES: Final = 4096


def held(connections: int, seconds: float) -> Stretch:
    """Streams with one chunk a second."""
    return Stretch("held", max(1, round(seconds)), HELD_GAP_US, HELD_PROMPT_BYTES, connections)


def make_request(stretch: Stretch, model: str = MODEL, *headers: str, **more: object) -> bytes:
    """The request, head included, with PLACE in its prompt, and with `headers` and `more` parameters."""
    length = max(stretch.prompt_bytes - len(PLACE) - 1, 0)
    prompt = f"{PLACE} {(_SENTENCE * (length // len(_SENTENCE) + 1))[:length]}"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if stretch.chat else {"prompt": prompt}
    asked = {"model": model, **asked, "max_tokens": stretch.chunks, "stream": True, **more}
    if stretch.gap_us:  # not every Triton model has a seed
        asked["seed"] = stretch.gap_us
    body = msgspec.json.encode(asked)
    path = "/v1/chat/completions" if stretch.chat else "/v1/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {LOOPBACK}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    return "".join([head, *(f"{header}\r\n" for header in headers), "\r\n"]).encode() + body
