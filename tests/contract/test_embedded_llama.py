"""The embedded llama.cpp server speaks the OpenAI API, with a real prefix cache and the chat template we ship."""

import asyncio
import json
import urllib.request
from typing import Any

import pytest

from gateway.chat_template import render_chat
from headrace.local.ask import ask
from headrace.local.errors import LocalFleetError
from headrace.local.llm import CHAT_TEMPLATE, MODEL_NAME, SLOT_TOKENS, SLOTS
from router.spec.fleet import ChatTemplateSpec
from tests.engines import Llama


async def call(llama: Llama, path: str, body: dict[str, Any] | None = None) -> Any:
    def fetch() -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(llama.http + path, data), timeout=10) as response:
            return json.load(response)

    return await asyncio.to_thread(fetch)


async def test_the_server_has_the_slots_and_the_model_name_promised(llama: Llama) -> None:
    models = await call(llama, "/v1/models")
    slots = await call(llama, "/slots")

    assert [model["id"] for model in models["data"]] == [MODEL_NAME]
    assert len(slots) == SLOTS
    assert all(slot["n_ctx"] == SLOT_TOKENS for slot in slots)


async def test_a_question_asked_twice_is_answered_from_the_cache_the_second_time(llama: Llama) -> None:
    question = "Take your time and think of the map of Europe. " * 20 + "What is the capital of France?"
    first = await ask(llama.http, MODEL_NAME, question, 16)
    second = await ask(llama.http, MODEL_NAME, question, 16)

    assert "Paris" in first.text
    assert second.text == first.text
    assert first.prompt_tokens == second.prompt_tokens
    assert first.cached_tokens is not None
    assert second.cached_tokens is not None
    assert second.prompt_tokens is not None
    assert second.cached_tokens >= 0.9 * second.prompt_tokens > first.cached_tokens
    assert second.finish_reason in {"stop", "length"}


async def test_a_refused_question_is_one_sentence(llama: Llama) -> None:
    with pytest.raises(LocalFleetError, match="status 400"):
        await ask(llama.http, MODEL_NAME, "word " * (SLOT_TOKENS + 1), 4)


async def test_a_short_question_is_answered_rightly(llama: Llama) -> None:
    answer = await ask(llama.http, MODEL_NAME, "What is the capital of France?", 32)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "a\n\nb {{ x }}"}],
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three 😀\n"},
        ],
    ],
)
async def test_the_gateways_and_llama_cpps_rendering_of_our_chat_template_are_the_same(
    llama: Llama, messages: list[dict[str, str]]
) -> None:
    theirs = await call(llama, "/apply-template", {"messages": messages})
    assert render_chat(ChatTemplateSpec(text=CHAT_TEMPLATE.read_text()), messages) == theirs["prompt"]
