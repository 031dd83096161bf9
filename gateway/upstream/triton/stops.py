"""Stop requests: TensorRT-LLM's own way to end a running request.

Cancelling an RPC sets a flag that the backend polls, and an ensemble hands it to its *next* step only: measured on
Triton 2.51, the step that is running is never told and goes on generating for a client that has left. The engine model
itself (`tensorrt_llm`) also takes a request with the `stop` input set and the id of a running one, which it then ends;
ids pass from an ensemble to its steps unchanged. So a cancelled request of these contracts is told to stop both ways.
An id the engine does not know, because the request has just ended or because `tensorrt_llm_bls` gave its own, does no
harm. The LLM-API model has a `stop` as well, but there the first request would never be answered, and it polls for
cancelled RPCs anyway: it gets none.

**Clients' own ids.** KServe requests keep the id their client gave them, and a stop request ends whichever request had
that id last. So only a request with an id that is nobody else's, a UUID, is told to stop; one called `1` might be a
stranger's.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from gateway.upstream.triton.contract import Contract, Tensor
from gateway.upstream.triton.tensors import add_input

_UUID = re.compile(r"[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.IGNORECASE)
_STEPS = 8
"""Steps of an ensemble that are looked at."""


@dataclass(slots=True, frozen=True)
class StopTarget:
    """A model that takes stop requests."""

    model: str
    batched: bool
    decoupled: bool
    streaming: bool
    """It declares `streaming`, which then is never left out."""


def is_unique(request_id: str) -> bool:
    """Whether an id that a client has chosen can be taken for that of one request only."""
    return _UUID.fullmatch(request_id) is not None


def engine_models(contract: Contract, config: Any) -> Iterator[str]:
    """The models that may be the engine behind `contract`, from its ModelConfig."""
    if contract.kind == "raw":
        yield contract.model
    elif contract.kind == "ensemble":
        for step in config.ensemble_scheduling.step[:_STEPS]:
            yield step.model_name
        if "tensorrt_llm_model_name" in config.parameters:
            yield config.parameters["tensorrt_llm_model_name"].string_value


def stop_target(metadata: Any, config: Any) -> StopTarget | None:
    """The model as one that takes stop requests, None if it does not, from its metadata and ModelConfig."""
    declared = {tensor.name for tensor in metadata.inputs}
    if not {"input_ids", "input_lengths", "request_output_len", "stop"} <= declared:
        return None
    decoupled = config.model_transaction_policy.decoupled
    return StopTarget(metadata.name, config.max_batch_size > 0, decoupled, "streaming" in declared)


def stop_request(target: StopTarget, request_id: str) -> Any:
    """The ModelInferRequest that ends the running request `request_id`."""
    request = service_pb2.ModelInferRequest(model_name=target.model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    # Besides `stop` they only have to be there.
    values = [("input_ids", "INT32", 0), ("input_lengths", "INT32", 0), ("request_output_len", "INT32", 0)]
    flags = ["stop", *(["streaming"] if target.streaming else [])]
    for name, datatype, value in (*values, *((flag, "BOOL", True) for flag in flags)):
        add_input(request, Tensor(name, datatype), value, batched=target.batched)
    for output in ("output_ids", "sequence_length"):  # the engine refuses requests that do not ask for these
        request.outputs.add(name=output)
    return request
