"""Chat messages -> prompt text, for engines that take raw text.

Triton's text models do not know what a chat is: the model's own Jinja template has to be rendered in front of them. The
template belongs to the pool and is run in Jinja's immutable sandbox all the same, since templates are downloaded with
models and the messages they are given come from strangers. What templates may expect is what the `transformers` library
gives them: trimmed blocks, loop controls, `tojson` without escapes for non-ASCII, `raise_exception`, `strftime_now`,
the `{% generation %}` block (which marks the assistant's text for training and renders as its content), and the
variables `messages`, `tools`, `documents`, `add_generation_prompt`, `bos_token` and `eos_token`.

A template is compiled once per text. Its output is cut short at `RENDERED_LIMIT`: messages are limited with the
request's body, but a template may repeat them.

Double BOS: most templates begin with the tokenizer's beginning-of-sequence token, and so does TensorRT-LLM's
preprocessing. With `engine_adds_bos` a leading one is taken off the text.
"""

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import invalid
from router.spec.fleet import ChatTemplateSpec

RENDERED_LIMIT = 64 * 1024 * 1024
"""Characters of rendered text."""

_RESERVED = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token"))


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` renders as its content."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _environment()


@functools.lru_cache(maxsize=256)
def compile_template(text: str) -> jinja2.Template:
    """A template ready to render. Raises ValueError, with the line, if it is no template."""
    try:
        return _ENVIRONMENT.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template has a mistake in line {error.lineno}: {error.message}") from None


def render_chat(
    spec: ChatTemplateSpec,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    keep_bos: bool = False,
) -> str:
    """The prompt for `messages`, whose `content` is plain text.

    `kwargs` (OpenAI clients' `chat_template_kwargs`) become variables of the template. With `keep_bos` nothing is taken
    off the text, because no engine tokenises it. Raises a 400 ApiError if the
    template refuses the messages or fails on them, ValueError if it does not compile.
    """
    reserved = _RESERVED.intersection(kwargs or ())
    if reserved:
        raise invalid(
            f"'chat_template_kwargs' must not set {', '.join(sorted(reserved))}.", param="chat_template_kwargs"
        )
    variables = {"tools": None, "documents": None, **(kwargs or {})}
    variables |= {
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": spec.bos,
        "eos_token": spec.eos,
    }
    template = compile_template(spec.text or "")
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > RENDERED_LIMIT:
                raise jinja2.TemplateError("the rendered prompt is too long")
    except Exception as error:  # a template may fail in any way Python code can
        raise invalid(
            f"The model's chat template cannot render these messages: {str(error) or type(error).__name__}",
            param="messages",
            code="chat_template_error",
        ) from None
    text = "".join(pieces)
    return text.removeprefix(spec.bos) if spec.engine_adds_bos and spec.bos and not keep_bos else text
