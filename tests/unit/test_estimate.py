"""What a request is taken to take before its engine has said so."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.estimate import COMPLETION_TOKENS, completion_tokens, prompt_tokens, tokens_in, used
from router.admission.limits import Use
from router.kserve_json import Conversation, view
from router.prompt import Api, PromptView, read_fields, read_prompt


def seen(api: Api = "chat.completions", **fields: Any) -> PromptView:
    return read_prompt(api, read_fields(msgspec.json.encode({"model": "m", **fields})))


def said(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": one} for one in content]


def test_four_bytes_of_a_prompt_are_a_token() -> None:
    assert 1000 <= prompt_tokens(seen(messages=said("word" * 1000))) <= 1002
    assert 1000 <= prompt_tokens(seen(messages=said([{"type": "text", "text": "word" * 1000}]))) <= 1002
    assert prompt_tokens(seen("completions", prompt="word" * 1000)) == 1000
    assert prompt_tokens(view("m", Conversation(b"word" * 1000), None, 0)) == 1000


def test_a_route_may_say_how_many_bytes_make_a_token() -> None:
    assert prompt_tokens(seen("completions", prompt="word" * 1000), 2.5) == 1600


@pytest.mark.parametrize("bytes_per_token", [5e-324, 1e-9])
def test_whatever_a_route_says_of_its_tokens_there_are_no_more_than_can_be_counted(bytes_per_token: float) -> None:
    assert prompt_tokens(seen("completions", prompt="word" * 1000), bytes_per_token) == tokens_in(1, 5e-324) == 2**40


def test_bytes_count_and_not_characters() -> None:
    assert prompt_tokens(seen(messages=said("水" * 1000))) >= 750


def test_an_image_counts_for_nothing_but_the_text_beside_it_does() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    assert 1000 <= prompt_tokens(seen(messages=said([image, {"type": "text", "text": "word" * 1000}]))) <= 1002


def test_tools_are_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "word" * 1000}}]
    assert prompt_tokens(seen(messages=said("hi"), tools=tools)) >= 1000


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, COMPLETION_TOKENS),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 7, "n": 3}, 21),
        ({"max_tokens": -1}, 0),
    ],
)
def test_an_answer_takes_what_it_may_or_what_is_usual(fields: dict[str, Any], expected: int) -> None:
    assert completion_tokens(seen(messages=said("hi"), **fields)) == expected


def test_embeddings_have_no_answer_to_count() -> None:
    assert completion_tokens(seen("embeddings", input="hello")) == 0


@given(st.integers(), st.integers())
def test_no_number_that_a_client_sends_is_too_large_or_too_small(most: int, choices: int) -> None:
    estimate = completion_tokens(seen(messages=said("hi"), max_tokens=most, n=choices))
    assert 0 <= estimate <= 2**40


def test_what_an_engine_reports_counts() -> None:
    assert used(Use(10, 256), 12, 4000, 80_000, streamed=True) == Use(12, 4000)


def test_an_answer_without_usage_is_judged_by_its_bytes() -> None:
    reserved = Use(10, 256)
    assert used(reserved, 0, 0, 200 * 1000, streamed=True).completion_tokens >= 1000
    assert used(reserved, 0, 0, 4 * 1000, streamed=False) == Use(10, 1000)
    assert used(reserved, 0, 0, 0, streamed=True) == Use(10, 0)


def test_an_answer_given_up_while_the_engine_was_at_work_counts_as_was_reserved() -> None:
    assert used(Use(10, 256), 0, 0, 0, streamed=False) == Use(10, 256)
