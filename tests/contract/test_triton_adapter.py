"""The Triton adapter against a real Triton: whatever the contract, clients get OpenAI's answers, byte for byte."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from router.errors import ApiError
from tests.contract.triton_adapter import Adapt
from tests.contract.triton_models_server import TritonModels, triton_models

TEXT = "Grüße 🙂, 𝔘nicode 漢字 and a NUL \0. " * 3
SERVED = ("ensemble", "ensemble_old", "tensorrt_llm_bls", "ensemble_whole", "llmapi")
CHAT = {"messages", "chat_template_kwargs", "add_generation_prompt"}
PENALTIES = {"presence_penalty", "frequency_penalty"}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server() -> AsyncIterator[TritonModels]:
    async with triton_models(*SERVED, "raw_engine") as running:
        yield running


@pytest.mark.parametrize(
    ("model", "detail", "capabilities"),
    [
        ("ensemble", "ensemble contract, text deltas", PENALTIES | {"repetition_penalty", "min_tokens"}),
        ("ensemble_old", "ensemble contract, text deltas", PENALTIES | {"repetition_penalty", "min_tokens"}),
        ("tensorrt_llm_bls", "ensemble contract, cumulative text", PENALTIES | {"repetition_penalty", "min_tokens"}),
        ("ensemble_whole", "ensemble contract, one answer", PENALTIES | {"repetition_penalty", "min_tokens"}),
        ("llmapi", "llmapi contract, cumulative text", PENALTIES),
    ],
)
async def test_a_probe_detects_the_contract_and_what_it_can_do(
    adapt: Adapt, model: str, detail: str, capabilities: set[str]
) -> None:
    report = await (await adapt(model)).probe()
    assert report.ready
    assert report.detail == f"{model}: {detail}"
    assert report.capabilities == frozenset(CHAT | capabilities | {"prompt", "seed", "top_k"})
    assert report.kv_block_tokens == 32


async def test_a_model_of_no_known_contract_takes_no_openai_request_and_says_why(adapt: Adapt) -> None:
    raw = await (await adapt("raw_engine")).probe()
    assert (raw.ready, raw.capabilities) == (True, frozenset())
    assert "token ids" in raw.detail
    missing = await (await adapt("no-such-model")).probe()
    assert not missing.ready
    assert "'no-such-model' is not ready" in missing.detail


async def test_metrics_that_cannot_be_read_do_not_make_an_endpoint_unready(adapt: Adapt) -> None:
    report = await (await adapt("ensemble", metrics="http://127.0.0.1:9/metrics")).probe()
    assert report.ready
    assert report.kv_block_tokens is None


@pytest.mark.parametrize("model", SERVED)
@pytest.mark.parametrize("cut", [1, 3, 7, None])
async def test_a_streamed_text_is_the_models_text(adapt: Adapt, model: str, cut: int | None) -> None:
    engine = await adapt(model)
    events = await engine.events({"text": TEXT, "cut": cut})
    assert events.text == TEXT
    assert events.finish == "stop"
    assert events.done
    assert all("�" not in piece for piece in events.pieces)
    if cut == 7 and model != "ensemble_whole":
        assert len(events.pieces) > len(TEXT.encode()) // 7 - 5


@pytest.mark.parametrize("model", SERVED)
async def test_a_whole_answer_is_the_models_text(adapt: Adapt, model: str) -> None:
    engine = await adapt(model)
    completion = await engine.whole({"text": TEXT, "cut": 3})
    assert completion["id"] == "cmpl-r-1"
    assert completion["object"] == "text_completion"
    assert completion["model"] == model
    assert completion["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    chat = await engine.whole({"text": TEXT}, api="chat.completions")
    assert chat["id"] == "chatcmpl-r-1"
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}


async def test_a_chat_stream_opens_with_the_role_and_ends_with_reason_usage_and_done(adapt: Adapt) -> None:
    events = await (await adapt("ensemble")).events({"text": "one two", "cut": 4}, api="chat.completions")
    assert events.chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {chunk["object"] for chunk in events.chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in events.chunks} == {"chatcmpl-r-1"}
    assert events.pieces == ["one ", "two"]
    assert events.chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert events.chunks[-1]["choices"] == []
    assert events.chunks[-1]["usage"]["completion_tokens"] == 2
    assert events.done


async def test_usage_is_streamed_only_to_those_who_asked(adapt: Adapt) -> None:
    events = await (await adapt("ensemble")).events({"text": "one"}, include_usage=False)
    assert events.usage is None
    assert all("usage" not in chunk for chunk in events.chunks)


async def test_an_empty_answer_is_an_answer(adapt: Adapt) -> None:
    events = await (await adapt("ensemble")).events({"text": ""})
    assert (events.text, events.finish, events.done) == ("", "stop", True)
    assert (await (await adapt("ensemble_whole")).whole({"text": ""}))["choices"][0]["text"] == ""


@pytest.mark.parametrize("model", SERVED)
@pytest.mark.parametrize("ignore_stop", [False, True])
@pytest.mark.parametrize("cut", [1, 4, None])
async def test_a_stop_string_never_reaches_the_client(
    adapt: Adapt, model: str, ignore_stop: bool, cut: int | None
) -> None:
    engine = await adapt(model)
    script = {
        "text": "keep this<END> and not this, however long it goes on" * 3,
        "ignore_stop": ignore_stop,
        "cut": cut,
    }
    events = await engine.events(script, stop=["<END>", "never"])
    assert (events.text, events.finish, events.done) == ("keep this", "stop", True)
    whole = await engine.whole(script, stop="<END>")
    assert whole["choices"][0]["text"] == "keep this"


@pytest.mark.parametrize("api", ["completions", "chat.completions"])
async def test_the_pools_stop_strings_end_the_text_too(adapt: Adapt, api: str) -> None:
    engine = await adapt("ensemble", stop=["<|im_end|>"])
    script = {"text": "Paris.<|im_end|>\n<|im_start|>", "cut": 3}
    assert (await engine.events(script, api=api)).text == "Paris."
    assert (await engine.events(script, api=api, stop=["ris"])).text == "Pa"


@pytest.mark.parametrize("model", ["ensemble", "ensemble_old", "tensorrt_llm_bls", "ensemble_whole"])
@pytest.mark.parametrize("stream", [True, False])
async def test_usage_counts_tokens_and_cached_tokens(adapt: Adapt, model: str, stream: bool) -> None:
    engine = await adapt(model)
    script = {"text": "abcdefgh", "cut": 2, "prompt_tokens": 100, "reused_blocks": 2}
    usage = (await engine.events(script)).usage if stream else (await engine.whole(script))["usage"]
    completion_tokens = 4 if stream or model == "ensemble_whole" else 1  # the scripted model counts its messages
    assert usage == {
        "prompt_tokens": 100,
        "completion_tokens": completion_tokens,
        "total_tokens": 100 + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 64},
    }


async def test_cached_tokens_never_exceed_the_prompt_and_are_left_out_when_the_block_size_is_unknown(
    adapt: Adapt,
) -> None:
    engine = await adapt("ensemble", kv_block_tokens=16)
    script = {"text": "a", "prompt_tokens": 100, "reused_blocks": 4}
    assert (await engine.whole(script))["usage"]["prompt_tokens_details"] == {"cached_tokens": 100}
    engine.endpoint.state.kv_block_tokens = None
    assert (await engine.whole(script))["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    unknown = await adapt("ensemble")
    unknown.endpoint.state.kv_block_tokens = None
    assert "prompt_tokens_details" not in (await unknown.whole(script))["usage"]


async def test_a_contract_without_counts_leaves_usage_out(adapt: Adapt) -> None:
    engine = await adapt("llmapi")
    assert (await engine.events({"text": "abc"})).usage is None
    assert "usage" not in await engine.whole({"text": "abc"})


@pytest.mark.parametrize("model", ["ensemble", "ensemble_old", "tensorrt_llm_bls", "ensemble_whole"])
async def test_reaching_the_token_limit_is_a_finish_reason(adapt: Adapt, model: str) -> None:
    engine = await adapt(model)
    assert (await engine.events({"text": "abcdef", "cut": 1}, max_tokens=3)).finish == "length"
    assert (await engine.events({"text": "abcdef", "cut": 1}, max_tokens=7)).finish == "stop"
    chat = await engine.events({"text": "abcdef", "cut": 1}, api="chat.completions", max_completion_tokens=3)
    assert (chat.finish, chat.text) == ("length", "abc")


async def test_the_llm_api_model_names_its_finish_reason(adapt: Adapt) -> None:
    engine = await adapt("llmapi")
    assert (await engine.events({"text": "abc", "finish": "length"})).finish == "length"
    assert (await engine.whole({"text": "abc", "finish": "length"}))["choices"][0]["finish_reason"] == "length"


async def test_parameters_become_the_declared_tensors(adapt: Adapt) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "seed": 7,
        "max_tokens": 1000,
        "stop": ["\x01x", "\x01y"],
    }
    common = await (await adapt("ensemble")).inputs(
        **sampling, min_tokens=2, repetition_penalty=1.5, presence_penalty=1
    )
    assert common["text_input"] == '{"inputs": true}'
    assert common["max_tokens"] == 1000
    assert common["stop_words"] == ["\x01x", "\x01y"]
    assert (common["temperature"], common["top_p"], common["top_k"], common["seed"]) == (0.5, 0.25, 5, 7)
    assert (common["min_tokens"], common["repetition_penalty"], common["presence_penalty"]) == (2, 1.5, 1)
    assert common["stream"] is True
    assert common["exclude_input_in_output"] is True
    assert common["return_perf_metrics"] is True
    assert "frequency_penalty" not in common
    assert common["asked"] == ["kv_cache_reused_blocks", "num_input_tokens", "num_output_tokens", "text_output"]
    old = await (await adapt("ensemble_old")).inputs(seed=-1, min_tokens=2)
    assert (old["random_seed"], old["min_length"]) == (2**64 - 1, 2)
    assert old["return_kv_cache_reuse_stats"] is True
    llm = await (await adapt("llmapi")).inputs(**sampling)
    assert llm["sampling_param_max_tokens"] == 1000
    assert llm["sampling_param_stop"] == ["\x01x", "\x01y"]
    assert llm["sampling_param_exclude_input_from_output"] is True
    assert llm["streaming"] is True
    assert llm["return_finish_reason"] is True
    assert (await (await adapt("ensemble_whole")).inputs())["stream"] is False


async def test_tokens_are_counted_for_a_client_that_did_not_ask(adapt: Adapt) -> None:
    engine = await adapt("ensemble")
    script = {"text": "abcd", "cut": 1, "prompt_tokens": 100}
    events = await engine.events(script, include_usage=False)
    assert events.usage is None
    account = engine.account
    assert (account.prompt_tokens, account.completion_tokens, account.finish_reason) == (100, 4, "stop")


async def test_the_same_request_id_twice_is_two_ids_at_the_engine(adapt: Adapt) -> None:
    engine = await adapt("ensemble")
    ids = [(await engine.inputs())["id"] for _ in range(2)]
    assert ids[0] != ids[1]
    assert all(id_.startswith("r-1.") for id_ in ids)


async def test_embeddings_are_refused(adapt: Adapt) -> None:
    with pytest.raises(ApiError, match="no embeddings"):
        await (await adapt("ensemble")).whole("text", api="embeddings")


async def test_a_prompt_of_megabytes_passes(adapt: Adapt) -> None:
    text = "x" * (8 << 20)
    assert (await (await adapt("ensemble")).whole(text))["choices"][0]["text"] == text
