"""Which tensor signature a Triton model has, found out from what the server says about it.

Model names say nothing (`tensorrt_llm` is the raw C++ engine in one container and the LLM-API model in the next) and
tensor names change between releases, so the only arbiter is ModelMetadata and ModelConfig. A signature is recognised by
one telling input; then every value that headrace can send or read, its **field**, is bound to the tensor the model
declares for it, the newest name first. What is not bound is not sent, and what cannot be sent is not a capability.

Two signatures are served:

- `ensemble`: TensorRT-LLM's `ensemble` and `tensorrt_llm_bls` (inputs `text_input` and `max_tokens`). A streamed
  message holds the new text only, unless the model's parameter `accumulate_tokens` says that it holds all text so far.
- `llmapi`: the Python model over TensorRT-LLM's LLM API (input `sampling_param_max_tokens`). A message holds all text
  so far. It counts no tokens, so there is no usage.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["ensemble", "llmapi"]

TEXT, PROMPT_TOKENS, COMPLETION_TOKENS, REUSED_BLOCKS, FINISH_REASON = (
    "text", "prompt_tokens", "completion_tokens", "reused_blocks", "finish_reason",
)  # fmt: skip
"""Fields of an answer."""

# Input fields are named as the OpenAI parameters they carry where there is one, else for what they do.
_INPUTS: dict[Kind, dict[str, tuple[str, ...]]] = {
    "ensemble": {
        "prompt": ("text_input",),
        "max_tokens": ("max_tokens",),
        "stream": ("stream",),
        "exclude_prompt": ("exclude_input_in_output",),
        "stop": ("stop_words",),
        "temperature": ("temperature",),
        "top_p": ("top_p",),
        "top_k": ("top_k",),
        "seed": ("seed", "random_seed"),
        "min_tokens": ("min_tokens", "min_length"),
        "presence_penalty": ("presence_penalty",),
        "frequency_penalty": ("frequency_penalty",),
        "repetition_penalty": ("repetition_penalty",),
        f"return {PROMPT_TOKENS}": ("return_num_input_tokens",),
        f"return {COMPLETION_TOKENS}": ("return_num_output_tokens",),
        f"return {REUSED_BLOCKS}": ("return_perf_metrics", "return_kv_cache_reuse_stats"),
    },
    "llmapi": {
        "prompt": ("text_input",),
        "max_tokens": ("sampling_param_max_tokens",),
        "stream": ("streaming",),
        "exclude_prompt": ("sampling_param_exclude_input_from_output", "exclude_input_from_output"),
        "stop": ("sampling_param_stop",),
        "temperature": ("sampling_param_temperature",),
        "top_p": ("sampling_param_top_p",),
        "top_k": ("sampling_param_top_k",),
        "seed": ("sampling_param_seed",),
        "presence_penalty": ("sampling_param_presence_penalty",),
        "frequency_penalty": ("sampling_param_frequency_penalty",),
        f"return {FINISH_REASON}": ("return_finish_reason", "sampling_param_return_finish_reason"),
    },
}
_OUTPUTS: dict[Kind, dict[str, str]] = {
    "ensemble": {
        TEXT: "text_output",
        PROMPT_TOKENS: "num_input_tokens",
        COMPLETION_TOKENS: "num_output_tokens",
        REUSED_BLOCKS: "kv_cache_reused_blocks",
    },
    "llmapi": {TEXT: "text_output", FINISH_REASON: "finish_reason"},
}
_OPTIONAL_PARAMETERS = frozenset(
    ("top_k", "seed", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty")
)
"""Fields that are OpenAI-style parameters and that not every engine has."""
_ALWAYS_SENT = frozenset(("prompt", "max_tokens", "stream", "exclude_prompt"))


class ContractError(Exception):
    """The model has no signature that can be served; the text says what was found."""


@dataclass(slots=True, frozen=True)
class Tensor:
    """A declared input: its name and Triton datatype (`BYTES`, `INT32`, ...)."""

    name: str
    datatype: str


@dataclass(slots=True, frozen=True)
class Contract:
    """How to talk to one model."""

    kind: Kind
    model: str
    batched: bool
    """Tensors carry a leading batch dimension (of one)."""
    decoupled: bool
    """The model may answer one request with many messages."""
    cumulative: bool
    """Each message repeats all the text so far."""
    inputs: Mapping[str, Tensor]
    """The tensor bound to each field that can be sent."""
    outputs: Mapping[str, str]
    """The name of the tensor bound to each field that can be asked for."""

    @property
    def capabilities(self) -> frozenset[str]:
        """The request parameters this contract can honour beyond those every engine can."""
        return frozenset(_OPTIONAL_PARAMETERS & self.inputs.keys())

    def __str__(self) -> str:
        streaming = "one answer" if not self.decoupled else "cumulative text" if self.cumulative else "text deltas"
        return f"{self.model}: {self.kind} contract, {streaming}"


def detect(metadata: Any, config: Any) -> Contract:
    """The contract of a model from its `ModelMetadataResponse` and `ModelConfig` (protobuf messages).

    Raises ContractError, with a sentence for people, if it is none that is served here.
    """
    declared = {tensor.name: tensor.datatype for tensor in metadata.inputs}
    returned = {tensor.name: tensor.datatype for tensor in metadata.outputs}
    kind = _kind(metadata.name, declared)
    inputs = {
        field: Tensor(name, declared[name])
        for field, names in _INPUTS[kind].items()
        if (name := next((name for name in names if name in declared), None)) is not None
    }
    outputs = {field: name for field, name in _OUTPUTS[kind].items() if name in returned}
    if TEXT not in outputs:
        raise ContractError(f"Model {metadata.name!r} has no output text_output; it returns {_list(returned)}.")
    always = {inputs[field].name for field in _ALWAYS_SENT if field in inputs}
    required = {tensor.name for tensor in config.input if not tensor.optional}
    if required - always:
        raise ContractError(
            f"Model {metadata.name!r} requires {_list(required - always)}, which not every request has;"
            " mark such inputs optional in its config.pbtxt."
        )
    accumulates = (
        config.parameters["accumulate_tokens"].string_value if "accumulate_tokens" in config.parameters else ""
    )
    return Contract(
        kind=kind,
        model=metadata.name,
        batched=config.max_batch_size > 0,
        decoupled=config.model_transaction_policy.decoupled,
        cumulative=kind == "llmapi" or accumulates.strip().lower() in ("true", "1"),
        inputs=inputs,
        outputs=outputs,
    )


def _kind(model: str, declared: Mapping[str, str]) -> Kind:
    if "sampling_param_max_tokens" in declared and "text_input" in declared:
        return "llmapi"
    if "text_input" in declared and "max_tokens" in declared:
        return "ensemble"
    if "input_ids" in declared:
        raise ContractError(
            f"Model {model!r} takes token ids (input_ids), a contract that is not served;"
            " name the ensemble or tensorrt_llm_bls model that goes with it."
        )
    raise ContractError(
        f"Model {model!r} takes {_list(declared)}: neither TensorRT-LLM's ensemble (text_input, max_tokens)"
        " nor its LLM-API model (text_input, sampling_param_max_tokens), so it cannot be served."
    )


def _list(names: Iterable[str]) -> str:
    """Names for a sentence, the first few of them."""
    ordered = sorted(names)
    return ", ".join(ordered[:8]) + (" and more" if len(ordered) > 8 else "") if ordered else "nothing"
