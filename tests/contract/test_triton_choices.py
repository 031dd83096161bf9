"""Several answers to one request (`n`) on a real Triton: each is the model's text, byte for byte, however it is cut and
whichever ends first; from the raw engine over both transports, and from an ensemble."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.triton.tokens import TokenCodec
from router.errors import ApiError
from router.spec.fleet import TokenizerSpec
from tests.contract.triton_adapter import Adapt, Adapter, Events
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.tokenizer import SAMPLE, SPECIALS

MODELS = ("steps_tokenize", "choices", "steps_detokenize", "choices_steps", "tensorrt_llm_bls", "raw_whole")
TEXTS = (SAMPLE, "short", "漢字かな 👩‍👩‍👧", "", "def f(x: int) -> int:\n\treturn x\n  ")
SEPARATOR = "|"

Make = Callable[..., Awaitable[Adapter]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[TritonModels]:
    async with triton_models(*MODELS) as running:
        yield running


@pytest.fixture
def make(adapt: Adapt, tokenizer_file: Path) -> Make:
    async def made(way: str, **pool: Any) -> Adapter:
        if way == "ensemble":
            return await adapt("choices_steps", **pool)
        tokenizer = TokenizerSpec(file=str(tokenizer_file), eos="</s>")
        transport = "http" if way == "http" else "grpc"
        return await adapt("choices", tokenizer=tokenizer, transport=transport, kv_block_tokens=1, **pool)

    return made


def script(way: str, special: str, texts: tuple[str, ...] = TEXTS) -> str:
    """What makes the model behind `way` answer with `texts`; each digit of `special` is an id that says how."""
    how = special if way == "ensemble" else "".join(SPECIALS[int(digit)] for digit in special)
    return how + "".join(SEPARATOR + text for text in texts)


def answer_ids(codec: TokenCodec, prompt: str) -> list[list[int]]:
    """The ids of each answer in a prompt: a text's depend on what follows it."""
    separator = codec.id_of(SEPARATOR)
    answers: list[list[int]] = []
    for id_ in codec.encode(prompt, add_special=False):
        if id_ == separator:
            answers.append([])
        elif answers:
            answers[-1].append(id_)
    return answers


def by_choice(events: Events, n: int) -> list[list[dict[str, Any]]]:
    """The parts of each choice of a stream, in order."""
    assert events.done
    choices = [choice for chunk in events.chunks for choice in chunk["choices"]]
    return [[choice for choice in choices if choice["index"] == index] for index in range(n)]


def text_of(choice: dict[str, Any]) -> str:
    content = choice.get("delta") or choice.get("message")
    text: str = choice.get("text") or "" if content is None else content.get("content") or ""
    return text


@pytest.mark.parametrize("way", ["grpc", "http", "ensemble"])
@pytest.mark.parametrize("cut", ["3", "4", "5", ""])
@pytest.mark.parametrize("api", ["completions", "chat.completions"])
async def test_every_choice_is_what_the_model_produced(make: Make, way: str, cut: str, api: str) -> None:
    engine = await make(way)
    n = 6
    expected = [*TEXTS, TEXTS[0]]
    parts = by_choice(await engine.events(script(way, cut), api=api, n=n), n)
    assert ["".join(map(text_of, part)) for part in parts] == expected
    for part in parts:
        assert [choice["finish_reason"] for choice in part] == [None] * (len(part) - 1) + ["stop"]
        assert all("�" not in text_of(choice) for choice in part)
    if api == "chat.completions":
        assert [part[0]["delta"]["role"] for part in parts] == ["assistant"] * n
    whole = await engine.whole(script(way, cut), api=api, n=n)
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))
    assert [text_of(choice) for choice in whole["choices"]] == expected
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop"] * n


@pytest.mark.parametrize("way", ["grpc", "http"])
async def test_the_choices_come_one_among_the_other_and_end_each_in_its_time(make: Make, way: str) -> None:
    events = await (await make(way)).events(script(way, "3", ("abcdefghij" * 3, "xy")), n=2)
    order = [choice["index"] for chunk in events.chunks for choice in chunk["choices"]]
    ends = [at for at, chunk in enumerate(events.chunks) for c in chunk["choices"] if c["finish_reason"]]
    assert order[:4] == [0, 1, 0, 1]
    assert (order[ends[0]], order[ends[1]]) == (1, 0)
    assert ends[1] - ends[0] > 10


@pytest.mark.parametrize("way", ["grpc", "http", "ensemble"])
async def test_limit_and_stop_strings_are_each_choices_own(make: Make, way: str) -> None:
    engine = await make(way)
    texts = ("one two three", "keep<END>not this", "<EN")
    body: dict[str, Any] = {"n": 3, "stop": "<END>", "max_tokens": 13}
    for special in ("3", ""):
        parts = by_choice(await engine.events(script(way, special, texts), **body), 3)
        whole = (await engine.whole(script(way, special, texts), **body))["choices"]
        assert [text_of(choice) for choice in whole] == ["one two three", "keep", "<EN"]
        assert ["".join(map(text_of, part)) for part in parts] == ["one two three", "keep", "<EN"]
        assert [part[-1]["finish_reason"] for part in parts][1:] == ["stop", "stop"]
        assert [choice["finish_reason"] for choice in whole][1:] == ["stop", "stop"]
    reached = await engine.whole(script(way, "3", ("abcdef", "a")), n=2, max_tokens=2)
    assert [choice["finish_reason"] for choice in reached["choices"]] == ["length", "stop"]


@pytest.mark.parametrize("way", ["grpc", "http"])
async def test_the_prompt_is_counted_once_and_the_answers_all(make: Make, codec: TokenCodec, way: str) -> None:
    engine = await make(way)
    engine.endpoint.state.kv_block_tokens = None
    prompt = len(codec.encode(script(way, "4"), add_special=True))
    answers = sum(len(ids) + 1 for ids in answer_ids(codec, script(way, "4")))
    events = await engine.events(script(way, "4"), n=len(TEXTS))
    whole = await engine.whole(script(way, "4"), n=len(TEXTS))
    for usage in (events.usage, whole["usage"]):
        assert usage is not None
        assert usage == {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"accepted_prediction_tokens": 35, "rejected_prediction_tokens": 15},
        }
    ensemble = await make("ensemble")
    texts = ("some text", "ü")
    prompt = len(script("ensemble", "3", texts).encode())
    for usage in (
        (await ensemble.events(script("ensemble", "3", texts), n=2)).usage,
        (await ensemble.whole(script("ensemble", "3", texts), n=2))["usage"],
    ):
        assert usage is not None
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 9 + 2)


@pytest.mark.parametrize("way", ["grpc", "http"])
@pytest.mark.parametrize("special", ["3", "4", ""])
async def test_log_probabilities_are_each_choices_own(make: Make, codec: TokenCodec, way: str, special: str) -> None:
    engine = await make(way)
    body = {"api": "chat.completions", "logprobs": True, "n": len(TEXTS)}
    parts = by_choice(await engine.events(script(way, special), **body), len(TEXTS))
    whole = await engine.whole(script(way, special), **body)
    for index, ids in enumerate(answer_ids(codec, script(way, special))):
        expected = [-(id_ % 8) / 4 - index for id_ in ids]
        streamed = [entry for part in parts[index] if part["logprobs"] for entry in part["logprobs"]["content"]]
        for entries in (streamed, whole["choices"][index]["logprobs"]["content"]):
            assert [entry["logprob"] for entry in entries] == expected
            assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == TEXTS[index]


@pytest.mark.parametrize("way", ["grpc", "http", "ensemble"])
async def test_as_many_choices_as_openai_allows_and_no_more(make: Make, way: str) -> None:
    engine = await make(way)
    whole = await engine.whole(script(way, "3", ("a", "bc")), n=128)
    assert [text_of(choice) for choice in whole["choices"]] == ["a", "bc"] * 64
    for n in (0, 129):
        with pytest.raises(ApiError, match="a whole number from 1 to 128") as caught:
            await engine.whole(script(way, "3"), n=n)
        assert (caught.value.status, caught.value.param) == (400, "n")


@pytest.mark.parametrize(("way", "stream"), [("grpc", True), ("grpc", False), ("http", True), ("ensemble", True)])
async def test_a_client_that_goes_cancels_all_choices_at_once(
    server: TritonModels, make: Make, way: str, stream: bool
) -> None:
    engine = await make(way)
    before = await server.cancelled("choices"), await server.stopped("choices")
    call = engine.call(script(way, "38" if stream else "7", ("x" * 200, "y" * 300)), stream=stream, n=2)
    opening = asyncio.create_task(call.open())
    await asyncio.sleep(0.3)
    call.close()
    call.close()
    await asyncio.gather(opening, return_exceptions=True)
    until = time.monotonic() + 2
    while (await server.stopped("choices")) == before[1]:
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.8)
    cancelled, stopped = await server.cancelled("choices"), await server.stopped("choices")
    assert stopped == before[1] + 1
    assert cancelled - before[0] <= 1


@pytest.mark.parametrize("way", ["grpc", "http"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_makes_one_answer_whatever_it_is_asked_is_found_out(
    make: Make, way: str, stream: bool
) -> None:
    engine = await make(way)
    assert "n" in ((await engine.probe()).capabilities or ())
    for _ in range(2):
        with pytest.raises(ApiError, match="one answer") as caught:
            await (engine.events if stream else engine.whole)(script(way, "6", ("a", "b")), n=2)
        assert (caught.value.status, caught.value.param) == (400, "n")
        assert "n" not in ((await engine.probe()).capabilities or ())
    assert (await engine.whole(script(way, "6", ("a", "b"))))["choices"][0]["text"] == "a"


@pytest.mark.parametrize("way", ["grpc", "http"])
async def test_a_number_that_no_choice_has_breaks_the_protocol(make: Make, way: str) -> None:
    with pytest.raises(UpstreamError, match="answer 2, of 2") as caught:
        await (await make(way)).whole(script(way, "9", ("a", "b")), n=2)
    assert caught.value.failure is Failure.PROTOCOL


async def test_a_model_that_loses_the_number_of_answers_or_can_give_one_only_has_no_choices(
    adapt: Adapt, make: Make, tokenizer_file: Path
) -> None:
    tokenizer = TokenizerSpec(file=str(tokenizer_file))
    assert "n" in ((await (await make("ensemble")).probe()).capabilities or ())
    for model in ("tensorrt_llm_bls", "raw_whole"):
        engine = await adapt(model, tokenizer=tokenizer)
        assert "n" not in ((await engine.probe()).capabilities or ())
        with pytest.raises(ApiError, match="one answer"):
            await engine.whole("x", n=2)
