"""What a request to the embedded `ensemble` asks for, and how llama.cpp is asked to do it.

The meaning of every input is TensorRT-LLM's, which differs from an OpenAI API in ways a client must know:

- without `top_k` and `top_p` decoding is greedy, whatever the temperature says; temperature 0 is greedy too;
- without `seed` the seed is 0, so equal requests get equal answers;
- a non-streaming answer repeats the prompt unless `exclude_input_in_output` is set; a streaming one never does;
- `end_id` -1 means that no token ends the answer;
- `min_tokens` holds back the end token only, stop words end the answer at any length.

One difference remains: llama.cpp leaves the stop word out of the text. What llama.cpp cannot do is refused with
`UnsupportedInputError`, which names the input; nothing is dropped in silence.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.local.llm import SLOT_TOKENS

END_TOKEN: Final = 2
"""`<|im_end|>` in SmolLM2's vocabulary."""
NO_END_TOKEN: Final = -1

TensorValue = Any
"""A scalar (str, int, float, bool) or a list of them, as the model read it from the tensor."""


class UnsupportedInputError(ValueError):
    """An input has a value this engine cannot honour; the message names the input and says what it accepts."""


@dataclass(frozen=True, slots=True)
class EnsembleRequest:
    """One request, checked: everything in it will be honoured."""

    prompt: str
    max_tokens: int
    min_tokens: int
    stream: bool
    repeat_prompt: bool
    log_probs: bool
    perf_metrics: bool
    num_input_tokens: bool
    num_output_tokens: bool
    sampling: dict[str, Any] = field(repr=False)
    """The part of llama.cpp's body that says how tokens are chosen and where the answer ends."""

    def body(self, *, prompt: str, max_tokens: int, hold_end: bool) -> dict[str, Any]:
        """Build llama.cpp's completion body for one stretch of the answer.

        `return_progress` is asked for although nobody reads it: it makes llama.cpp call back after every batch of the
        prefill, which is the only moment to see a cancel. `timings_per_token` tells how many tokens a piece of text
        stands for (a character split over tokens comes as one piece).
        """
        body = self.sampling | {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "cache_prompt": True,
            "return_progress": True,
            "timings_per_token": True,
        }
        if hold_end:
            body["ignore_eos"] = True
        return body


def parse_request(values: Mapping[str, TensorValue], tokenize: Callable[[str], list[int]]) -> EnsembleRequest:
    """Check the inputs of one request.

    `values` holds the inputs that were sent, by name. `tokenize` turns a word into token ids, without special tokens;
    it is called for `bad_words` and `embedding_bias_words` only.

    Raises:
        UnsupportedInputError: a value out of range, or one llama.cpp cannot honour.
    """
    _refuse_unsupported(values)
    prompt: str = values["text_input"]
    max_tokens: int = values["max_tokens"]
    min_tokens: int = values.get("min_tokens", 0)
    if not prompt:
        raise UnsupportedInputError("text_input is empty: send at least one character")
    if max_tokens < 1:
        raise UnsupportedInputError(f"max_tokens is {max_tokens}: send 1 or more")
    if min_tokens < 0:
        raise UnsupportedInputError(f"min_tokens is {min_tokens}: send 0 or more")
    stream = bool(values.get("stream", False))
    return EnsembleRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stream=stream,
        repeat_prompt=not stream and not values.get("exclude_input_in_output", False),
        log_probs=bool(values.get("return_log_probs", False)),
        perf_metrics=bool(values.get("return_perf_metrics", False)),
        num_input_tokens=bool(values.get("return_num_input_tokens", False)),
        num_output_tokens=bool(values.get("return_num_output_tokens", False)),
        sampling=_sampling(values) | _ending(values) | _bias(values, tokenize) | _guide(values),
    )


def _refuse_unsupported(values: Mapping[str, TensorValue]) -> None:
    for name in ("num_return_sequences", "beam_width"):
        if values.get(name, 1) != 1:
            raise UnsupportedInputError(f"{name} is {values[name]}: this engine gives one answer per request, send 1")
    if values.get("decoder_text_input"):
        raise UnsupportedInputError("decoder_text_input is set: this engine is no encoder-decoder model, leave it out")


def _sampling(values: Mapping[str, TensorValue]) -> dict[str, Any]:
    temperature: float = values.get("temperature", 1.0)
    top_k: int = values.get("top_k", 0)
    top_p: float = values.get("top_p", 0.0)
    repetition: float = values.get("repetition_penalty", 1.0)
    seed: int = values.get("seed", 0)
    if not temperature >= 0:
        raise UnsupportedInputError(f"temperature is {temperature}: send 0 or more")
    if top_k < 0:
        raise UnsupportedInputError(f"top_k is {top_k}: send 0 or more")
    if not 0 <= top_p <= 1:
        raise UnsupportedInputError(f"top_p is {top_p}: send a value from 0 to 1")
    if not repetition > 0:
        raise UnsupportedInputError(f"repetition_penalty is {repetition}: send a value above 0")
    greedy = temperature == 0 or top_k == 1 or (top_k == 0 and top_p == 0)
    sampling: dict[str, Any] = {
        "temperature": 0.0 if greedy else temperature,
        "top_k": top_k,
        "top_p": top_p if top_p > 0 else 1.0,
        "min_p": 0.0,
        "repeat_last_n": SLOT_TOKENS,
        "repeat_penalty": repetition,
        "presence_penalty": values.get("presence_penalty", 0.0),
        "frequency_penalty": values.get("frequency_penalty", 0.0),
        # llama.cpp's seed has 32 bits and its largest value means "choose one"
        "seed": (seed ^ (seed >> 32)) % 0xFFFFFFFF,
    }
    if values.get("return_log_probs", False):
        sampling["n_probs"] = 1
    return sampling


def _ending(values: Mapping[str, TensorValue]) -> dict[str, Any]:
    ending: dict[str, Any] = {"stop": [word for word in values.get("stop_words", []) if word]}
    end_id: int = values.get("end_id", END_TOKEN)
    if end_id == NO_END_TOKEN:
        ending["ignore_eos"] = True
    elif end_id != END_TOKEN:
        raise UnsupportedInputError(
            f"end_id is {end_id}: this engine ends at {END_TOKEN}, or never with {NO_END_TOKEN}"
        )
    return ending


def _bias(values: Mapping[str, TensorValue], tokenize: Callable[[str], list[int]]) -> dict[str, Any]:
    """llama.cpp biases tokens, not sequences of them, so each word must be one token."""
    biased: list[str] = values.get("embedding_bias_words", [])
    weights: list[float] = values.get("embedding_bias_weights", [])
    if len(biased) != len(weights):
        raise UnsupportedInputError(
            f"embedding_bias_words has {len(biased)} words and embedding_bias_weights {len(weights)}: send as many"
        )
    wanted: list[tuple[str, str, float | bool]] = [
        *(("bad_words", word, False) for word in values.get("bad_words", [])),
        *(("embedding_bias_words", word, weight) for word, weight in zip(biased, weights, strict=True)),
    ]
    bias: list[list[int | float | bool]] = []
    for name, word, weight in wanted:
        if not word:
            continue
        tokens = tokenize(word)
        if len(tokens) != 1:
            raise UnsupportedInputError(
                f"{name}: {word!r} is {len(tokens)} tokens, this engine takes words of one token"
            )
        bias.append([tokens[0], weight])
    return {"logit_bias": bias} if bias else {}


def _guide(values: Mapping[str, TensorValue]) -> dict[str, Any]:
    kind: str = values.get("guided_decoding_guide_type", "")
    guide: str = values.get("guided_decoding_guide", "")
    match kind:
        case "":
            if guide:
                raise UnsupportedInputError(
                    "guided_decoding_guide is set without guided_decoding_guide_type: send both"
                )
            return {}
        case "json":
            return {"json_schema": {"type": "object"}}
        case "json_schema":
            try:
                return {"json_schema": json.loads(guide)}
            except ValueError as error:
                raise UnsupportedInputError(f"guided_decoding_guide is not JSON: {error}") from error
        case "ebnf_grammar":
            return {"grammar": guide}
        case _:
            raise UnsupportedInputError(
                f"guided_decoding_guide_type is {kind!r}: this engine knows json, json_schema and ebnf_grammar"
            )
