"""Engines' own words, by whose fault they tell of."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.base import Failure, UpstreamError
from gateway.upstream.refusals import TOO_LONG, blamed, is_clients_fault

DOES_NOT_FIT = [
    "This model's maximum context length is 4096 tokens. However, you requested 4472 tokens (376 in the messages, ...",
    "The decoder prompt (length 5951) is longer than the maximum model length of 4096. Make sure that `max_model_len`",
    "The prompt (total length 25938) is too long to fit into the model (context length 4096).",
    "Input prompt (2715 tokens) is too long and exceeds limit of 2560",
    "max_tokens must be at least 1, got -1241.",
    "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
    "Requested token count exceeds the model's maximum context length of 64000 tokens. You requested a total of 71897.",
    "Prompt length (5056) exceeds maximum sequence length (2048)",
    "Encountered an error when fetching new request: Prompt length (200) exceeds maximum input length (1). Set log",
    "The sum of prompt length (72417.0), query length (0) should not exceed max_num_tokens (69632)",
    "request (4390 tokens) exceeds the available context size (4096 tokens), try increasing it",
    "the request exceeds the available context size. try increasing the context size or enable context shift",
    "Context size has been exceeded.",
    "input (9000 tokens) is too large to process. increase the physical batch size (current batch size: 512)",
]
OWN = [
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "Internal server error",
    "[TensorRT-LLM][ERROR] Assertion failed: Executor worker died",
    "",
]


@pytest.mark.parametrize("message", DOES_NOT_FIT)
@pytest.mark.parametrize(
    "shape",
    [
        lambda message: {"error": {"message": message, "type": "Internal Server Error", "param": None, "code": 500}},
        lambda message: {"object": "error", "message": message, "type": "InternalServerError", "code": 500},
        lambda message: {"error": message},
        lambda message: {"detail": message},
    ],
)
def test_a_request_that_does_not_fit_is_the_clients_fault_in_every_engines_words(
    message: str, shape: Callable[[str], object]
) -> None:
    body = json.dumps(shape(message)).encode()
    assert is_clients_fault(body)
    assert is_clients_fault(body[:-1])  # cut off
    assert is_clients_fault(message.encode())


@pytest.mark.parametrize("message", OWN)
def test_an_engines_own_trouble_is_its_own(message: str) -> None:
    for body in ({"error": {"message": message, "type": "InternalServerError", "code": 500}}, {"error": message}):
        assert not is_clients_fault(json.dumps(body).encode())
    assert not is_clients_fault(message.encode())


@pytest.mark.parametrize(
    "error",
    [
        {"type": "BadRequestError", "message": "top_p must be in (0, 1]", "code": 500},
        {"type": "exceed_context_size_error", "message": "no", "code": 500},
        {"type": "server_error", "message": "no", "code": 422},
        {"type": "server_error", "message": "no", "code": "context_length_exceeded"},
    ],
)
def test_an_error_that_names_the_client_by_type_or_code_is_believed(error: dict[str, object]) -> None:
    assert is_clients_fault(json.dumps({"error": error}).encode())
    assert is_clients_fault(json.dumps(error).encode())


@pytest.mark.parametrize("code", [408, 429, 500, 503, None, "internal_error", True, [400]])
def test_no_other_code_excuses_the_engine(code: object) -> None:
    assert not is_clients_fault(json.dumps({"error": {"message": "no", "code": code}}).encode())


@given(st.binary(max_size=200) | st.text(max_size=60).map(lambda text: json.dumps({"error": text}).encode()))
def test_no_bytes_make_the_judge_fail(body: bytes) -> None:
    assert is_clients_fault(body) in (True, False)


def test_a_refusal_without_a_status_of_its_own_becomes_a_clients_error() -> None:
    error = blamed(UpstreamError(Failure.ENGINE, DOES_NOT_FIT[8], 500, "engine_error"))
    assert (error.status, error.code) == (400, TOO_LONG)
    own = UpstreamError(Failure.ENGINE, "CUDA error", 500, "engine_error")
    assert blamed(own) is own
