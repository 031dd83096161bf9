"""The raw engine contract on a real Triton: token ids behind, OpenAI's API in front, and nobody notices."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.upstream.triton.tokens import TokenCodec
from router.errors import ApiError
from router.spec.fleet import RetentionSpec, TokenizerSpec
from tests.contract.triton_adapter import Adapt, Adapter
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.tokenizer import SAMPLE, byte_level

MODELS = ("raw", "raw_whole", "raw_old")

RawAdapt = Callable[..., Awaitable[Adapter]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[TritonModels]:
    async with triton_models(*MODELS, "llmapi") as running:
        yield running


@pytest.fixture
def raw(adapt: Adapt, tokenizer_file: Path) -> RawAdapt:
    async def make(model: str = "raw", *, eos: str = "</s>", **options: Any) -> Adapter:
        return await adapt(model, tokenizer=TokenizerSpec(file=str(tokenizer_file), eos=eos), **options)

    return make


async def test_a_probe_detects_the_contract_and_what_it_can_do(raw: RawAdapt) -> None:
    report = await (await raw()).probe()
    assert report.detail == "raw: raw contract, tokens"
    assert report.capabilities is not None
    assert {"messages", "prompt", "seed", "min_tokens", "logprobs", "response_format"} <= report.capabilities
    old = await (await raw("raw_old")).probe()
    assert old.capabilities is not None
    assert {"seed", "min_tokens"} <= old.capabilities
    assert not {"logprobs", "response_format"} & old.capabilities


async def test_without_a_tokenizer_no_openai_request_is_taken_and_the_reason_is_told(
    adapt: Adapt, tokenizer_file: Path
) -> None:
    async def probed(spec: TokenizerSpec | None) -> str:
        report = await (await adapt("raw", tokenizer=spec)).probe()
        assert (report.ready, report.capabilities) == (True, frozenset())
        return report.detail

    assert "names no `tokenizer`" in await probed(None)
    assert "tokenizer /nowhere/t.json is not on this gateway" in await probed(TokenizerSpec(file="/nowhere/t.json"))
    assert "no token '<eos>'" in await probed(TokenizerSpec(file=str(tokenizer_file), eos="<eos>"))


async def test_a_tokenizer_that_appears_later_is_found(adapt: Adapt, tmp_path: Path) -> None:
    late = tmp_path / "late.json"
    engine = await adapt("raw", tokenizer=TokenizerSpec(file=str(late)))
    assert (await engine.probe()).capabilities == frozenset()
    byte_level(late)
    assert "messages" in ((await engine.probe()).capabilities or ())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cut", ["<cut1>", "<cut2>", "<cut7>", ""])
@pytest.mark.parametrize("api", ["completions", "chat.completions"])
async def test_the_text_is_the_models_byte_for_byte_however_it_is_cut(
    raw: RawAdapt, codec: TokenCodec, model: str, cut: str, api: str
) -> None:
    engine = await raw(model)
    events = await engine.events(cut + SAMPLE, api=api)
    assert (events.text, events.finish, events.done) == (SAMPLE, "stop", True)
    assert all("�" not in piece for piece in events.pieces)
    whole = await engine.whole(cut + SAMPLE, api=api)
    choice = whole["choices"][0]
    assert (choice["message"]["content"] if "message" in choice else choice["text"]) == SAMPLE
    prompt = len(codec.encode("<s>" + cut + SAMPLE, add_special=False))
    answer = len(codec.encode(SAMPLE, add_special=False)) + 1
    for usage in (events.usage, whole["usage"]):
        assert usage is not None
        counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
        assert counts == (prompt, answer, prompt + answer)


async def test_the_prompt_begins_with_one_bos_whoever_wrote_it(raw: RawAdapt) -> None:
    engine = await raw()
    for body in ({"api": "completions"}, {"api": "chat.completions"}):
        answer = json.loads((await engine.events("<inputs>x", **body)).text)
        assert answer["input_ids"].count(0) == 1
        assert answer["input_ids"][0] == 0
    assert json.loads((await engine.events("<s><inputs>x")).text)["input_ids"].count(0) == 1


@pytest.mark.parametrize("model", MODELS)
async def test_reaching_the_token_limit_is_a_finish_reason(raw: RawAdapt, codec: TokenCodec, model: str) -> None:
    engine = await raw(model)
    length = len(codec.encode("some text", add_special=False))
    full = await engine.events("<cut1>some text", max_tokens=length)
    assert (full.text, full.finish) == ("some text", "length")
    more = await engine.events("<cut1>some text", max_tokens=length + 1)
    assert (more.text, more.finish) == ("some text", "stop")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("script", ["<cut1>", "<cut2>", "", "<cut1><endless>"])
async def test_a_stop_string_never_reaches_the_client(raw: RawAdapt, model: str, script: str) -> None:
    engine = await raw(model)
    text = script + "keep this<END> and not this, however long it goes on" * 3
    events = await engine.events(text, stop=["<END>", "never"])
    assert (events.text, events.finish, events.done) == ("keep this", "stop", True)
    # One that begins in the middle of a token is cut off in the text.
    assert (await engine.events(text, stop=["ep th"])).text == "ke"


async def test_a_special_token_ends_the_turn(raw: RawAdapt) -> None:
    engine = await raw(stop=["<|im_end|>"])
    for api in ("completions", "chat.completions"):
        events = await engine.events("<cut2><endless>Paris.<|im_end|>and more", api=api)
        assert (events.text, events.finish) == ("Paris.", "stop")
    by_stop = await raw(eos="", stop=["<|im_end|>"])
    inputs = json.loads((await by_stop.events("<inputs><endless>")).text)
    assert (inputs["end_id"], inputs["pad_id"]) == ([2], [2])
    assert "stop_words_list" not in inputs


async def test_parameters_become_the_declared_tensors(raw: RawAdapt, codec: TokenCodec) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.25, "top_k": 5, "seed": -1, "max_tokens": 1000, "min_tokens": 2}
    penalties = {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    engine = await raw()
    answer = await engine.events("<inputs>", **sampling, **penalties, stop=["\x01ab", "\x01c"], response_format=form)
    inputs = json.loads(answer.text)
    assert inputs["request_output_len"] == [1000]
    assert inputs["streaming"] == inputs["exclude_input_in_output"] == inputs["return_perf_metrics"] == [True]
    assert (inputs["temperature"], inputs["runtime_top_p"], inputs["runtime_top_k"]) == ([0.5], [0.25], [5])
    assert (inputs["seed"], inputs["min_tokens"], inputs["end_id"], inputs["pad_id"]) == ([2**64 - 1], [2], [1], [1])
    assert (inputs["presence_penalty"], inputs["frequency_penalty"], inputs["repetition_penalty"]) == (
        [1],
        [0.5],
        [1.5],
    )
    first, second = (codec.encode(text, add_special=False) for text in ("\x01ab", "\x01c"))
    ids, offsets = inputs["stop_words_list"]
    assert ids == first + second
    assert offsets == [len(first), len(ids)] + [-1] * (len(ids) - 2)
    assert inputs["guided_decoding_guide_type"] == ["json_schema"]
    assert inputs["guided_decoding_guide"] == ['{"type":"object"}']
    assert "return_log_probs" not in inputs
    old = json.loads((await (await raw("raw_old")).events("<inputs>", seed=7, min_tokens=2)).text)
    assert (old["random_seed"], old["min_length"], old["streaming"]) == ([7], [2], [False])


async def test_a_routes_retention_becomes_priorities_where_they_are_declared(raw: RawAdapt) -> None:
    async def hints(retention: RetentionSpec | None, model: str = "raw") -> dict[str, Any]:
        inputs = json.loads((await (await raw(model)).events("<inputs>", max_tokens=5000, retention=retention)).text)
        return {name.removeprefix("retention_"): inputs[name] for name in inputs if name.startswith("retention_")}

    assert await hints(None) == {}
    both = RetentionSpec(prompt=80, decode=20, duration="1m")
    assert await hints(both) == {
        "token_range_starts": [0],
        "token_range_ends": [-1],
        "token_range_priorities": [80],
        "token_range_durations_ms": [60_000],
        "decode_priority": [20],
        "decode_duration_ms": [60_000],
    }
    assert (await hints(RetentionSpec(prompt=0)))["token_range_durations_ms"] == [-1]
    assert await hints(RetentionSpec(decode=0)) == {"decode_priority": [0]}
    assert await hints(both, "raw_old") == {}


async def test_usage_tells_cached_and_draft_tokens(raw: RawAdapt) -> None:
    engine = await raw(kv_block_tokens=4)
    engine.endpoint.state.kv_block_tokens = None  # that of the scripted models' metrics
    usage = (await engine.whole("some text"))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 3}
    assert set((await (await raw("raw_old")).whole("some text"))["usage"]) == {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
    }


@pytest.mark.parametrize("script", ["<cut1>", "<cut2>", "<cut7>", "<cut2><repeat>", ""])
async def test_log_probabilities_are_those_of_the_tokens_of_the_text(
    raw: RawAdapt, codec: TokenCodec, script: str
) -> None:
    engine = await raw()
    ids = codec.encode(SAMPLE, add_special=False)
    expected = [-(id_ % 8) / 4 for id_ in ids]
    for whole in (False, True):
        body = {"api": "chat.completions", "logprobs": True}
        if whole:
            entries = (await engine.whole(script + SAMPLE, **body))["choices"][0]["logprobs"]["content"]
        else:
            chunks = (await engine.events(script + SAMPLE, **body)).chunks
            logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
            entries = [entry for each in logprobs for entry in each["content"]]
        assert [entry["logprob"] for entry in entries] == expected
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == SAMPLE
    stopped = await engine.whole(script + "one two<END>three", logprobs=0, stop="<END>")
    found = stopped["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == stopped["choices"][0]["text"] == "one two"
    assert found["text_offset"][0] == 0
    with pytest.raises(ApiError, match="logprobs"):
        await engine.whole("x", logprobs=5)


async def test_the_llm_api_model_has_a_usage_where_the_pool_names_a_tokenizer(
    adapt: Adapt, raw: RawAdapt, codec: TokenCodec
) -> None:
    script = {"text": "漢字 and a few words", "cut": 3, "reused_blocks": 1}
    engine = await raw("llmapi", kv_block_tokens=4)
    engine.endpoint.state.kv_block_tokens = None  # that of the scripted models' metrics
    prompt = len(codec.encode(json.dumps(script), add_special=True))
    answer = len(codec.encode("漢字 and a few words", add_special=False))
    for usage in ((await engine.events(script)).usage, (await engine.whole(script))["usage"]):
        assert usage is not None
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, answer)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert (await engine.events(script, include_usage=False)).usage is None
    without = await (await adapt("llmapi", tokenizer=TokenizerSpec(file="/nowhere/t.json"))).probe()
    assert "messages" in (without.capabilities or ())
    assert "no usage: tokenizer /nowhere/t.json is not on this gateway" in without.detail
