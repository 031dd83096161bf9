"""OpenAI's own client against every TensorRT-LLM contract on a real Triton: it gets the model's text, byte for byte."""

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import openai
import pytest
import pytest_asyncio

from router.spec.fleet import ChatTemplateSpec, EndpointSpec, FleetSpec, PoolSpec, RouteSpec, TokenizerSpec
from tests.contract.triton_adapter import SCRIPT_TEMPLATE
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.harness import FAST_PROBES, RunningGateway, running_gateway
from tests.tokenizer import SAMPLE, byte_level

TEXT_MODELS = ("ensemble", "ensemble_old", "ensemble_whole", "tensorrt_llm_bls", "tensorrt_llm_bls_delta", "llmapi")
TOKEN_MODELS = ("raw", "raw_whole", "raw_old")
CHOICE_MODELS = ("choices", "choices_steps")
CUTS = (1, 2, 7, None)
"""Tokens in an event; the models that answer in text count a byte as one. None: all in one."""
TEXTS = {
    "all": SAMPLE,
    "emoji": "👩‍👩‍👧🙂🙃 🏳️‍🌈",
    "CJK": "漢字かな交じり文、한국어。",
    "spaces": "   leading,  inner   and trailing  \n\n ",
    "code": "def f(x: int) -> int:\n\tif x < 2:\n        return x ** 2  # ok\n\r\n",
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def triton() -> AsyncIterator[TritonModels]:
    async with triton_models(
        *TEXT_MODELS, *TOKEN_MODELS, "steps_tokenize", "steps_detokenize", *CHOICE_MODELS
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(triton: TritonModels, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_level(file)
    template = ChatTemplateSpec(text=SCRIPT_TEMPLATE, bos="<s>")
    pools = {
        model: PoolSpec(
            protocol="triton",
            model=model,
            chat_template=template,
            tokenizer=TokenizerSpec(file=str(file), eos="</s>") if model in (*TOKEN_MODELS, "choices") else None,
            endpoints=[EndpointSpec(id=f"triton-{model.replace('_', '-')}", grpc=triton.grpc)],
            probe=FAST_PROBES,
        )
        for model in (*TEXT_MODELS, *TOKEN_MODELS, *CHOICE_MODELS)
    }
    async with running_gateway(
        FleetSpec(fleet="t", pools=pools, routes={model: RouteSpec(pool=model) for model in pools})
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt_for(model: str, text: str, cut: int | None) -> str:
    """What makes `model` answer with `text`."""
    if model in TOKEN_MODELS:
        return (f"<cut{cut}>" if cut is not None else "") + text
    return json.dumps({"text": text, "cut": cut})


@pytest.mark.parametrize("model", [*TEXT_MODELS, *TOKEN_MODELS])
@pytest.mark.parametrize("cut", CUTS)
async def test_a_conversation_gets_the_models_text(client: openai.AsyncOpenAI, model: str, cut: int | None) -> None:
    for text in TEXTS.values():
        prompt = prompt_for(model, text, cut)
        messages: Any = [{"role": "user", "content": prompt}]
        pieces = []
        finish = None
        async for chunk in await client.chat.completions.create(
            model=model, messages=messages, max_tokens=5000, stream=True, stream_options={"include_usage": True}
        ):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            finish = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), finish)
        assert ("".join(pieces), finish) == (text, "stop")
        whole = await client.chat.completions.create(model=model, messages=messages, max_tokens=5000)
        assert whole.choices[0].message.content == text
        completion = await client.completions.create(model=model, prompt=prompt, max_tokens=5000)
        assert completion.choices[0].text == text


@pytest.mark.parametrize("model", CHOICE_MODELS)
@pytest.mark.parametrize("cut", CUTS)
async def test_every_choice_of_a_request_is_the_models_text(
    client: openai.AsyncOpenAI, model: str, cut: int | None
) -> None:
    how = {1: "3", 2: "4", 7: "5", None: ""}[cut] if model == "choices_steps" else f"<cut{cut}>" if cut else ""
    prompt = how + "".join(f"|{text}" for text in TEXTS.values())
    n = len(TEXTS)
    messages: Any = [{"role": "user", "content": prompt}]
    texts = [""] * n
    finishes: list[list[str]] = [[] for _ in range(n)]
    usages = []
    async for chunk in await client.chat.completions.create(
        model=model, messages=messages, max_tokens=5000, n=n, stream=True, stream_options={"include_usage": True}
    ):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == list(TEXTS.values())
    assert finishes == [["stop"]] * n
    whole = await client.chat.completions.create(model=model, messages=messages, max_tokens=5000, n=n)
    assert [choice.message.content for choice in whole.choices] == texts
    assert usages == [whole.usage]
    completion = await client.completions.create(model=model, prompt=prompt, max_tokens=5000, n=n, best_of=n)
    assert [choice.text for choice in completion.choices] == texts
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=model, prompt=prompt, n=2, best_of=3)
    assert caught.value.param == "best_of"


async def test_log_probabilities_and_draft_tokens_are_the_clients_own_types(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "漢 one"}]
    chat = await client.chat.completions.create(model="raw", messages=messages, logprobs=True)
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == "漢 one"
    completion = await client.completions.create(model="raw", prompt="one two", logprobs=0)
    found = completion.choices[0].logprobs
    assert found is not None
    assert "".join(found.tokens or ()) == "one two"
    for model in ("raw", "tensorrt_llm_bls_delta"):
        answer = await client.completions.create(model=model, prompt="one two")
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (7, 3)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, (None, None)),
        ({"type": "json_object"}, (["json"], None)),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            (["json_schema"], ['{"type":"object"}']),
        ),
    ],
)
async def test_guided_decoding_goes_where_the_contract_has_it(
    client: openai.AsyncOpenAI, form: Any, expected: tuple[list[str] | None, list[str] | None]
) -> None:
    messages: Any = [{"role": "user", "content": "<inputs>"}]
    answer = await client.chat.completions.create(model="raw", messages=messages, response_format=form, max_tokens=5000)
    inputs = json.loads(answer.choices[0].message.content or "")
    assert (inputs.get("guided_decoding_guide_type"), inputs.get("guided_decoding_guide")) == expected
    messages = [{"role": "user", "content": '{"inputs": true}'}]
    answer = await client.chat.completions.create(
        model="tensorrt_llm_bls_delta", messages=messages, response_format=form
    )
    inputs = json.loads(answer.choices[0].message.content or "")
    texts = tuple(value[0] if value else None for value in expected)
    assert (inputs.get("guided_decoding_guide_type"), inputs.get("guided_decoding_guide")) == texts


@pytest.mark.parametrize(
    ("model", "parameter"),
    [
        *[(model, {"n": 2}) for model in ("ensemble", "tensorrt_llm_bls", "raw", "raw_whole", "llmapi")],
        *[(model, {"n": 129}) for model in CHOICE_MODELS],
        *[(model, {"logprobs": True}) for model in ("ensemble", "raw_old", "llmapi", "tensorrt_llm_bls")],
        *[(model, {"response_format": {"type": "json_object"}}) for model in ("ensemble", "raw_old", "llmapi")],
        ("raw", {"logprobs": True, "top_logprobs": 3}),
        ("llmapi", {"extra_body": {"min_tokens": 3}}),
    ],
)
async def test_what_a_contract_does_not_have_is_refused_by_its_name(
    client: openai.AsyncOpenAI, model: str, parameter: dict[str, Any]
) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=model, messages=messages, **parameter)
    named = [*parameter, *cast("dict[str, Any]", parameter.get("extra_body", {}))]
    assert caught.value.param in named
