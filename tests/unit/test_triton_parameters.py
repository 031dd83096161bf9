"""A malformed parameter is refused by its name, and what is sent is what was meant."""

from typing import Any

import msgspec
import pytest

from gateway.upstream.triton.parameters import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_COMPLETION_TOKENS,
    Fields,
    Parameters,
    read_chat,
    read_parameters,
    read_prompt_text,
)
from router.errors import ApiError


def fields(**values: Any) -> Fields:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in values.items()}


def parameters(**values: Any) -> Parameters:
    return read_parameters(fields(**values), chat=False, seed=99)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in ("hot", -0.1, 2.1, True, [1])],
        *[("top_p", value) for value in ("all", -0.1, 1.1)],
        *[("top_k", value) for value in ("5", -2, 1.5, 2**31)],
        *[("max_tokens", value) for value in (-1, 0, "16", 2**31, 1.5)],
        *[("max_completion_tokens", value) for value in (-1, 0, "16")],
        *[("seed", value) for value in ("7", 2**63, 0.5)],
        *[("stop", value) for value in (5, [5], ["a"] * 5, {"a": 1}, "x" * 1001)],
        *[("presence_penalty", value) for value in ("0", 2.5)],
        *[("frequency_penalty", value) for value in ("0", -2.5)],
        *[("repetition_penalty", value) for value in ("1", 0, -1, 1e300)],
        *[("min_tokens", value) for value in ("1", -1)],
        *[("n", value) for value in (0, 129, "1")],
    ],
)
def test_a_malformed_parameter_is_named(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parameters(**{name: value})
    assert caught.value.status == 400
    assert caught.value.param == name
    assert name in caught.value.message


def test_null_means_absent() -> None:
    names = ["temperature", "top_p", "top_k", "seed", "stop", "presence_penalty", "min_tokens", "n", "max_tokens"]
    assert parameters(**dict.fromkeys(names)) == parameters()


def test_the_token_limit_has_a_default_and_the_newer_name_wins() -> None:
    assert parameters().max_tokens == DEFAULT_COMPLETION_TOKENS
    assert read_parameters({}, chat=True, seed=0).max_tokens == DEFAULT_CHAT_TOKENS
    assert parameters(max_tokens=5).max_tokens == 5
    assert parameters(max_tokens=5, max_completion_tokens=6).max_tokens == 6


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_p": 0}, {"temperature": 0, "top_p": 0, "top_k": 40}])
def test_greedy_is_said_in_a_way_every_release_understands(greedy: dict[str, float]) -> None:
    sampling = parameters(**greedy).sampling
    assert sampling["top_k"] == 1
    assert "top_p" not in sampling


def test_a_top_k_that_is_off_is_not_sent() -> None:
    assert parameters(top_k=-1).sampling == parameters(top_k=0).sampling == parameters().sampling
    assert parameters(top_k=3).sampling["top_k"] == 3


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7}, {"top_k": 5}])
def test_what_is_not_greedy_is_sampled_anew_each_time(asked: dict[str, float]) -> None:
    assert parameters(**asked).sampling == {**asked, "top_p": 1.0, "seed": 99}
    assert parameters(**asked, top_p=0.5, seed=7).sampling == {**asked, "top_p": 0.5, "seed": 7}


def test_stop_strings_of_request_and_pool_are_joined() -> None:
    assert parameters(stop="a").stop == ("a",)
    assert parameters(stop=["a", "", "b", "a"]).stop == ("a", "b")
    assert read_parameters(fields(stop=["a"]), chat=True, seed=0, pool_stop=("<end>", "a")).stop == ("a", "<end>")


@pytest.mark.parametrize("prompt", ["text", ["text"]])
def test_a_prompt_is_a_string_or_a_list_of_one(prompt: Any) -> None:
    assert read_prompt_text(fields(prompt=prompt)) == "text"


@pytest.mark.parametrize("prompt", [None, "", [""], [], ["a", "b"], [1, 2], 5])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read_prompt_text(fields(prompt=prompt))
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_content_becomes_plain_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = read_chat(
        fields(
            messages=[
                {"role": "user", "content": parts},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "user", "content": "a\0b", "name": "x"},
            ]
        )
    )
    assert [message["content"] for message in chat.messages] == ["one\ntwo", "", "a\0b"]
    assert chat.messages[2]["name"] == "x"
    assert chat.add_generation_prompt
    assert not read_chat(fields(messages=[{"role": "user"}], add_generation_prompt=False)).add_generation_prompt


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
    ],
)
def test_malformed_messages_are_refused_with_the_place(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(fields(messages=messages))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_messages_nested_beyond_the_parser_are_refused() -> None:
    deep = msgspec.Raw(b'[{"role":"user","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}]")
    with pytest.raises(ApiError) as caught:
        read_chat({"messages": deep})
    assert caught.value.param == "messages"
