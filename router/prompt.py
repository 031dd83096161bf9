"""From a request body to the prompt view: what routing needs to know, and nothing more.

The body is decoded one level deep: every value stays the raw JSON it was, to be sent on byte for byte, and only the
values that routing reads are parsed. Parameters whose type is fixed by the OpenAI API are checked here, so that no
engine is bothered with `"temperature": "hot"` and every engine's clients get the same answer; ranges are left to the
engines, which differ.

**Needs.** Every engine streams text for messages or a prompt; beyond the `UNIVERSAL` parameters they differ. Any other
parameter set to something else than its neutral value becomes a *need* that an endpoint must declare itself capable
of, so a request goes to an engine that can do what it asks for, or is refused by the parameter's name; it is never
answered with the parameter silently ignored. A need on the form of a parameter is written `parameter:form`:
`messages:image_url`, `prompt:batch`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from router.errors import ApiError, invalid
from router.prefix import (
    CONTENT_MARK,
    MESSAGE_MARK,
    RAW_PROMPT_KEY_BYTES,
    chain_seed,
    conversation_key,
    prefix_chain,
    session_key,
)
from router.tenants import is_own_salt

Api = Literal["chat.completions", "completions", "embeddings", "kserve"]
Fields = dict[str, msgspec.Raw]
"""A JSON object, its values unparsed."""

UNIVERSAL = frozenset(
    {
        *("model", "messages", "prompt", "input", "stream", "stream_options", "stop"),
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "parallel_tool_calls"),
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("cache_salt", "prompt_cache_key", "prompt_cache_retention"),
    }
)
"""Parameters that every engine honours, or that ask nothing of an engine."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "top_k": (0, -1),
    "min_p": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "encoding_format": ("float",),
    "reasoning_effort": ("none",),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "ignore_eos": (False,),
}
"""Values that ask for what happens anyway."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One chat message, as far as routing reads it."""

    role: str
    content: str | list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw | None = None


_TYPES: dict[str, Any] = {
    "model": str,
    "stream": bool | None,
    "stream_options": StreamOptions | None,
    "max_tokens": int | None,
    "max_completion_tokens": int | None,
    "temperature": float | None,
    "top_p": float | None,
    "n": int | None,
    "stop": str | list[str] | None,
    "seed": int | None,
    "presence_penalty": float | None,
    "frequency_penalty": float | None,
    "logit_bias": dict[str, float] | None,
    "logprobs": bool | int | None,
    "top_logprobs": int | None,
    "tools": list[dict[str, Any]] | None,
    "response_format": dict[str, Any] | None,
    "user": str | None,
    "cache_salt": str | None,
}
_MAY_BE_EMPTY = frozenset({"assistant", "function"})
"""Roles whose messages may have no content, tool calls say instead what they did."""
_NULL = msgspec.Raw(b"null")
_DECODERS = {name: msgspec.json.Decoder(type_) for name, type_ in _TYPES.items()}
_FIELDS = msgspec.json.Decoder(Fields)
_MESSAGES = msgspec.json.Decoder(list[Message])
_PART = msgspec.json.Decoder(Part)
_PROMPT = msgspec.json.Decoder(str | list[str | int | list[int]])
_ANY = msgspec.json.Decoder()


class PromptView(msgspec.Struct, frozen=True):
    """What routing knows of one request."""

    api: Api
    model: str
    stream: bool
    include_usage: bool
    needs: frozenset[str]
    parts: tuple[bytes | str, ...]
    """The prompt's canonical bytes (`router.prefix`) in parts; text stands for its UTF-8. Joined only on demand."""
    seed: int
    """Seed of its prefix chain (64 bits)."""
    key: int
    """Conversation key (64 bits)."""
    pinned: bool = False
    """Only the conversation's home will do, however loaded: it holds state that is nowhere else."""
    completion_tokens: int | None = None
    """How many its answer may have at most, as far as it says; over all of its choices."""

    @property
    def canonical(self) -> bytes:
        """The prompt's canonical bytes."""
        return b"".join([part.encode() if isinstance(part, str) else part for part in self.parts])

    def chain(self) -> list[int]:
        """The hashes of the prompt's whole blocks."""
        return prefix_chain(self.canonical, self.seed)


def read_fields(body: bytes) -> Fields:
    """The top level of a JSON object. Raises a 400 ApiError for anything else."""
    try:
        if not body.isascii():
            body.decode()  # values that are passed on unread must be JSON, too
        return _FIELDS.decode(body)
    except RecursionError:
        raise invalid("The request body is nested too deeply.", code="invalid_json") from None
    except msgspec.ValidationError:
        raise invalid("The request body must be a JSON object.", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise invalid(f"The request body is not UTF-8 (byte {error.start}).", code="invalid_json") from None
    except msgspec.DecodeError as error:
        reason = "it is empty" if not body else str(error)
        raise invalid(f"The request body is not valid JSON: {reason}.", code="invalid_json") from None


def isolate(fields: Fields, tenants_salt: str) -> None:
    """Begin the `cache_salt` of a request with that of its tenant, which is empty where there is none.

    Raises a 400 ApiError for a client's own salt that could be another tenant's, or is none.
    """
    raw = fields.get("cache_salt")
    if raw is None and not tenants_salt:
        return
    if raw is None:
        fields["cache_salt"] = _as_json(tenants_salt)
        return
    salt = _value("cache_salt", raw) or ""
    if tenants_salt:
        fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(tenants_salt + salt))
    elif is_own_salt(salt):
        raise invalid("A 'cache_salt' that begins so is reserved. Choose another.", param="cache_salt")


@lru_cache(maxsize=1024)
def _as_json(salt: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(salt))


def read_prompt(api: Api, fields: Fields, session: str | None = None) -> PromptView:
    """The view of a request to `api`; `session` is the client's own name for the conversation.

    Raises a 400 ApiError that names the parameter which is missing or malformed.
    """
    values = {name: _value(name, raw) for name, raw in fields.items() if name in _DECODERS}
    model = values.get("model")
    if not model:
        raise invalid("You must provide a model parameter.", param="model", code="missing_required_parameter")
    stream = bool(values.get("stream"))
    options = values.get("stream_options")
    if options is not None and not stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    seed = chain_seed(model, values.get("cache_salt") or "")
    needs = {name for name, raw in fields.items() if name not in UNIVERSAL and not _neutral(name, raw)}
    if "n" in needs and fields.get("best_of") == fields["n"]:
        needs.discard("best_of")  # the best n of n are all of them
    if api == "chat.completions":
        parts, opening = _canonical_chat(fields, needs)
    elif api == "completions":
        needs.add("prompt")
        parts = (_canonical_prompt(fields, needs),)
        opening = (parts[0][:RAW_PROMPT_KEY_BYTES],)
    else:
        needs.add("input")
        parts = (bytes(_required(fields, "input")),)
        opening = (parts[0][:RAW_PROMPT_KEY_BYTES],)
    key = session_key(session) if session else conversation_key(opening, seed)
    include_usage = bool(options and options.include_usage)
    longest = 0 if api == "embeddings" else values.get("max_completion_tokens") or values.get("max_tokens")
    if longest and (choices := values.get("n")):
        longest *= max(choices, 1)
    return PromptView(api, model, stream, include_usage, frozenset(needs), parts, seed, key, completion_tokens=longest)


def _value(name: str, raw: msgspec.Raw) -> Any:
    try:
        return _DECODERS[name].decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(name, error) from None


def _malformed(name: str, error: Exception) -> ApiError:
    """A 400 that says where in parameter `name` the mistake is; msgspec's paths start with `$`."""
    text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    reason, _, path = text.partition(" - at `$")
    where = name + path.rstrip("`")
    return invalid(f"Invalid value for '{where}': {reason}.", param=where, code="invalid_type")


def _required(fields: Fields, name: str) -> msgspec.Raw:
    raw = fields.get(name)
    if raw is None or raw == _NULL:
        raise invalid(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    return raw


def _neutral(name: str, raw: msgspec.Raw) -> bool:
    if raw == _NULL:
        return True
    neutral = NEUTRAL.get(name)
    if neutral is None or memoryview(raw).nbytes > 64:
        return False
    try:
        decoded = _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(name, error) from None
    return any(type(decoded) is not bool and decoded == v if type(v) is not bool else decoded is v for v in neutral)


def _canonical_chat(fields: Fields, needs: set[str]) -> tuple[tuple[bytes | str, ...], Sequence[bytes | str]]:
    """The canonical parts of tools and messages, and those of them that open the conversation."""
    raw = _required(fields, "messages")
    needs.add("messages")
    try:
        messages = _MESSAGES.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed("messages", error) from None
    if not messages:
        raise invalid("'messages' must hold at least one message.", param="messages", code="empty_array")
    parts: list[bytes | str] = [bytes(fields["tools"])] if "tools" in needs else []
    opening = 0
    for index, message in enumerate(messages):
        parts += (MESSAGE_MARK, message.role, CONTENT_MARK)
        content = message.content
        if isinstance(content, str):
            parts.append(content)
        elif content is None:
            if message.role not in _MAY_BE_EMPTY:
                raise invalid(
                    f"Missing required parameter: 'messages[{index}].content'.",
                    param=f"messages[{index}].content",
                    code="missing_required_parameter",
                )
        else:
            parts += [_canonical_part(part, index, position, needs) for position, part in enumerate(content)]
        if message.tool_calls is not None:
            needs.add("tools")
            parts.append(bytes(message.tool_calls))
        if not opening and message.role == "user":
            opening = len(parts)
    return tuple(parts), parts[:opening] if opening else parts


def _canonical_part(raw: msgspec.Raw, message: int, position: int, needs: set[str]) -> bytes | str:
    try:
        part = _PART.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(f"messages[{message}].content[{position}]", error) from None
    if part.type == "text":
        return part.text or ""
    if part.type != "refusal":
        needs.add(f"messages:{part.type}")
    return bytes(raw)


def _canonical_prompt(fields: Fields, needs: set[str]) -> bytes:
    """Canonical bytes of a raw prompt: text as it is, anything else as its JSON."""
    raw = _required(fields, "prompt")
    try:
        prompt = _PROMPT.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed("prompt", error) from None
    if not prompt or prompt == [""]:
        raise invalid("'prompt' must not be empty.", param="prompt", code="empty_prompt")
    if isinstance(prompt, str):
        return prompt.encode()
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0].encode()
    needs.add("prompt:batch")
    return bytes(raw)
