"""The tensors of the embedded Triton model: those of TensorRT-LLM's `ensemble`, as far as they concern text.

A client written for TensorRT-LLM's inflight-batcher `ensemble` needs no change here: names, datatypes, ranks and the
leading batch dimension (`max_batch_size` above zero) are the same. Left out are the tensors that carry weights or
embeddings (LoRA, prompt tuning) and the logits outputs: a client that builds requests from the declared inputs sees
that they are absent, which is more honest than declaring them and refusing every value.
"""

from dataclasses import dataclass
from pathlib import Path

MODEL = "ensemble"
VERSION = "1"
TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default size of a KV block; llama.cpp itself counts cells, so blocks are counted from tokens."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One declared tensor: Triton datatype without its `TYPE_` prefix, dims without the batch dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True


def _tensors(datatype: str, names: str, dims: tuple[int, ...] = (1,)) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, datatype, dims) for name in names.split())


INPUTS: tuple[Tensor, ...] = (
    Tensor("text_input", "STRING", optional=False),
    Tensor("max_tokens", "INT32", optional=False),
    *_tensors("STRING", "decoder_text_input guided_decoding_guide_type guided_decoding_guide"),
    *_tensors("STRING", "bad_words stop_words embedding_bias_words", (-1,)),
    *_tensors("FP32", "embedding_bias_weights", (-1,)),
    *_tensors("INT32", "num_return_sequences end_id pad_id top_k min_tokens beam_width"),
    *_tensors("FP32", "top_p temperature length_penalty repetition_penalty presence_penalty frequency_penalty"),
    *_tensors("UINT64", "seed"),
    *_tensors("BOOL", "stream exclude_input_in_output return_log_probs return_perf_metrics"),
    *_tensors("BOOL", "return_num_input_tokens return_num_output_tokens"),
)

OUTPUTS: tuple[Tensor, ...] = (
    *_tensors("STRING", "text_output", (-1,)),
    *_tensors("FP32", "cum_log_probs", (-1,)),
    *_tensors("FP32", "output_log_probs", (-1, -1)),
    *_tensors("INT32", "batch_index sequence_index"),
    *_tensors("INT32", "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks"),
    *_tensors("INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"),
    *_tensors("INT32", "num_input_tokens num_output_tokens"),
)


def render_config(*, weights: Path, pid_file: Path) -> str:
    """Render the model's `config.pbtxt`.

    `dynamic_batching` is absent on purpose: on a decoupled model it delays bursts in steps of half a second.
    """
    sections = [
        f'name: "{MODEL}"',
        'backend: "python"',
        "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }",
        "instance_group [{ count: 1 kind: KIND_CPU }]",
        *(_render("input", tensor) for tensor in INPUTS),
        *(_render("output", tensor) for tensor in OUTPUTS),
        _parameter("weights", weights),
        _parameter("pid_file", pid_file),
    ]
    return "\n".join(sections) + "\n"


def _render(kind: str, tensor: Tensor) -> str:
    dims = ", ".join(str(dim) for dim in tensor.dims)
    optional = " optional: true" if kind == "input" and tensor.optional else ""
    return f'{kind} [{{ name: "{tensor.name}" data_type: TYPE_{tensor.datatype} dims: [{dims}]{optional} }}]'


def _parameter(key: str, value: Path) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{_quoted(str(value))}" }} }}'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
