"""What an answer's bytes say about it is found however they are cut, and only what nobody asked for is taken out."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.accounting import Account, says_usage

USAGE = {"prompt_tokens": 20, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 16}}
TRICKY = 'he said "usage": {"prompt_tokens": 9} and "finish_reason":"length"\n\n'


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps({"id": "c", **fields}).encode() + b"\n\n"


def text(content: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": content}, "finish_reason": reason}])


TEXT, LAST, DONE = text("one"), text("", "stop"), b"data: [DONE]\n\n"
USAGE_EVENT = event(choices=[], usage=USAGE)


def through(account: Account, *reads: bytes) -> bytes:
    """What the client gets of whole events."""
    out = b""
    for read in reads:
        kept = account.without_usage(read) if says_usage(read) else read
        account.relayed(kept)
        out += kept
    account.finish()
    return out


@pytest.mark.parametrize(
    "reads",
    [
        (TEXT, LAST, USAGE_EVENT, DONE),
        (TEXT, LAST + USAGE_EVENT, DONE),
        (TEXT + LAST + USAGE_EVENT + DONE,),
        (TEXT, LAST, USAGE_EVENT + DONE),
    ],
)
def test_usage_that_only_the_gateway_asked_for_is_counted_and_taken_out(reads: tuple[bytes, ...]) -> None:
    account = Account(shows_usage=False)
    assert through(account, *reads) == TEXT + LAST + DONE
    assert (account.prompt_tokens, account.completion_tokens, account.cached_tokens) == (20, 7, 16)
    assert account.finish_reason == "stop"


def test_usage_that_the_client_asked_for_stays() -> None:
    account = Account(shows_usage=True)
    assert through(account, TEXT + LAST, USAGE_EVENT + DONE) == TEXT + LAST + USAGE_EVENT + DONE
    assert account.completion_tokens == 7


def test_an_event_with_text_and_usage_stays_whole() -> None:
    both = event(choices=[{"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}], usage=USAGE)
    account = Account(shows_usage=False)
    assert through(account, TEXT, both, DONE) == TEXT + both + DONE
    assert (account.prompt_tokens, account.finish_reason) == (20, "length")


def test_text_that_looks_like_usage_is_text() -> None:
    account = Account(shows_usage=False)
    assert through(account, text(TRICKY), LAST, DONE) == text(TRICKY) + LAST + DONE
    assert (account.prompt_tokens, account.finish_reason) == (0, "stop")


@pytest.mark.parametrize("usage", [b"null", b" null", b"{}", b'{"prompt_tokens":-1}', b'{"prompt_tokens":"x"}', b"{"])
def test_usage_that_says_nothing_counts_nothing(usage: bytes) -> None:
    odd = b'data: {"choices":[{"delta":{}}],"usage":' + usage + b"}\n\n"
    account = Account(shows_usage=False)
    assert through(account, odd, DONE) == odd + DONE
    assert account.prompt_tokens == account.completion_tokens == 0


def test_line_ends_of_either_kind_part_events() -> None:
    account = Account(shows_usage=False)
    windows = (TEXT + USAGE_EVENT + LAST).replace(b"\n", b"\r\n")
    assert through(account, windows) == (TEXT + LAST).replace(b"\n", b"\r\n")


@given(
    content=st.text(max_size=60) | st.just(TRICKY),
    cuts=st.lists(st.integers(0, 400), max_size=4),
    details=st.booleans(),
    spaced=st.booleans(),
)
def test_a_whole_body_is_read_however_it_is_cut(content: str, cuts: list[int], details: bool, spaced: bool) -> None:
    usage = USAGE if details else {"prompt_tokens": 20, "completion_tokens": 7}
    choice = {"index": 0, "message": {"content": content}, "finish_reason": "tool_calls"}
    body = json.dumps(
        {"choices": [choice], "usage": usage, "model": "m"}, separators=None if spaced else (",", ":")
    ).encode()
    account = Account(shows_usage=False)
    edges = sorted({0, len(body), *(min(cut, len(body)) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        account.read_whole(body[start:end])
    account.finish()
    assert (account.prompt_tokens, account.completion_tokens) == (20, 7)
    assert account.cached_tokens == (16 if details else 0)
    assert account.finish_reason == "tool_calls"
    assert account.body_bytes == len(body)
