"""What the prompt view promises: bytes that grow with the conversation, needs by name, errors by parameter."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ApiError
from router.prefix import PREFIX_BLOCK_BYTES, prefix_chain
from router.prompt import Api, PromptView, read_fields, read_prompt

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=3000)}
    ),
    min_size=1,
    max_size=6,
)


def view(body: dict[str, Any], api: Api = "chat.completions", session: str | None = None) -> PromptView:
    return read_prompt(api, read_fields(json.dumps(body).encode()), session)


def chat(messages: list[dict[str, Any]], **parameters: Any) -> PromptView:
    return view({"model": "m", "messages": messages, **parameters})


USER = [{"role": "user", "content": "hi"}]


@given(MESSAGES, MESSAGES)
def test_a_conversation_that_goes_on_extends_its_canonical_bytes_and_its_chain(
    earlier: list[dict[str, Any]], later: list[dict[str, Any]]
) -> None:
    before, after = chat(earlier), chat(earlier + later)
    assert after.canonical.startswith(before.canonical)
    assert after.chain()[: len(before.chain())] == before.chain()


@given(MESSAGES, MESSAGES)
def test_a_conversation_keeps_its_key_from_the_first_user_message_on(
    opening: list[dict[str, Any]], later: list[dict[str, Any]]
) -> None:
    opening = [*opening, {"role": "user", "content": "the question"}]
    assert chat(opening).key == chat(opening + later).key


@given(st.binary(max_size=5 * PREFIX_BLOCK_BYTES), st.integers(0, 2**64 - 1))
def test_a_chain_has_one_hash_for_each_whole_block(data: bytes, seed: int) -> None:
    assert len(prefix_chain(data, seed)) == len(data) // PREFIX_BLOCK_BYTES


def test_one_changed_byte_changes_the_chain_from_its_block_on() -> None:
    data = bytes(5 * PREFIX_BLOCK_BYTES)
    changed = bytearray(data)
    changed[2 * PREFIX_BLOCK_BYTES] = 1
    before, after = prefix_chain(data, 7), prefix_chain(bytes(changed), 7)
    assert before[:2] == after[:2]
    assert not set(before[2:]) & set(after[2:])


def test_salts_and_models_share_no_prefix() -> None:
    long = [{"role": "user", "content": "x" * 3000}]
    plain, salted = chat(long), chat(long, cache_salt="tenant-1")
    other = view({"model": "n", "messages": long})
    assert not set(plain.chain()) & set(salted.chain())
    assert not set(plain.chain()) & set(other.chain())
    assert len({plain.key, salted.key, other.key}) == 3


def test_a_session_header_names_the_conversation() -> None:
    one = read_prompt("chat.completions", read_fields(b'{"model":"m","messages":[{"role":"user","content":"a"}]}'), "s")
    two = read_prompt("chat.completions", read_fields(b'{"model":"m","messages":[{"role":"user","content":"b"}]}'), "s")
    assert one.key == two.key


def test_text_parts_are_the_same_prompt_as_a_string() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert chat(parts).canonical == chat(USER).canonical
    assert chat(parts).needs == {"messages"}


@pytest.mark.parametrize(
    ("parameters", "needs"),
    [
        ({}, set()),
        ({"temperature": 0.5, "max_tokens": 3, "stop": ["x"], "user": "u", "stream": True}, set()),
        ({"n": 1, "logprobs": False, "tools": [], "presence_penalty": 0, "response_format": {"type": "text"}}, set()),
        ({"n": None, "seed": None, "logit_bias": {}}, set()),
        ({"n": 2}, {"n"}),
        ({"seed": 0}, {"seed"}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs", "top_logprobs"}),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, {"tools", "tool_choice"}),
        ({"response_format": {"type": "json_object"}}, {"response_format"}),
        ({"min_tokens": True}, {"min_tokens"}),
        ({"foo": 1}, {"foo"}),
    ],
)
def test_what_a_request_asks_beyond_the_common_is_a_need_by_name(parameters: dict[str, Any], needs: set[str]) -> None:
    assert chat(USER, **parameters).needs == needs | {"messages"}


def test_the_best_n_of_n_ask_for_no_more_than_n() -> None:
    def needs(**parameters: Any) -> frozenset[str]:
        return view({"model": "m", "prompt": "a", **parameters}, "completions").needs

    assert needs(n=2, best_of=2) == {"prompt", "n"}
    assert needs(n=2, best_of=3) == {"prompt", "n", "best_of"}
    assert needs(best_of=2) == {"prompt", "best_of"}
    assert needs(n=1, best_of=1) == {"prompt"}


def test_other_forms_of_content_are_needs() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert chat(image).needs == {"messages", "messages:image_url"}
    assert view({"model": "m", "prompt": [1, 2]}, "completions").needs == {"prompt", "prompt:batch"}
    assert view({"model": "m", "prompt": ["a", "b"]}, "completions").needs == {"prompt", "prompt:batch"}
    assert view({"model": "m", "prompt": ["a"]}, "completions").needs == {"prompt"}
    assert view({"model": "m", "prompt": "a", "logprobs": 0}, "completions").needs == {"prompt", "logprobs"}
    assert view({"model": "m", "input": "a"}, "embeddings").needs == {"input"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": USER}, "model"),
        ({"model": "", "messages": USER}, "model"),
        ({"model": 3, "messages": USER}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": "hi"}, "messages"),
        ({"model": "m", "messages": [{"content": "hi"}]}, "messages[0]"),
        ({"model": "m", "messages": [*USER, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"model": "m", "messages": [{"role": "user"}]}, "messages[0].content"),
        ({"model": "m", "messages": [{"role": "system", "content": None}, *USER]}, "messages[0].content"),
        ({"model": "m", "messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
        ({"model": "m", "messages": USER, "temperature": "hot"}, "temperature"),
        ({"model": "m", "messages": USER, "max_tokens": 1.5}, "max_tokens"),
        ({"model": "m", "messages": USER, "stream": "yes"}, "stream"),
        ({"model": "m", "messages": USER, "stop": [1]}, "stop[0]"),
        ({"model": "m", "messages": USER, "stream_options": {}}, "stream_options"),
        ({"model": "m", "messages": USER, "stream": True, "stream_options": 1}, "stream_options"),
    ],
)
def test_a_malformed_request_is_refused_by_the_parameter(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        view(body)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("prompt", ["", [""], [], None, 3, {}])
def test_an_empty_or_malformed_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as refused:
        view({"model": "m", "prompt": prompt}, "completions")
    assert (refused.value.status, refused.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "\xff"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"}",
        b'{"model": "m", "prompt": "x", "foo": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"model": "m", "prompt": ' + b"[" * 900 + b"1" + b"]" * 900 + b"}",
    ],
    ids=["empty", "cut", "array", "null", "utf8", "surrogate", "open", "deep", "deep prompt"],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_prompt("completions", read_fields(body))
    assert refused.value.status == 400


@given(st.binary(max_size=200))
def test_no_body_makes_the_reader_fail_otherwise_than_by_refusing(body: bytes) -> None:
    try:
        read_prompt("chat.completions", read_fields(body))
    except ApiError as refused:
        assert refused.status == 400


def test_what_openai_accepts_is_read() -> None:
    assert "\0" in view({"model": "m", "prompt": "a\0b"}, "completions").canonical.decode()
    many = [{"role": "user", "content": str(number)} for number in range(5000)]
    assert chat(many).canonical.endswith(b"4999")
