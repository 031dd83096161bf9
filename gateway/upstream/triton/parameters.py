"""The OpenAI body of a text request as typed parameters, checked.

Values are decoded one by one from the body's raw JSON, so that an error can name the parameter and nothing else of the
body is parsed. JSON null means absent, as OpenAI's API has it. Ranges are those of the OpenAI API; where it has no such
parameter (`top_k`, `min_tokens`, `repetition_penalty`), those of TensorRT-LLM.

TensorRT-LLM wants a limit of new tokens with every request, which OpenAI's API does not: a request without one gets
`DEFAULT_COMPLETION_TOKENS` (OpenAI's own default for completions) or `DEFAULT_CHAT_TOKENS`. OpenAI lets a chat go on to
the end of the context, but the engine refuses a limit beyond its context, whose size it does not tell.

Left to itself TensorRT-LLM decodes greedily unless it is given `top_k` or `top_p`, whatever the temperature, and
draws with seed 0, the same answer every time. OpenAI's clients expect to get what their temperature says, 1 by
default, and a new answer each time. So a request that is not greedy is always sent a `top_p` (OpenAI's default is 1)
and a seed.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from router.errors import ApiError, invalid

DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_CHAT_TOKENS = 1024
STOP_COUNT_LIMIT = 4
"""Stop strings in a request, as in the OpenAI API."""
STOP_LENGTH_LIMIT = 1000
"""Characters in one of them; what may be its beginning is held back, so it cannot be endless."""
CHOICE_LIMIT = 128
"""Answers to one request, as in the OpenAI API."""

Fields = dict[str, msgspec.Raw]

_INT32_MAX = 2**31 - 1
_TokenLimit = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Stop = Annotated[str, Meta(max_length=STOP_LENGTH_LIMIT)]

_TYPES: dict[str, tuple[Any, str]] = {
    "max_tokens": (_TokenLimit, "a whole number of at least 1"),
    "max_completion_tokens": (_TokenLimit, "a whole number of at least 1"),
    "temperature": (Annotated[float, Meta(ge=0, le=2)], "a number from 0 to 2"),
    "top_p": (Annotated[float, Meta(ge=0, le=1)], "a number from 0 to 1"),
    "top_k": (Annotated[int, Meta(ge=-1, le=_INT32_MAX)], "a whole number of at least -1"),
    "seed": (Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)], "a whole number of 64 bits"),
    "stop": (
        _Stop | Annotated[list[_Stop], Meta(max_length=STOP_COUNT_LIMIT)],
        f"a string or a list of at most {STOP_COUNT_LIMIT} strings, each of at most {STOP_LENGTH_LIMIT} characters",
    ),
    "presence_penalty": (_Penalty, "a number from -2 to 2"),
    "frequency_penalty": (_Penalty, "a number from -2 to 2"),
    "repetition_penalty": (Annotated[float, Meta(gt=0, le=100)], "a number above 0 and at most 100"),
    "min_tokens": (Annotated[int, Meta(ge=0, le=_INT32_MAX)], "a whole number of at least 0"),
    "logprobs": (
        bool | Annotated[int, Meta(ge=0, le=0)],
        "true in a chat, 0 for a completion: this model tells the probability of the chosen tokens only",
    ),
    "response_format": (dict[str, msgspec.Raw], "an object"),
    "n": (Annotated[int, Meta(ge=1, le=CHOICE_LIMIT)], f"a whole number from 1 to {CHOICE_LIMIT}"),
    "prompt": (str | Annotated[list[str], Meta(min_length=1, max_length=1)], "a string"),
    "messages": (Annotated[list[dict[str, Any]], Meta(min_length=1)], "a list of at least one message object"),
    "chat_template_kwargs": (dict[str, Any], "an object"),
    "add_generation_prompt": (bool, "true or false"),
}
_DECODERS = {name: (msgspec.json.Decoder(type_ | None), what) for name, (type_, what) in _TYPES.items()}
_STRING = msgspec.json.Decoder(str)
_OBJECT = msgspec.json.Decoder(Fields)
_SAMPLING = ("seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")


class Chat(Struct, frozen=True):
    """The conversation of a chat request: messages with their content made plain text."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    template_kwargs: dict[str, Any]


class Parameters(Struct, frozen=True):
    """How to generate. `sampling` maps the contract's fields to values; what the client left out is not in it."""

    max_tokens: int
    stop: tuple[str, ...]
    sampling: dict[str, float | int | str]
    logprobs: bool = False
    """The answer is to tell the chosen tokens' log probabilities."""
    n: int = 1
    """Answers to make."""


def read_parameters(body: Fields, *, chat: bool, seed: int, pool_stop: tuple[str, ...] = ()) -> Parameters:
    """Sampling parameters and limits of a request.

    `seed` (63 bits) is for a request that brings none; `pool_stop` are the pool's own stop strings.

    Raises a 400 ApiError that names the parameter.
    """
    limit = _value(body, "max_completion_tokens")
    if limit is None:
        limit = _value(body, "max_tokens")
    if limit is None:
        limit = DEFAULT_CHAT_TOKENS if chat else DEFAULT_COMPLETION_TOKENS
    stop = _value(body, "stop") or ()
    stops = (stop,) if isinstance(stop, str) else stop
    sampling: dict[str, float | int | str] = {
        name: value for name in _SAMPLING if (value := _value(body, name)) is not None
    }
    temperature, top_p, top_k = (_value(body, name) for name in ("temperature", "top_p", "top_k"))
    if temperature is not None:
        sampling["temperature"] = temperature
    if temperature == 0 or top_p == 0:
        # Greedy. The engine refuses a top_p of 0, and some releases divide by the temperature.
        sampling["top_k"] = 1
    else:
        sampling.setdefault("seed", seed)
        sampling["top_p"] = 1.0 if top_p is None else top_p
        if top_k is not None and top_k > 0:
            sampling["top_k"] = top_k
    distinct = dict.fromkeys(text for text in (*stops, *pool_stop) if text)
    sampling |= _guide(body)
    logprobs = _value(body, "logprobs")
    wants_logprobs = logprobs is not None and logprobs is not False
    return Parameters(limit, tuple(distinct), sampling, wants_logprobs, _value(body, "n") or 1)


def read_prompt_text(body: Fields) -> str:
    """The raw prompt of a completion request. Raises a 400 ApiError."""
    prompt = _required(body, "prompt")
    text: str = prompt if isinstance(prompt, str) else prompt[0]
    if not text:
        raise invalid("'prompt' must not be empty.", param="prompt", code="empty_prompt")
    return text


def read_chat(body: Fields) -> Chat:
    """The conversation of a chat request. Raises a 400 ApiError."""
    messages = _required(body, "messages")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise _malformed(f"messages[{index}].role", "a string")
        message["content"] = _plain_text(message.get("content"), f"messages[{index}].content")
    generate = _value(body, "add_generation_prompt")
    return Chat(messages, generate is not False, _value(body, "chat_template_kwargs") or {})


def _guide(body: Fields) -> dict[str, str]:
    """What holds the answer to a form, as TensorRT-LLM is told it; nothing for plain text."""
    given = _value(body, "response_format")
    if given is None:
        return {}
    kind = _part(given, "type", _STRING, "response_format.type", "text, json_object or json_schema")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"guide_type": "json"}
    if kind != "json_schema":
        raise _malformed("response_format.type", "text, json_object or json_schema")
    outer = _part(given, "json_schema", _OBJECT, "response_format.json_schema", "an object")
    _part(outer, "schema", _OBJECT, "response_format.json_schema.schema", "a JSON schema object")
    return {"guide_type": "json_schema", "guide": bytes(outer["schema"]).decode()}


def _part(of: Fields, name: str, decoder: msgspec.json.Decoder[Any], where: str, what: str) -> Any:
    try:
        return decoder.decode(of[name])
    except (KeyError, msgspec.DecodeError, RecursionError):
        raise _malformed(where, what) from None


def _plain_text(content: Any, where: str) -> str:
    """Content as the text that templates expect: parts on lines of their own, null (a message of tool calls) empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _malformed(where, "a string or a list of parts")
    texts = []
    for position, part in enumerate(content):
        text = (
            part.get(part.get("type")) if isinstance(part, dict) and part.get("type") in ("text", "refusal") else None
        )
        if not isinstance(text, str):
            raise _malformed(f"{where}[{position}]", "a text part: this model takes text only")
        texts.append(text)
    return "\n".join(texts)


def _value(body: Fields, name: str) -> Any:
    raw = body.get(name)
    if raw is None:
        return None
    decoder, what = _DECODERS[name]
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise _malformed(name, what) from None


def _required(body: Fields, name: str) -> Any:
    value = _value(body, name)
    if value is None:
        raise invalid(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    return value


def _malformed(where: str, what: str) -> ApiError:
    return invalid(f"Invalid value for '{where}': it must be {what}.", param=where, code="invalid_value")
