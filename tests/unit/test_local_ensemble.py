"""The meaning of the embedded ensemble's inputs, and the scheduler's promises, without an engine."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.local.ensemble_request import UnsupportedInputError, parse_request
from headrace.local.ensemble_scheduler import Job, Scheduler, Usage

REQUIRED: dict[str, Any] = {"text_input": "hi", "max_tokens": 4}
DEADLINE_S = 10


def one_token(word: str) -> list[int]:
    return [len(word)]


def sampling(**inputs: Any) -> dict[str, Any]:
    return parse_request(REQUIRED | inputs, one_token).sampling


@pytest.mark.parametrize(
    ("inputs", "temperature"),
    [
        ({}, 0),
        ({"temperature": 0.7}, 0),
        ({"temperature": 0.7, "top_p": 0.9}, 0.7),
        ({"temperature": 0.7, "top_k": 20}, 0.7),
        ({"temperature": 0.7, "top_k": 1, "top_p": 0.9}, 0),
        ({"temperature": 0.0, "top_p": 0.9}, 0),
    ],
)
def test_decoding_is_greedy_unless_top_k_or_top_p_say_otherwise(inputs: dict[str, Any], temperature: float) -> None:
    assert sampling(**inputs)["temperature"] == temperature


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_every_seed_becomes_one_that_llama_cpp_does_not_take_for_random(seed: int) -> None:
    assert 0 <= sampling(seed=seed)["seed"] < 2**32 - 1


def test_words_become_stops_and_biases_and_empty_ones_nothing() -> None:
    chosen = sampling(
        stop_words=["", "end"], bad_words=["", "abc"], embedding_bias_words=["xy"], embedding_bias_weights=[2.5]
    )
    assert chosen["stop"] == ["end"]
    assert chosen["logit_bias"] == [[3, False], [2, 2.5]]


@pytest.mark.parametrize(
    "inputs",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"end_id": 7},
        {"decoder_text_input": "x"},
        {"guided_decoding_guide": "{}"},
        {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"},
        {"embedding_bias_words": ["a"]},
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(inputs: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedInputError, match=next(reversed(inputs))):
        parse_request(REQUIRED | inputs, one_token)


def test_a_word_of_several_tokens_cannot_be_banned() -> None:
    with pytest.raises(UnsupportedInputError, match="bad_words: 'ab' is 2 tokens"):
        parse_request(REQUIRED | {"bad_words": ["ab"]}, lambda word: [1] * len(word))


def test_blocks_count_whole_ones_when_reused_and_started_ones_when_held() -> None:
    usage = Usage(100, 95, 4, arrival_ns=0, scheduled_ns=0, first_token_ns=0, last_token_ns=0)
    assert usage.reused_blocks == 2
    assert usage.total_blocks == 4


class RecordingClient:
    """A client that remembers how its request ended; stands in for Triton's response sender."""

    def __init__(self) -> None:
        self.gone = False
        self.ended = threading.Event()
        self.how = ""

    def is_cancelled(self) -> bool:
        return self.gone

    def send(self, text: str, new_tokens: int, log_probs: list[float]) -> None: ...

    def finish(self, text: str, new_tokens: int, log_probs: list[float], usage: Usage) -> None: ...

    def fail(self, message: str, *, invalid: bool = False) -> None:
        self._end(f"failed: {message}")

    def cancelled(self) -> None:
        self._end("cancelled")

    def _end(self, how: str) -> None:
        self.how = how
        self.ended.set()


def job() -> tuple[Job, RecordingClient]:
    client = RecordingClient()
    return Job(parse_request(REQUIRED, one_token), client), client


def test_one_prefill_at_a_time_and_the_next_starts_at_the_first_token() -> None:
    entered, first_token, end = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def run(_: Job, prefilled: Any) -> tuple[str, int]:
        entered.release()
        assert first_token.acquire(timeout=DEADLINE_S)
        prefilled()
        assert end.wait(DEADLINE_S)
        return "finished", 1

    scheduler = Scheduler(run, slots=2)
    for _ in range(3):
        scheduler.submit(job()[0])
    assert entered.acquire(timeout=DEADLINE_S)
    load = scheduler.load()
    assert (load.waiting, load.scheduled, load.context) == (2, 1, 1)

    first_token.release()
    assert entered.acquire(timeout=DEADLINE_S)
    load = scheduler.load()
    assert (load.waiting, load.scheduled, load.context) == (1, 2, 1)

    first_token.release(2)
    end.set()
    assert entered.acquire(timeout=DEADLINE_S)
    assert scheduler.drained(DEADLINE_S)
    load = scheduler.load()
    assert (load.waiting, load.scheduled, load.context, load.reused_blocks) == (0, 0, 0, 3)
    assert load.outcomes == {"finished": 3, "cancelled": 0, "failed": 0}


def test_a_waiting_request_whose_client_has_gone_ends_as_cancelled() -> None:
    started, end = threading.Event(), threading.Event()

    def run(_: Job, __: Any) -> tuple[str, int]:
        started.set()
        assert end.wait(DEADLINE_S)
        return "finished", 0

    scheduler = Scheduler(run, slots=1)
    scheduler.submit(job()[0])
    assert started.wait(DEADLINE_S)
    waiting, client = job()
    scheduler.submit(waiting)
    scheduler.sweep()
    assert not client.ended.is_set()
    client.gone = True
    scheduler.sweep()
    assert client.how == "cancelled"
    assert scheduler.load().waiting == 0
    end.set()


class BrokenClient(RecordingClient):
    """A client that cannot even be told of a failure."""

    def fail(self, message: str, *, invalid: bool = False) -> None:
        raise ConnectionError("gone")


@pytest.mark.parametrize("client", [RecordingClient(), BrokenClient()])
def test_a_crash_of_one_request_counts_as_failed_and_frees_its_slot(client: RecordingClient) -> None:
    def run(current: Job, _: Any) -> tuple[str, int]:
        if current.client is client:
            raise RuntimeError("no")
        return "finished", 0

    scheduler = Scheduler(run, slots=1)
    scheduler.submit(Job(parse_request(REQUIRED, one_token), client))
    scheduler.submit(job()[0])
    assert scheduler.drained(DEADLINE_S)
    assert client.how == ("" if isinstance(client, BrokenClient) else "failed: the engine failed: no")
    assert scheduler.load().outcomes == {"finished": 1, "cancelled": 0, "failed": 1}
