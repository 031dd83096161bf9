"""Which tensor signature a Triton model has, found out from what the server says about it.

Model names say nothing (`tensorrt_llm` is the raw C++ engine in one container and the LLM-API model in the next) and
tensor names change between releases, so the only arbiter is ModelMetadata and ModelConfig. A signature is recognised by
one telling input; then every value that headrace can send or read, its **field**, is bound to the tensor the model
declares for it, the newest name first. What is not bound is not sent, and what cannot be sent is not a capability.

Three signatures are served:

- `ensemble`: TensorRT-LLM's `ensemble` and `tensorrt_llm_bls` (inputs `text_input` and `max_tokens`). A streamed
  message holds the new text only, unless the model's parameter `accumulate_tokens` says that it holds all text so far.
  The two are told apart by their config: an `ensemble` is made of steps.
- `llmapi`: the Python model over TensorRT-LLM's LLM API (input `sampling_param_max_tokens`). A message holds all text
  so far. It counts no tokens, so there is no usage unless the pool names a tokenizer, with which the gateway counts.
- `raw`: TensorRT-LLM's engine itself, `tensorrt_llm` (inputs `input_ids`, `input_lengths`, `request_output_len`). Token
  ids go in and come out, the new ones in each message, so the gateway needs the model's tokenizer (`tokens`).

**Several answers** to one request (`n`) are the engine's to make: asked for `num_return_sequences`, it sends messages
of each sequence, between one another, and says in `sequence_index` of which. So it must be allowed to send more than
one message, and there must be nothing between it and the gateway that loses the one tensor or the other, as
`tensorrt_llm_bls` does: it declares both, but hands only a list of its own on to the engine, and when one sequence
meets a stop string it ends them all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["ensemble", "llmapi", "raw"]

TEXT, TOKENS, TOKEN_COUNT, LOG_PROBS, FINISH_REASON = "text", "tokens", "token_count", "log_probs", "finish_reason"
PROMPT_TOKENS, COMPLETION_TOKENS, REUSED_BLOCKS = "prompt_tokens", "completion_tokens", "reused_blocks"
DRAFT_TOKENS, ACCEPTED_TOKENS, SEQUENCE = "draft_tokens", "accepted_tokens", "sequence"
"""Fields of an answer. `TOKEN_COUNT`: how many of a message's `TOKENS` are such, and not padding. `SEQUENCE`: of which
of several answers the message is a part."""

RETENTION = (
    "token_range_starts", "token_range_ends", "token_range_priorities", "token_range_durations_ms",
    "decode_priority", "decode_duration_ms",
)  # fmt: skip
"""How long which part of the KV cache is to be kept: fields, and with `retention_` in front the tensors' names."""
_COMMON = {
    "temperature": ("temperature",),
    "top_p": ("top_p", "runtime_top_p"),
    "top_k": ("top_k", "runtime_top_k"),
    "seed": ("seed", "random_seed"),
    "min_tokens": ("min_tokens", "min_length"),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "repetition_penalty": ("repetition_penalty",),
    "n": ("num_return_sequences",),
    "guide_type": ("guided_decoding_guide_type",),
    "guide": ("guided_decoding_guide",),
    f"return {PROMPT_TOKENS}": ("return_num_input_tokens",),
    f"return {COMPLETION_TOKENS}": ("return_num_output_tokens",),
    f"return {REUSED_BLOCKS}": ("return_perf_metrics", "return_kv_cache_reuse_stats"),
    f"return {DRAFT_TOKENS}": ("return_perf_metrics",),
}
"""What ensemble and engine have in common."""
# Input fields are named as the OpenAI parameters they carry where there is one, else for what they do.
_INPUTS: dict[Kind, dict[str, tuple[str, ...]]] = {
    "ensemble": {
        "prompt": ("text_input",),
        "max_tokens": ("max_tokens",),
        "stream": ("stream",),
        "exclude_prompt": ("exclude_input_in_output",),
        "stop": ("stop_words",),
        **_COMMON,
    },
    "raw": {
        "prompt": ("input_ids",),
        "prompt_length": ("input_lengths",),
        "max_tokens": ("request_output_len",),
        "stream": ("streaming",),
        "exclude_prompt": ("exclude_input_in_output",),
        "stop": ("stop_words_list",),
        "end": ("end_id",),
        "pad": ("pad_id",),
        f"return {LOG_PROBS}": ("return_log_probs",),
        **{f"retention_{field}": (f"retention_{field}",) for field in RETENTION},
        **_COMMON,
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
        f"return {REUSED_BLOCKS}": ("sampling_param_return_perf_metrics", "return_perf_metrics"),
        f"return {FINISH_REASON}": ("return_finish_reason", "sampling_param_return_finish_reason"),
    },
}
_FIGURES = {
    REUSED_BLOCKS: ("kv_cache_reused_blocks", "kv_cache_reused_block"),
    DRAFT_TOKENS: ("total_draft_tokens",),
    ACCEPTED_TOKENS: ("total_accepted_draft_tokens",),
}
_OUTPUTS: dict[Kind, dict[str, tuple[str, ...]]] = {
    "ensemble": {
        TEXT: ("text_output",),
        PROMPT_TOKENS: ("num_input_tokens",),
        COMPLETION_TOKENS: ("num_output_tokens",),
        SEQUENCE: ("sequence_index",),
        **_FIGURES,
    },
    "llmapi": {TEXT: ("text_output",), FINISH_REASON: ("finish_reason",), REUSED_BLOCKS: _FIGURES[REUSED_BLOCKS]},
    "raw": {
        TOKENS: ("output_ids",),
        TOKEN_COUNT: ("sequence_length",),
        LOG_PROBS: ("output_log_probs",),
        SEQUENCE: ("sequence_index",),
        **_FIGURES,
    },
}
_OPTIONAL_PARAMETERS = frozenset(
    ("top_k", "seed", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty")
)
"""Fields that are OpenAI-style parameters and that not every engine has."""
_ALWAYS_SENT = frozenset(("prompt", "prompt_length", "max_tokens", "stream", "exclude_prompt"))
_INDISPENSABLE: dict[Kind, tuple[str, ...]] = {"ensemble": (TEXT,), "llmapi": (TEXT,), "raw": (TOKENS, TOKEN_COUNT)}


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
        found = set(_OPTIONAL_PARAMETERS & self.inputs.keys())
        if self.has_choices:
            found.add("n")
        if {"guide_type", "guide"} <= self.inputs.keys():
            found.add("response_format")
        if f"return {LOG_PROBS}" in self.inputs and LOG_PROBS in self.outputs:
            found.add("logprobs")
        return frozenset(found)

    @property
    def has_choices(self) -> bool:
        """One request can have several answers."""
        return "n" in self.inputs and SEQUENCE in self.outputs

    def without_choices(self) -> "Contract":
        """The same contract, for an engine that makes one answer whatever it is asked."""
        return replace(self, inputs={field: tensor for field, tensor in self.inputs.items() if field != "n"})

    def __str__(self) -> str:
        unit = "tokens" if self.kind == "raw" else "text deltas"
        streaming = "one answer" if not self.decoupled else "cumulative text" if self.cumulative else unit
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
    outputs = {
        field: name
        for field, names in _OUTPUTS[kind].items()
        if (name := next((name for name in names if name in returned), None)) is not None
    }
    for field in _INDISPENSABLE[kind]:
        if field not in outputs:
            name = _OUTPUTS[kind][field][0]
            raise ContractError(f"Model {metadata.name!r} has no output {name}; it returns {_list(returned)}.")
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
    contract = Contract(
        kind=kind,
        model=metadata.name,
        batched=config.max_batch_size > 0,
        decoupled=config.model_transaction_policy.decoupled,
        cumulative=kind == "llmapi" or accumulates.strip().lower() in ("true", "1"),
        inputs=inputs,
        outputs=outputs,
    )
    steps = kind == "raw" or len(config.ensemble_scheduling.step) > 0
    return contract if contract.decoupled and steps else contract.without_choices()


def _kind(model: str, declared: Mapping[str, str]) -> Kind:
    if "sampling_param_max_tokens" in declared and "text_input" in declared:
        return "llmapi"
    if "text_input" in declared and "max_tokens" in declared:
        return "ensemble"
    if {"input_ids", "input_lengths", "request_output_len"} <= declared.keys():
        return "raw"
    raise ContractError(
        f"Model {model!r} takes {_list(declared)}: neither TensorRT-LLM's ensemble (text_input, max_tokens),"
        " nor its engine (input_ids, input_lengths, request_output_len), nor its LLM-API model (text_input,"
        " sampling_param_max_tokens), so it cannot be served."
    )


def _list(names: Iterable[str]) -> str:
    """Names for a sentence, the first few of them."""
    ordered = sorted(names)
    return ", ".join(ordered[:8]) + (" and more" if len(ordered) > 8 else "") if ordered else "nothing"
