"""The embedded Triton keeps the promises of TensorRT-LLM's `ensemble`, asked with plain gRPC stubs."""

import asyncio
import itertools
import json
import random
import struct
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from headrace.local.ensemble_signature import INPUTS, OUTPUTS
from headrace.local.llm import SLOTS, THREADS
from tests.engines import Triton

PARIS = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TYPES = {tensor.name: tensor.datatype for tensor in INPUTS} | {tensor.name: tensor.datatype for tensor in OUTPUTS}
FORMATS = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "BOOL": "?"}


@dataclass
class Answer:
    """All responses of one request, tensors decoded: name to list of values."""

    responses: list[dict[str, list[Any]]] = field(default_factory=list)
    final_flags: list[bool] = field(default_factory=list)

    @property
    def text(self) -> bytes:
        return b"".join(response["text_output"][0] for response in self.responses)

    def total(self, name: str) -> int:
        return sum(response[name][0] for response in self.responses if name in response)

    def last(self, name: str) -> Any:
        return self.responses[-1][name][0]


def encode(name: str, values: list[Any]) -> bytes:
    if TYPES[name] == "STRING":
        items = [value.encode() if isinstance(value, str) else value for value in values]
        return b"".join(struct.pack("<I", len(item)) + item for item in items)
    return struct.pack(f"<{len(values)}{FORMATS[TYPES[name]]}", *values)


def decode(name: str, raw: bytes) -> list[Any]:
    if TYPES[name] != "STRING":
        form = FORMATS[TYPES[name]]
        return list(struct.unpack(f"<{len(raw) // struct.calcsize(form)}{form}", raw))
    items = []
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        items.append(raw[4 : 4 + size])
        raw = raw[4 + size :]
    return items


def build(prompt: str | bytes, **inputs: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="ensemble")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    values = {"text_input": prompt, "max_tokens": 16, "temperature": 0.0, "stream": True} | inputs
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        datatype = "BYTES" if TYPES[name] == "STRING" else TYPES[name]
        request.inputs.add(name=name, datatype=datatype, shape=[1, len(items)])
        request.raw_input_contents.append(encode(name, items))
    return request


class Client:
    """One gRPC channel to one Triton."""

    def __init__(self, triton: Triton) -> None:
        self.triton = triton
        self.channel = grpc.aio.insecure_channel(triton.grpc)
        self.stub: Any = GRPCInferenceServiceStub(self.channel)

    def open(self, prompt: str | bytes, **inputs: Any) -> Any:
        request = build(prompt, **inputs)
        return self.stub.ModelStreamInfer(iter([request]), metadata=[("triton_grpc_error", "true")], timeout=60)

    async def ask(self, prompt: str | bytes, **inputs: Any) -> Answer:
        answer = Answer()
        async for message in self.open(prompt, **inputs):
            assert not message.error_message
            response = message.infer_response
            answer.final_flags.append(response.parameters["triton_final_response"].bool_param)
            if response.outputs:
                pairs = zip(response.outputs, response.raw_output_contents, strict=True)
                answer.responses.append({output.name: decode(output.name, raw) for output, raw in pairs})
        return answer

    async def metric(self, name: str, value: str) -> float:
        text = await asyncio.to_thread(fetch, self.triton.metrics)
        line = next(line for line in text.splitlines() if line.startswith(name + "{") and f'="{value}"' in line)
        return float(line.rsplit(" ", 1)[1])

    async def outcome(self, outcome: str) -> float:
        return await self.metric("headrace_embedded_requests_total", outcome)

    async def until(self, name: str, value: str, reached: Callable[[float], bool], within_s: float) -> None:
        """Wait until a metric has a value that satisfies `reached`; raises TimeoutError when it is not in time."""
        async with asyncio.timeout(within_s):
            while not reached(await self.metric(name, value)):  # noqa: ASYNC110 (another process changes it)
                await asyncio.sleep(0.02)


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as response:
        return str(response.read().decode())


WORDS = ["river", "gate", "turbine", "water", "stone", "power", "valley", "bridge"]
_fresh = itertools.count()


def fresh_prompt(tokens: int) -> str:
    """A prompt no engine has seen, of roughly that many tokens."""
    words = random.Random(next(_fresh)).choices(WORDS, k=tokens)
    return f"Story {next(_fresh)}-{time.time_ns()}: " + " ".join(words)


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def client(triton_a: Triton) -> AsyncIterator[Client]:
    client = Client(triton_a)
    yield client
    await client.channel.close()


REQUESTS, BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
OUTCOMES = "headrace_embedded_requests_total"


async def test_the_tensor_signature_is_the_ensembles(client: Client) -> None:
    metadata = await client.stub.ModelMetadata(pb.ModelMetadataRequest(name="ensemble"), timeout=5)
    config = (await client.stub.ModelConfig(pb.ModelConfigRequest(name="ensemble"), timeout=5)).config

    inputs = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs}
    assert inputs["text_input"] == ("BYTES", [-1, 1])
    assert inputs["max_tokens"] == ("INT32", [-1, 1])
    assert inputs["seed"] == ("UINT64", [-1, 1])
    assert inputs["stop_words"] == ("BYTES", [-1, -1])
    outputs = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in metadata.outputs}
    assert outputs["text_output"] == ("BYTES", [-1, -1])
    assert outputs["kv_cache_reused_blocks"] == ("INT32", [-1, 1])
    assert config.max_batch_size > 0
    assert config.model_transaction_policy.decoupled
    assert {tensor.name for tensor in config.input if not tensor.optional} == {"text_input", "max_tokens"}


async def test_a_stream_brings_deltas_of_the_right_answer_and_its_figures_at_the_end(client: Client) -> None:
    answer = await client.ask(PARIS, max_tokens=32, return_num_input_tokens=True, return_num_output_tokens=True)

    assert answer.text == b"The capital of France is Paris."
    assert len(answer.responses) > 3
    assert answer.responses[0]["text_output"] == [b"The"]
    assert [response["num_output_tokens"][0] for response in answer.responses[:3]] == [1, 1, 1]
    assert answer.total("num_output_tokens") == 8  # seven pieces of text and the end token
    assert answer.last("num_input_tokens") == 16
    assert answer.final_flags[-1] is True
    assert not any(answer.final_flags[:-1])


async def test_without_streaming_one_response_repeats_the_prompt_unless_told_otherwise(client: Client) -> None:
    repeated = await client.ask(PARIS, stream=False)
    alone = await client.ask(PARIS, stream=False, exclude_input_in_output=True, return_num_output_tokens=True)

    assert repeated.text == PARIS.encode() + b"The capital of France is Paris."
    assert alone.text == b"The capital of France is Paris."
    assert alone.total("num_output_tokens") == 8
    assert len(repeated.responses) == len(alone.responses) == 1


async def test_a_prompt_seen_before_is_served_from_the_prefix_cache(client: Client) -> None:
    prompt = fresh_prompt(900)
    ask = {"max_tokens": 4, "return_perf_metrics": True, "return_num_input_tokens": True}
    reused_before = await client.metric(BLOCKS, "reused")

    first = await client.ask(prompt, **ask)
    second = await client.ask(prompt, **ask)

    tokens = second.last("num_input_tokens")
    assert tokens >= 800
    assert first.last("kv_cache_reused_blocks") <= 1
    assert second.last("kv_cache_reused_blocks") * 32 >= 0.9 * tokens
    assert second.last("kv_cache_alloc_total_blocks") == -(-(tokens + 4) // 32)
    assert second.last("kv_cache_alloc_new_blocks") == second.last("kv_cache_alloc_total_blocks") - second.last(
        "kv_cache_reused_blocks"
    )
    times = [second.last(f"{name}_time_ns") for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    reused = first.last("kv_cache_reused_blocks") + second.last("kv_cache_reused_blocks")
    await client.until(BLOCKS, "reused", lambda value: value == reused_before + reused, within_s=2)


async def test_bytes_arrive_exactly_whatever_the_character(client: Client) -> None:
    guide = 'root ::= "  \\u00e9 😀👩‍👩‍👧 \\t漢字\\n end "'
    inputs = {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": guide, "max_tokens": 64}
    streamed = await client.ask(PARIS, return_num_output_tokens=True, **inputs)
    whole = await client.ask(PARIS, stream=False, exclude_input_in_output=True, **inputs)

    assert streamed.text == whole.text == "  \u00e9 😀👩‍👩‍👧 \t漢字\n end ".encode()
    for response in streamed.responses:
        response["text_output"][0].decode()  # no piece ends inside a character
    assert len(streamed.responses) < streamed.total("num_output_tokens")


async def test_stop_words_bad_words_and_min_tokens_are_honoured(client: Client) -> None:
    stopped = await client.ask(PARIS, stop_words=["", " Paris"])
    banned = await client.ask(PARIS, bad_words=[" Paris"])
    longer = await client.ask(PARIS, min_tokens=20, max_tokens=24, return_num_output_tokens=True)
    endless = await client.ask(PARIS, end_id=-1, max_tokens=24, return_num_output_tokens=True)

    assert stopped.text == b"The capital of France is"
    assert b" Paris" not in banned.text
    assert longer.text.startswith(b"The capital of France is Paris.")
    assert 20 <= longer.total("num_output_tokens") <= 24
    assert endless.total("num_output_tokens") == 24


async def test_sampling_follows_the_seed_and_is_greedy_without_top_k_and_top_p(client: Client) -> None:
    story = {"temperature": 1.5, "max_tokens": 24}
    seeded = [await client.ask("Once upon a time", **story, top_p=0.99, seed=seed) for seed in (7, 7, 8)]
    greedy = [await client.ask("Once upon a time", **story, seed=seed) for seed in (7, 8)]

    assert seeded[0].text == seeded[1].text != seeded[2].text
    assert greedy[0].text == greedy[1].text


async def test_log_probabilities_come_one_per_token(client: Client) -> None:
    answer = await client.ask(PARIS, max_tokens=4, return_log_probs=True, return_num_output_tokens=True)

    log_probs = [value for response in answer.responses for value in response.get("output_log_probs", [])]
    assert len(log_probs) == answer.total("num_output_tokens") == 4
    assert all(value <= 0 for value in log_probs)
    assert answer.last("cum_log_probs") == pytest.approx(sum(log_probs), abs=1e-4)


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"beam_width": 4}, "beam_width"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"bad_words": ["a word of many tokens"]}, "bad_words"),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}, "guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "root ::= ("}, "grammar"),
        ({"end_id": 5}, "end_id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"text_input": ""}, "text_input"),
        ({"text_input": b"\xff\xfe"}, "text_input"),
        ({"text_input": "word " * 5000}, "context size"),
    ],
)
async def test_what_cannot_be_honoured_is_an_error_that_names_it(
    client: Client, inputs: dict[str, Any], named: str
) -> None:
    failed_before = await client.outcome("failed")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.ask(PARIS, **inputs)

    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in str(error.value.details())
    await client.until(OUTCOMES, "failed", lambda value: value == failed_before + 1, within_s=2)


async def test_generate_stream_over_http_sends_the_same_deltas(client: Client) -> None:
    url = f"{client.triton.http}/v2/models/ensemble/generate_stream"
    body = {"text_input": PARIS, "max_tokens": 16, "temperature": 0, "stream": True}
    events = (await asyncio.to_thread(fetch, url, body)).split("\n\n")

    pieces = [json.loads(event.removeprefix("data: "))["text_output"] for event in events if event]
    assert "".join(pieces) == "The capital of France is Paris."


async def test_a_cancel_during_prefill_is_counted_before_two_seconds_of_work_are_done(client: Client) -> None:
    """The engine looks between batches of the prompt, and how long those take is the machine's matter."""
    cancelled_before = await client.outcome("cancelled")
    call = client.open(fresh_prompt(1500), max_tokens=16)
    reading = asyncio.ensure_future(call.read())
    await client.until(REQUESTS, "context", lambda value: value == 1, within_s=5)
    await asyncio.sleep(0.3)
    assert not reading.done()
    (model,) = psutil.Process(client.triton.pid).children()
    worked_before = sum(model.cpu_times()[:2])
    call.cancel()

    await client.until(OUTCOMES, "cancelled", lambda value: value == cancelled_before + 1, within_s=30)
    assert sum(model.cpu_times()[:2]) - worked_before < 2 * THREADS
    await client.until(REQUESTS, "active", lambda value: value == 0, within_s=2)
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_cancel_in_mid_stream_is_counted_within_two_seconds(client: Client) -> None:
    cancelled_before = await client.outcome("cancelled")
    call = client.open("Count:", max_tokens=2000, end_id=-1)
    await call.read()
    call.cancel()

    await client.until(OUTCOMES, "cancelled", lambda value: value == cancelled_before + 1, within_s=2)
    await client.until(REQUESTS, "active", lambda value: value == 0, within_s=2)


async def test_figures_of_load_are_true_and_a_waiting_request_can_be_cancelled(client: Client) -> None:
    cancelled_before = await client.outcome("cancelled")
    running = [client.open("Count:", max_tokens=2000, end_id=-1) for _ in range(SLOTS)]
    for call in running:
        await call.read()
    waiting = client.open("Count:", max_tokens=4)
    reading = asyncio.ensure_future(waiting.read())
    await client.until(REQUESTS, "active", lambda value: value == SLOTS + 1, within_s=2)
    await client.until(REQUESTS, "waiting", lambda value: value == 1, within_s=2)
    assert await client.metric(REQUESTS, "scheduled") == await client.metric(REQUESTS, "max") == SLOTS
    used, free, most = [await client.metric(BLOCKS, kind) for kind in ("used", "free", "max")]
    assert used >= SLOTS
    assert abs(used + free - most) <= SLOTS  # read one after the other while tokens come
    assert await client.metric(BLOCKS, "fraction") > 0
    assert await client.metric(BLOCKS, "tokens_per") == 32

    waiting.cancel()
    await client.until(OUTCOMES, "cancelled", lambda value: value == cancelled_before + 1, within_s=2)
    for call in running:
        call.cancel()
    await client.until(OUTCOMES, "cancelled", lambda value: value == cancelled_before + 1 + SLOTS, within_s=2)
    await client.until(REQUESTS, "active", lambda value: value == 0, within_s=2)
    await client.until(BLOCKS, "used", lambda value: value == 0, within_s=2)
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_killed_triton_comes_back_on_its_ports(triton_b: Triton) -> None:
    await triton_b.kill()
    await triton_b.until_ready()
    restarted = Client(triton_b)
    assert (await restarted.ask(PARIS)).text == b"The capital of France is Paris."
    await restarted.channel.close()
