"""A contract is what the model declares, never what its name suggests."""

from collections.abc import Iterable
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from gateway.upstream.triton.contract import Contract, ContractError, Tensor, detect
from gateway.upstream.triton.parameters import Parameters
from gateway.upstream.triton.tensors import build_request, unpack_bytes, unpack_integer

ENSEMBLE = {"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL", "seed": "UINT64", "temperature": "FP32"}
RAW = {"input_ids": "INT32", "input_lengths": "INT32", "request_output_len": "INT32"}
LLMAPI = {"text_input": "BYTES", "sampling_param_max_tokens": "INT32", "streaming": "BOOL"}


def model(
    inputs: dict[str, str], outputs: Iterable[str] = ("text_output",), *, required: tuple[str, ...] = (), **config: Any
) -> Contract:
    metadata = service_pb2.ModelMetadataResponse(name="m")
    for name, datatype in inputs.items():
        metadata.inputs.add(name=name, datatype=datatype)
    for name in outputs:
        metadata.outputs.add(name=name, datatype="BYTES")
    settings = model_config_pb2.ModelConfig(**config)
    for name in inputs:
        settings.input.add(name=name, optional=name not in required)
    return detect(metadata, settings)


def test_an_ensemble_is_recognised_by_its_inputs() -> None:
    contract = model(ENSEMBLE, ("text_output", "num_output_tokens"), max_batch_size=4)
    assert (contract.kind, contract.batched, contract.decoupled, contract.cumulative) == (
        "ensemble",
        True,
        False,
        False,
    )
    assert contract.inputs["seed"] == Tensor("seed", "UINT64")
    assert contract.outputs == {"text": "text_output", "completion_tokens": "num_output_tokens"}
    assert contract.capabilities == {"seed"}


def test_a_model_that_accumulates_its_text_is_cumulative() -> None:
    accumulate = {"accumulate_tokens": model_config_pb2.ModelParameter(string_value="True")}
    assert model(ENSEMBLE, parameters=accumulate).cumulative
    off = {"accumulate_tokens": model_config_pb2.ModelParameter(string_value="${accumulate_tokens}")}
    assert not model(ENSEMBLE, parameters=off).cumulative


def test_several_answers_need_a_model_that_may_send_them_and_a_way_that_loses_none() -> None:
    decoupled = model_config_pb2.ModelTransactionPolicy(decoupled=True)
    steps = model_config_pb2.ModelEnsembling(step=[model_config_pb2.ModelEnsembling.Step(model_name="e")])

    def can(inputs: dict[str, str], outputs: list[str], **config: Any) -> bool:
        return "n" in model(inputs | {"num_return_sequences": "INT32"}, outputs, **config).capabilities

    tokens, text = ["output_ids", "sequence_length", "sequence_index"], ["text_output", "sequence_index"]
    assert can(RAW, tokens, model_transaction_policy=decoupled)
    assert not can(RAW, tokens)
    assert not can(RAW, tokens[:2], model_transaction_policy=decoupled)
    assert can(ENSEMBLE, text, model_transaction_policy=decoupled, ensemble_scheduling=steps)
    assert not can(ENSEMBLE, text, model_transaction_policy=decoupled)  # tensorrt_llm_bls
    assert not can(LLMAPI, text, model_transaction_policy=decoupled)
    assert "n" not in model(RAW, tokens, model_transaction_policy=decoupled).capabilities


def test_the_llm_api_model_is_recognised_by_its_inputs() -> None:
    policy = model_config_pb2.ModelTransactionPolicy(decoupled=True)
    contract = model(LLMAPI, model_transaction_policy=policy)
    assert (contract.kind, contract.batched, contract.decoupled, contract.cumulative) == ("llmapi", False, True, True)


@pytest.mark.parametrize(
    ("inputs", "outputs", "required", "found"),
    [
        ({"input_ids": "INT32", "max_tokens": "INT32"}, ["output_ids"], (), "takes input_ids, max_tokens"),
        (RAW, ["output_ids"], (), "no output sequence_length; it returns output_ids"),
        ({"INPUT0": "FP32"}, ["OUTPUT0"], (), "takes INPUT0"),
        ({}, [], (), "takes nothing"),
        (ENSEMBLE, ["answer"], (), "no output text_output; it returns answer"),
        (ENSEMBLE | {"image": "BYTES"}, ["text_output"], ("text_input", "image"), "requires image"),
        ({f"in{index}": "FP32" for index in range(100)}, [], (), "and more"),
    ],
)
def test_any_other_model_is_refused_with_what_was_found(
    inputs: dict[str, str], outputs: list[str], required: tuple[str, ...], found: str
) -> None:
    with pytest.raises(ContractError, match=found):
        model(inputs, outputs, required=required)


def test_a_request_holds_declared_inputs_only_in_their_declared_types() -> None:
    inputs = {"text_input": "BYTES", "max_tokens": "INT64", "seed": "UINT64", "stop_words": "BYTES", "top_p": "FP16"}
    contract = model(inputs, max_batch_size=1)
    sampling: dict[str, float | int | str] = {"seed": -1, "top_p": 0.5, "temperature": 0.7, "top_k": 3}
    request = build_request(
        contract, "hé", Parameters(5, ("a", "bc"), sampling), request_id="id", stream=True, usage=True
    )
    tensors = {
        tensor.name: (tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }
    assert tensors == {
        "text_input": ("BYTES", [1, 1], b"\x03\0\0\0h\xc3\xa9"),
        "max_tokens": ("INT64", [1, 1], b"\x05" + b"\0" * 7),
        "seed": ("UINT64", [1, 1], b"\xff" * 8),
        "top_p": ("FP16", [1, 1], b"\0\x38"),
        "stop_words": ("BYTES", [1, 2], b"\x01\0\0\0a\x02\0\0\0bc"),
    }
    assert (request.id, request.model_name) == ("id", "m")
    assert [output.name for output in request.outputs] == ["text_output"]
    assert request.parameters["triton_enable_empty_final_response"].bool_param


def test_without_a_batch_dimension_tensors_are_flat() -> None:
    request = build_request(model(LLMAPI), "x", Parameters(5, (), {}), request_id="id", stream=False, usage=False)
    assert [list(tensor.shape) for tensor in request.inputs] == [[1], [1], [1]]
    assert request.raw_input_contents[2] == b"\0"


def test_numbers_are_read_even_where_they_are_sent_as_text() -> None:
    assert unpack_integer("INT32", b"\x07\0\0\0\x08\0\0\0") == 7
    assert unpack_integer("BYTES", b"\x02\0\0\x0042") == 42
    assert unpack_integer("BYTES", b"\x03\0\0\0N/A") is None
    assert unpack_integer("INT32", b"") is None
    assert unpack_bytes(b"") == b""
    with pytest.raises(ValueError, match="longer"):
        unpack_bytes(b"\x09\0\0\0abc")
